"""Ways to decode that take turns on the same prompts, and how much of each one's time was spent inside of graphs.

What `fused.py` measures with; nothing is decided here.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.core.types import RoundReport
from paceline.decoder.backends.base import MultiRoundStep
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.graph_key import GraphKey
from paceline.outputs import Statistics


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
    """Time inside the graphs of some decoders; those of prompts on wish."""

    def __init__(self, decoders: Iterable[CompiledDecoder], *, prompts: bool = False) -> None:
        self.seconds = 0.0
        self._prompts = prompts
        self._timed: dict[int, object] = {}
        for decoder in decoders:
            # Verifiers keep the steps they were given, so that a graph has to be timed from its first use on.
            decoder.graph = partial(self._graph, decoder.graph)  # type: ignore[method-assign]

    def _graph(self, graph: Callable[..., Any], key: GraphKey, *arguments: Any, **options: Any) -> Any:
        step = graph(key, *arguments, **options)
        if key.is_prompt and not self._prompts:
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
