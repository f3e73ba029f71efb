"""Speed of the steps and of decoding, as ratios measured in one run. JSON on the last line.

    python benchmarks/decode.py                  everything (several minutes)
    python benchmarks/decode.py --part graphs    one random Llama shape: decode[1] and verify[5] against reading weights
    python benchmarks/decode.py --part host      what the host adds to a round of the demo pair
    python benchmarks/decode.py --part pair      tokens per second of the demo pair in every mode
    python benchmarks/decode.py --part widths    how often decode[1] and verify[5] disagree on the demo prompts
    python benchmarks/decode.py --part backends  how often native and eager disagree

Formats of weights, and llama.cpp beside them: benchmarks/formats.py.

Times are medians over interleaved repeats. Nothing else should run on the machine: a thread that is preempted inside
a parallel product stalls it for a scheduler slice.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Callable
from time import perf_counter

import torch
from common import PAIR, prompt_ids, prompts, publish
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from turns import Clock

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.core import noise
from paceline.core.acceptance.match import Match
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import Commit, DraftShape, Proposal, RoundLimits
from paceline.decoder.decoder import CompiledDecoder
from paceline.experiments.bench import bench_pair
from paceline.target.verifier import CompiledVerifier


def interleaved(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 5):
        for name, run in runs.items():
            begin = perf_counter()
            run()
            if turn >= 5:
                times[name].append(1e3 * (perf_counter() - begin))
    return {name: statistics.median(each) for name, each in times.items()}


def graphs() -> dict[str, object]:
    """V = 8192, width 512, 8 layers, 8 heads, MLP 1376, 512 positions, bf16, random weights."""
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        intermediate_size=1376,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        decoder = AutoDecoder.from_pretrained(folder, n_positions=512)
    matrices = [p for name, p in decoder.body.named_parameters() if p.dim() == 2 and "embedding" not in name]
    streams = [p.detach().view(torch.int32).flatten() for p in matrices]
    step = {width: _verify(decoder, width) for width in (1, 5)}
    ids = torch.randint(0, 8192, (1, 64))

    def generate() -> object:
        with torch.no_grad():
            return model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=32, max_new_tokens=32)

    # torch.sum over int32 is the plainest loop that touches every weight once, in the order it is stored.
    runs = {"read": lambda: [s.sum(dtype=torch.int32) for s in streams], "decode": step[1], "verify5": step[5]}
    times = interleaved(runs, 300)
    theirs = interleaved({"generate": generate}, 5)["generate"] / 32
    return {
        "weights_mb": round(sum(p.numel() for p in matrices) * 2 / 1e6, 1),
        "read_ms": round(times["read"], 3),
        "decode1_ms": round(times["decode"], 3),
        "verify5_ms": round(times["verify5"], 3),
        "decode1_over_read": round(times["decode"] / times["read"], 3),
        "verify5_over_decode1": round(times["verify5"] / times["decode"], 3),
        "transformers_generate_ms_per_token": round(theirs, 3),
        "transformers_over_decode1": round(theirs / times["decode"], 2),
    }


def _verify(decoder: CompiledDecoder, width: int) -> Callable[[], object]:
    """A round's verification at a place in the middle of a text."""
    verifier = CompiledVerifier(decoder, DraftShape.chain(width - 1), rule=Match(), wide=True)
    tokens = torch.full((1, width), -1, dtype=torch.int32)
    tokens[0, 0] = 7
    one = torch.ones(1, dtype=torch.int32)
    commit = Commit(tokens, one, one * 100)
    proposal = Proposal(torch.full((1, width - 1), 9, dtype=torch.int32)) if width > 1 else None
    bounds = RoundLimits((one * (width - 1)).tolist(), 101)
    sampling = sampling_tensors([Sampling()])
    return lambda: verifier(commit, proposal, sampling, bounds)


