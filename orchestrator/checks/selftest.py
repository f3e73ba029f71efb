"""`paceline selftest`: a tiny random model on a backend, compared with the plain reference on the CPU.

It makes a report to read, or to send back from untested hardware. The integers of the noise are checked first, because
a device that computes them in floating point gives other tokens although every logit is right.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from paceline.auto import AutoDecoder, Sampler, SamplingDecoder
from paceline.checks import doctor
from paceline.checks.findings import Finding
from paceline.core import noise
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import seed_row
from paceline.decoder import steps
from paceline.decoder.backends.base import Graph, make
from paceline.decoder.backends.registry import BACKENDS
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.graph_key import GraphKey
from paceline.generator import SpeculativeGenerator
from paceline.outputs import GenerationResult

VOCABULARY, POSITIONS = 512, 256
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28]]
NEW = 32
K = 3
NEAR_TIE = 0.02
"""Share of the logits' root mean square by which two tokens may differ whose order depends on how bf16 is rounded."""


class NoiseStep(nn.Module):
    """The integers that the noise is made of, and the noise."""

    def forward(self, seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Compute noise: seeds [B, 4], positions [B, T] int32 -> upper and lower halves of 32-bit random values [B, T,
        V] int32, uniform numbers [B, T], noise [B, T, V].
        """
        ids = torch.arange(VOCABULARY, dtype=torch.int32, device=seeds.device)
        high, low = noise.words(noise.row_keys(seeds, positions, noise.TARGET), ids)
        return high, low, noise.uniform(seeds, positions, noise.ACCEPT), noise.gumbel_of_words(high, low, traced=True)


def known(backend: str) -> None:
    if backend not in BACKENDS:
        raise ConfigurationError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}; use one of them")


def run(backend: str) -> Iterator[Finding]:
    """Every check, one after the other. A check that raises has failed, and the others still run."""
    yield _timed("noise", partial(_noise, backend))
    with tempfile.TemporaryDirectory(prefix="paceline-selftest-") as folder:
        target, draft = Path(folder) / "target", Path(folder) / "draft"
        save_models(target, draft)
        for amp in ("f32", "bf16"):
            yield _timed(f"plain, {amp}", partial(_plain, backend, target, amp))
        for fused in (False, True):
            name = "fused" if fused else "two steps"
            yield _timed(f"speculative, {name}", partial(_pair, backend, target, draft, fused=fused))


def report(backend: str, checks: list[Finding]) -> str:
    """Return the report to send back: the checks, then the machine, as reported by `paceline doctor`."""
    head = f"backend {backend}, torch {torch.__version__}, {platform.platform()}"
    rows = [f"{'ok  ' if c.passed else 'FAIL'} {c.name} ({c.seconds:.1f} s): {c.seen}" for c in checks]
    return "\n".join([head, *rows, *(f"- {one.name}: {one.seen}" for one in doctor.examine())])


def save_models(target: Path, draft: Path) -> None:
    """A random target of two layers, and its first layer as the draft."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def model(layers: int) -> LlamaForCausalLM:
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=POSITIONS, tie_word_embeddings=False,
            bos_token_id=None, eos_token_id=None, num_hidden_layers=layers,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    torch.manual_seed(0)
    big, small = model(2), model(1)
    for name, parameter in big.named_parameters():
        mean, spread = (1.0, 0.1) if "norm" in name else (0.0, 0.05 if "layers.1." in name else 0.15)
        nn.init.normal_(parameter, mean, spread)
    small.load_state_dict(big.state_dict(), strict=False)
    big.save_pretrained(target)
    small.save_pretrained(draft)


def _timed(name: str, check: Callable[[], tuple[bool, str]]) -> Finding:
    begin = perf_counter()
    try:
        passed, seen = check()
    except Exception as error:  # on untested hardware anything may fail, and the report must contain it
        passed, seen = False, f"{type(error).__name__}: {error}"
    return Finding(name, "ok" if passed else "FAILED", seen, seconds=perf_counter() - begin)


def _noise(backend: str) -> tuple[bool, str]:
    seeds = torch.tensor([seed_row(1), seed_row(-7)], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 4095], [77, 1 << 20, 3]], dtype=torch.int32)
    step = NoiseStep()
    graph = Graph(GraphKey("selftest noise"), step, (seeds, positions), {"graph": "noise"})
    engine = make(backend)
    engine.record_noise_check(passed=False)  # from now on an older record is invalid
    got, expected = engine.compile(graph, lambda _line: None)(seeds, positions), step(seeds, positions)
    wrong = [int((one != other).sum()) for one, other in zip(got, expected, strict=True)]
    # The noise uses the backend's logarithm: two units in the last place of float32.
    size = expected[3].abs().clamp(min=1.0) * 2.0**-23
    apart = float(((got[3] - expected[3]).abs() / size).max())
    seen = (
        f"{wrong[0] + wrong[1]} of {2 * got[0].numel()} limbs differ, {wrong[2]} uniform numbers; noise {apart:.1f} ulp"
    )
    passed = sum(wrong[:3]) == 0 and apart <= 2
    if passed and engine.record_noise_check(passed=True):
        seen += "; recorded, so that requests may sample on this machine"
    return passed, seen


