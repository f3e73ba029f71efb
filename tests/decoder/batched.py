"""Requests that join and leave in four slots, in every way to draft, and which graphs their rounds took; no tests here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.sampling import Sampling
from paceline.decoder.decoder import CompiledDecoder
from paceline.engine.request import Request
from paceline.engine.stopping import Stopping
from tests.decoder.headed import HEADED
from tests.decoder.tiny import Workshop, fresh

SLOTS = 4
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2, 3], [7, 7], [1, 1, 2]]
LENGTHS = (36, 4, 6, 14, 5, 12)
"""Tokens of each text. The first one stays alone for a while, and the last one then joins it."""
SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.1, top_k=40)}

Make = Callable[[SamplingDecoder, SamplingDecoder, Path], SpeculativeGenerator]


def _given(draft: object, **options: object) -> Make:
    """``draft``, or the draft model where it is None."""
    return lambda small, target, _folder: SpeculativeGenerator(small if draft is None else draft, target, **options)  # type: ignore[arg-type]


def _plain(k: int) -> Make:
    return lambda _small, target, _folder: SpeculativeGenerator(None, target, k=k)


def _headed(name: str) -> Make:
    return lambda _small, target, folder: HEADED[name](target, folder)


MODES: dict[str, Make] = {
    "plain": _plain(0),
    "several plain steps": _plain(3),
    "n-grams": _given("ngram:prompt_lookup_max=3", k=3),
    "model, fused": _given(None, k=3),
    "model, two graphs": _given(None, k=3, fused=False),
    "model, of several lengths": _given(None, k=(0, 1, 3)),
    "the first of several": lambda small, target, _folder: SpeculativeGenerator(["suffix", small], target, k=2),
    **{name: _headed(name) for name in HEADED},
}
"""Every kind of graph that a round has."""


def generator(workshop: Workshop, mode: str, folder: Path, *, backend: str, buckets: Sequence[int]) -> SpeculativeGenerator:
    """In a mode, over decoders of four slots with graphs for so many of them."""
    small, target = (
        fresh(workshop.checkpoint(role), backend=backend, batch_size=list(buckets)) for role in ("draft", "target")
    )
    for one in (small, target):
        one.on_graph = lambda _event: None
    return MODES[mode](small, target, folder)


class Arrivals:
    """A `paceline.engine.queue.RequestQueue` whose last request comes a little after all others but one have ended."""

    paced = False

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting, self._others, self._asked, self.ended = list(requests), len(requests) - 1, 0, 0

    def pop(self) -> Request | None:
        self._asked += self.ended == self._others - 1
        there = len(self._waiting) > 1 or (self._waiting and self._asked > 2)
        return self._waiting.pop(0) if there else None

    def take_aborted(self) -> Collection[int]:
        return ()


def texts(made: SpeculativeGenerator, setting: str) -> list[list[int]]:
    """What the prompts become, six in four slots."""
    requests = [
        Request(index, tuple(prompt), replace(SETTINGS[setting], seed=index), Stopping(len(prompt) + length))
        for index, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    found: list[list[int]] = [[] for _ in requests]
    queue = Arrivals(requests)
    for output in made.serve(queue):
        found[output.index] += output.tokens
        queue.ended += output.finish_reason is not None
    assert [len(text) for text in found] == list(LENGTHS)
    return found


def watch(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many slots each of the next rounds of a target looks at, as they run."""
    seen: list[int] = []
    original = CompiledDecoder.graph

    def graph(self: CompiledDecoder, key, make, example, **more):  # type: ignore[no-untyped-def]
        step = original(self, key, make, example, **more)
        if not key.is_round:
            return step

        def run(*inputs):  # type: ignore[no-untyped-def]
            seen.append(len(inputs[0]))
            return step(*inputs)

        return run

    monkeypatch.setattr(CompiledDecoder, "graph", graph)
    return seen