def host() -> dict[str, object]:
    """Wall time minus the time inside compiled graphs, demo pair: of a round, of a prompt, and of a call besides both.

    A call for one token has a prompt to read and no round; what a call for 128 takes beyond it, its rounds take. Of a
    prompt are counted its tensors and the choice of the first token: the call's own part is that of `turns.py`.
    """
    target, draft = (AutoDecoder.from_pretrained(PAIR / name, n_positions=512) for name in ("target", "draft"))
    generator = SpeculativeGenerator(draft, target, k=4)
    clock = Clock(generator.decoders, prompts=True)
    generator.compile()

    def timed(ids: list[int], count: int) -> tuple[float, float, float]:
        """Seconds of a call, of them those outside of graphs, and those besides its prompt."""
        clock.seconds = 0.0
        begin = perf_counter()
        generator.sample([ids], max_new_tokens=count)
        wall = perf_counter() - begin
        return wall, wall - clock.seconds, wall - generator.statistics.prefill_seconds

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    rounds, shares, reading, calls, whole = [], [], [], [], []
    for prompt in prompts(12):
        ids = tokenizer(prompt).input_ids
        short, around, call = timed(ids, 1)
        wall, outside, _ = timed(ids, 128)
        rounds.append(1e6 * (outside - around) / generator.statistics.num_rounds)
        shares.append((outside - around) / (wall - short))
        reading.append(1e6 * (around - call))
        calls.append(1e6 * call)
        whole.append(outside / wall)
    return {
        "host_us_per_round": round(statistics.median(rounds), 1),
        "host_share_of_rounds": round(statistics.median(shares), 4),
        "host_us_per_prompt": round(statistics.median(reading), 1),
        "host_us_per_call": round(statistics.median(calls), 1),
        "host_share_of_calls": round(statistics.median(whole), 4),
    }


def pair() -> dict[str, object]:
    """Greedy, 128 new tokens."""
    rows = prompts(12)
    return bench_pair(PAIR / "target", PAIR / "draft", rows, k=(2, 3, 4, 6), max_new_tokens=128)


def widths() -> dict[str, object]:
    """Greedy texts of all demo prompts at width 1 and at width 5, bf16: how many tokens differ at the same prefix."""

    tokenizer = AutoTokenizer.from_pretrained(PAIR / "target")
    figures: dict[str, object] = {}
    for backend, count, new in (("native", 60, 128), ("eager", 4, 24)):
        target = AutoDecoder.from_pretrained(PAIR / "target", n_positions=512, backend=backend)
        samplers = [SpeculativeGenerator(None, target, k=0, verify_width=width) for width in (1, 5)]
        differ = tokens = 0
        for prompt in prompts(count):
            ids = [tokenizer(prompt).input_ids]
            narrow, wide = (sampler.sample(ids, max_new_tokens=new)[0].tolist() for sampler in samplers)
            same = next((i for i, (a, b) in enumerate(zip(narrow, wide, strict=False)) if a != b), None)
            tokens += (len(narrow) if same is None else same + 1) - len(ids[0])
            differ += same is not None
        figures[backend] = {"tokens": tokens, "disagreements": differ}
    return figures


def backends() -> dict[str, object]:
    """Texts of the demo target on two backends at the same seeds: how many tokens differ at the same prefix."""
    rows, figures = prompt_ids(24), dict[str, object]()
    for amp in ("f32", "bf16"):
        ours, plain = (
            AutoDecoder.from_pretrained(PAIR / "target", n_positions=256, backend=backend, amp=amp)
            for backend in ("native", "eager")
        )
        for heat in (0.0, 1.0):
            sampling = {"do_sample": True, "temperature": heat, "seed": 7} if heat else {}
            differ = tokens = 0
            for ids in rows:
                a, b = (d.sample([ids], max_new_tokens=64, **sampling)[0].tolist() for d in (ours, plain))
                same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
                tokens += (len(a) if same is None else same + 1) - len(ids)
                differ += same is not None
            figures[f"{amp}, temperature {heat:g}"] = {"tokens": tokens, "disagreements": differ}
    size, count, differ = 8192, 64, 0
    keys = sampling_tensors([Sampling(1.0, seed=3)]).seeds
    for turn in range(200):
        logits = 3 * torch.randn(1, count, size, generator=torch.Generator().manual_seed(turn))
        places = torch.arange(turn * count, (turn + 1) * count, dtype=torch.int32)[None]
        a, b = ((logits + noise.gumbel(keys, places, size, traced=traced)).argmax(-1) for traced in (False, True))
        differ += int((a != b).sum())
    figures["logarithm alone"] = {"tokens": 200 * count, "disagreements": differ}
    return figures


PARTS: dict[str, Callable[[], dict[str, object]]] = {
    "graphs": graphs,
    "host": host,
    "pair": pair,
    "widths": widths,
    "backends": backends,
}


def main() -> None:
    """Run the parts of the command line."""
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    part = parser.parse_args().part
    report: dict[str, object] = {}
    for name in PARTS if part == "all" else [part]:
        report[name] = PARTS[name]()
    publish(report)


if __name__ == "__main__":
    main()