def _plain(backend: str, target: Path, amp: str) -> tuple[bool, str]:
    decoder = _load(backend, target, amp)
    return _against_eager(decoder, decoder, target=target, amp=amp)


def _pair(backend: str, target: Path, draft: Path, *, fused: bool) -> tuple[bool, str]:
    decoder = _load(backend, target, "f32")
    pair = SpeculativeGenerator(_load(backend, draft, "f32"), decoder, k=K, fused=fused)
    passed, seen = _against_eager(pair, decoder, target=target, amp="f32")
    from paceline.neuron.round_cost import expected_here

    times = graph_times(decoder, expected_here())
    return passed, f"{seen}; {pair.statistics.tau:.2f} tokens per round; {'; '.join(map(str, times))}"


def _against_eager(source: Sampler, decoder: SamplingDecoder, *, target: Path, amp: str) -> tuple[bool, str]:
    """Compare texts of a source over ``decoder`` with plain ones; only greedy ones in bf16, or if sampling is rejected.

    Backends round activations of bf16 matmuls differently, so texts may part at near-ties there.
    """
    if amp == "bf16":
        reference = _load("eager", target, amp)
        rows, expected = _texts(source, sampled=False), _texts(reference, sampled=False)
        gap = max(_gap(reference, *pair) for pair in zip(rows, expected, strict=True))
        seen = f"{_compared(rows, expected)[1]}, of greedy texts; the largest gap there is {gap:.1%} of the logits"
        return gap < NEAR_TIE, seen
    sampled = decoder.backend.sampling_refusal() is None
    passed, seen = _compared(_texts(source, sampled=sampled), _texts(_load("eager", target, amp), sampled=sampled))
    return passed, seen if sampled else f"{seen}, of greedy texts alone: the noise has not passed"


def _texts(source: Sampler, *, sampled: bool) -> list[list[int]]:
    variants: list[dict[str, Any]] = [{}]
    if sampled:
        variants.append({"do_sample": True, "seed": 11, "temperature": 1.1, "top_k": 40, "top_p": 0.95})
    results = [source.sample(PROMPTS, max_new_tokens=NEW, return_dict=True, **one) for one in variants]
    return [row for result in results if isinstance(result, GenerationResult) for row in result.sequences.tolist()]


def _gap(reference: SamplingDecoder, row: list[int], expected: list[int]) -> float:
    """Return the gap of the first two tokens that differ, as a share of the logits' root mean square; 0: none."""
    at = next((i for i, pair in enumerate(zip(row, expected, strict=False)) if len(set(pair)) > 1), None)
    if at is None:
        return 0.0 if len(row) == len(expected) else float("inf")
    with reference.held_by(expected[:at]):
        logits, _ = steps.prefill(reference, 0, expected[:at])
    line = logits.flatten()
    return float((line[row[at]] - line[expected[at]]).abs() / line.square().mean().sqrt())


def _compared(rows: list[list[int]], reference: list[list[int]]) -> tuple[bool, str]:
    total = right = 0
    for row, expected in zip(rows, reference, strict=True):
        total += len(expected)
        right += next((i for i, pair in enumerate(zip(row, expected, strict=False)) if len(set(pair)) > 1), len(row))
    return rows == reference, f"{right} of {total} tokens stand before the first that differs from the reference"


def _load(backend: str, folder: Path, amp: str) -> SamplingDecoder:
    decoder = AutoDecoder.from_pretrained(
        folder, batch_size=len(PROMPTS), n_positions=[POSITIONS], context_length_estimate=[16], amp=amp, backend=backend
    )
    decoder.on_graph = lambda _event: None  # compilations are part of the time of a check, and not announced
    return decoder


CALLS = 10

Expects = Callable[[Graph, int], float]
"""Function from a graph and a rank's number of vocabulary ids to calculated seconds."""


@dataclass(frozen=True, slots=True)
class TimedGraph:
    """Median seconds of a call, inputs and outputs included, and what is calculated where the chip is known."""

    name: str
    seconds: float
    expected: float | None

    def __str__(self) -> str:
        beside = "" if self.expected is None else f" ({self.expected * 1e3:.2f} by arithmetic)"
        return f"{self.name} {self.seconds * 1e3:.2f} ms{beside}"


def graph_times(
    decoder: CompiledDecoder, expects: Expects | None, *, clock: Callable[[], float] = perf_counter
) -> list[TimedGraph]:
    """Measure how long each graph of a decoder takes on this machine, next to the calculated time: call every compiled
    graph on inputs of its shapes. The caches lose their contents.
    """
    found = []
    width = -(-decoder.config.vocab_size // decoder.options.layout.degree)
    for graph, step in decoder.graphs():
        step(*graph.example)  # a first call may load the graph
        seconds = []
        for _ in range(CALLS):
            begin = clock()
            step(*graph.example)
            seconds.append(clock() - begin)
        expected = expects(graph, width) if expects else None
        found.append(TimedGraph(graph.name, median(seconds), expected))
    return found
