"""Rounds in two graphs and fused, against plain decoding and the formula. JSON on the last line.

    python benchmarks/fused.py --part pair                 the demo pair: plain, two steps and fused
    python benchmarks/fused.py --part 30m --alpha 0.6      random weights, target of 30M and draft of 8M
    python benchmarks/fused.py --part 110m --alpha 0.8     the same with a target of 110M

Give --k to choose depths (repeatable) and --tiny to see that a part starts. With --alpha acceptance is
simulated: each draft stands with that probability, whatever the models say, so that speed can be told from quality;
without, pair decodes real text. Modes take turns on every prompt, and a mode's figure is the sum over
prompts of the median over turns. Times are of rounds, without prompts and without what a call takes besides (call_us).
Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import PAIR, prompt_ids, publish
from shapes import POSITIONS, SHAPES, random_model
from torch import Tensor

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.types import RoundReport
from paceline.decoder.backends.base import MultiRoundStep
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.graph_key import GraphKey
from paceline.outputs import Statistics

# Target and draft, as in `shapes`.
PAIRS = {
    "30m": (SHAPES["30m"], (8192, 256, 5, 4, 4, 688)),
    "110m": ((16384, 768, 12, 12, 12, 2048), (16384, 192, 4, 3, 3, 512)),
    "tiny": ((512, 64, 2, 2, 2, 96), (512, 32, 1, 2, 2, 48)),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One text: seconds of its rounds, and of them inside graphs; tokens behind the first, and rounds; and seconds of
    the call besides its rounds and its prompt.
    """

    seconds: float
    inside: float
    tokens: int
    rounds: int
    call: float


@dataclass(slots=True)
class Mode:
    """A way to decode, and for every prompt what its turns took."""

    generator: SpeculativeGenerator
    seen: list[list[Run]] = field(default_factory=list)

    def total(self, name: str) -> float:
        """Sum over prompts of the median over turns."""
        return sum(statistics.median(getattr(run, name) for run in turns) for turns in self.seen)

    def summary(self, plain: Mode) -> dict[str, object]:
        """Against plain decoding in the same run."""
        rounds, tokens = self.total("rounds"), self.total("tokens")
        outside = (self.total("seconds") - self.total("inside")) / rounds
        return {
            "speed_up": round(self.speed() / plain.speed(), 3),
            "tokens_per_round": round(tokens / rounds, 3),
            "round_ms": round(1e3 * self.total("seconds") / rounds, 3),
            "graphs_ms": round(1e3 * self.total("inside") / rounds, 3),
            "outside_us": round(1e6 * outside, 1),
            "outside_share": round(outside * rounds / self.total("seconds"), 4),
            "call_us": round(1e6 * self.total("call") / len(self.seen), 1),
        }

    def speed(self) -> float:
        """Tokens per second."""
        return self.total("tokens") / self.total("seconds")


class _Timed:
    """A step that says how long it takes."""

    def __init__(self, step: Callable[..., object], clock: Clock) -> None:
        self._step, self._clock = step, clock

    def __call__(self, *inputs: object) -> object:
        begin = perf_counter()
        out = self._step(*inputs)
        self._clock.seconds += perf_counter() - begin
        return out


class _TimedRounds(_Timed):
    """One that runs several rounds in a call, and says how long each of them took."""

    def run_rounds(self, *inputs: Any) -> tuple[list[RoundReport], list[Tensor]]:
        assert isinstance(self._step, MultiRoundStep)
        reports, outputs = self._step.run_rounds(*inputs)
        self._clock.seconds += sum(report.seconds for report in reports)
        return reports, outputs


class Clock:
    """Time inside the graphs of some decoders but for those of prompts."""

    def __init__(self, decoders: Iterable[CompiledDecoder]) -> None:
        self.seconds = 0.0
        self._timed: dict[int, object] = {}
        for decoder in decoders:
            # Verifiers keep the steps they were given, so that a graph has to be timed from its first use on.
            decoder.graph = partial(self._graph, decoder.graph)  # type: ignore[method-assign]

    def _graph(self, graph: Callable[..., Any], key: GraphKey, *arguments: Any, **options: Any) -> Any:
        step = graph(key, *arguments, **options)
        if key.is_prompt:
            return step
        if id(step) not in self._timed:
            self._timed[id(step)] = (_TimedRounds if isinstance(step, MultiRoundStep) else _Timed)(step, self)
        return self._timed[id(step)]


def measure(modes: dict[str, Mode], prompts: Sequence[Sequence[int]], *, new: int, repeats: int) -> None:
    """``new`` tokens behind every prompt, in every mode, in turns; the first prompt comes once more, not counted."""
    clock = Clock({id(one): one for mode in modes.values() for one in mode.generator.decoders}.values())
    for mode in modes.values():
        mode.generator.compile()
    for number, prompt in enumerate([prompts[0], *prompts]):
        for mode in modes.values():
            mode.seen.append([])
        for _ in range(repeats):
            for mode in modes.values():
                mode.seen[-1].append(_run(mode.generator, prompt, new, clock=clock))
        if number == 0:
            for mode in modes.values():
                mode.seen.clear()


def _run(generator: SpeculativeGenerator, prompt: Sequence[int], new: int, *, clock: Clock) -> Run:
    """A call for one token has a prompt to read and no round: what a longer one takes beyond that, its rounds take.

    A drafter that learns from earlier outputs learns that token too.
    """
    call, _ = _wall(generator, prompt, 1)
    clock.seconds = 0.0
    wall, done = _wall(generator, prompt, new)
    return Run(wall - call, clock.seconds, done.new_tokens - 1, done.num_rounds, call)


def _wall(generator: SpeculativeGenerator, prompt: Sequence[int], new: int) -> tuple[float, Statistics]:
    """Seconds of a call besides its prompt, and what it counted."""
    begin = perf_counter()
    generator.sample([list(prompt)], max_new_tokens=new, eos_token_id=[])
    wall = perf_counter() - begin
    return wall - generator.statistics.prefill_seconds, generator.statistics


@dataclass(frozen=True, slots=True)
class Options:
    """Options of the command line. ``alpha`` None: real acceptance."""

    alpha: float | None
    depths: tuple[int, ...]
    new: int
    count: int
    repeats: int
    backend: str
    tiny: bool


def rounds(
    draft: SamplingDecoder, target: SamplingDecoder, prompts: list[list[int]], options: Options
) -> dict[str, object]:
    """Plain, two steps and fused at every depth, and the speed-up that the formula gives from the graphs' times.

    E = (1 - alpha^(k + 1)) / (1 - alpha) tokens a round (arXiv 2211.17192, section 3), or as many as were counted,
    times the time of a plain step over that of a round.
    """
    modes = {"plain": Mode(SpeculativeGenerator(None, target, k=0))}
    for k in options.depths:
        for name, fused in (("two steps", False), ("fused", True)):
            generator = SpeculativeGenerator(draft, target, k=k, fused=fused, synthetic_acceptance=options.alpha)
            modes[f"{name} k={k}"] = Mode(generator)
    measure(modes, prompts, new=options.new, repeats=options.repeats)
    plain, report = modes["plain"], {name: mode.summary(modes["plain"]) for name, mode in modes.items()}
    step = plain.total("inside") / plain.total("rounds")
    for name, mode in modes.items():
        if mode is plain:
            continue
        k, alpha = int(name.split("=")[1]), options.alpha
        counted = mode.total("tokens") / mode.total("rounds")
        expected = counted if alpha is None else k + 1.0 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
        formula = expected * step * mode.total("rounds") / mode.total("inside")
        report[name] |= {
            "formula": round(formula, 3),
            "of_formula": round(mode.speed() / plain.speed() / formula, 3),
            # The same with the tokens that this run's coins gave, which over few rounds are not quite those expected.
            "of_formula_as_counted": round(mode.speed() / plain.speed() / (formula * counted / expected), 3),
        }
    for k in options.depths:
        two, one = (modes[f"{name} k={k}"] for name in ("two steps", "fused"))
        saved = two.total("seconds") / two.total("rounds") - one.total("seconds") / one.total("rounds")
        report[f"fused k={k}"]["saved_us_a_round"] = round(1e6 * saved, 1)
    return {"alpha": options.alpha, "modes": report}


def pair(options: Options) -> dict[str, object]:
    """The demo pair."""
    draft, target = demo(options)
    return rounds(draft, target, prompt_ids(options.count), options)


def shape(name: str) -> Callable[[Options], dict[str, object]]:
    """Random weights; acceptance has to be simulated."""

    def part(options: Options) -> dict[str, object]:
        if options.alpha is None:
            raise SystemExit("random weights agree on nothing: give --alpha")
        draft, target = random_pair("tiny" if options.tiny else name, options)
        torch.manual_seed(1)
        prompts = torch.randint(1, 500, (options.count, 32)).tolist()
        return rounds(draft, target, prompts, options)

    return part


def demo(options: Options) -> tuple[SamplingDecoder, SamplingDecoder]:
    draft, target = (
        AutoDecoder.from_pretrained(PAIR / name, n_positions=POSITIONS, backend=options.backend)
        for name in ("draft", "target")
    )
    return draft, target


def random_pair(name: str, options: Options) -> tuple[SamplingDecoder, SamplingDecoder]:
    """Draft and target of a row of PAIRS."""
    decoders = []
    for number, one in enumerate(reversed(PAIRS[name])):
        with tempfile.TemporaryDirectory() as folder:
            random_model(one, Path(folder), seed=number)
            decoders.append(AutoDecoder.from_pretrained(folder, context_length_estimate=64, backend=options.backend))
    return decoders[0], decoders[1]


PARTS: dict[str, Callable[[Options], dict[str, object]]] = {
    "pair": pair,
    "30m": shape("30m"),
    "110m": shape("110m"),
}


def main() -> None:
    """Run one part."""
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--alpha", type=float)
    parser.add_argument("--k", type=int, action="append")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--count", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    depths = tuple(arguments.k or (2, 4, 8))
    options = Options(arguments.alpha, depths, arguments.new, arguments.count, arguments.repeats, "native", tiny=False)
    if arguments.tiny:
        options = Options(arguments.alpha, tuple(arguments.k or (2,)), 12, 1, 1, "eager", tiny=True)
    publish({"part": arguments.part, **PARTS[arguments.part](options)})


if __name__ == "__main__":
    main()
