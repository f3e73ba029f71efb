"""Requests that join and leave in four slots, in every way to draft, and which graphs rounds took. Tests share it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.core.sampling import Sampling
from paceline.decoder.backends.base import Step
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.graph_key import GraphKey
from paceline.draft_spec import DraftSpec, parse_draft
from paceline.engine.request import Request
from tests.decoder.headed import HEADED
from tests.decoder.tiny import Workshop, fresh

SLOTS = 4
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2, 3], [7, 7], [1, 1, 2]]
LENGTHS = (60, 4, 6, 14, 5, 12)
"""Tokens of each text. The first one stays alone for a while, and the last one then joins it."""
SETTINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.1, top_k=40)}

MODES: dict[str, Callable[..., SpeculativeGenerator]] = {
    "plain": lambda _small, target, _: SpeculativeGenerator(None, target, k=0),
    "several plain steps": lambda _small, target, _: SpeculativeGenerator(None, target, k=3),
    "n-grams": lambda _small, target, _: SpeculativeGenerator("ngram:prompt_lookup_max=3", target, k=3),
    "model, fused": lambda small, target, _: SpeculativeGenerator(small, target, k=3),
    "model, two graphs": lambda small, target, _: SpeculativeGenerator(small, target, k=3, fused=False),
    "model, of several lengths": lambda small, target, _: SpeculativeGenerator(small, target, k=(0, 1, 3)),
    "the first of several": lambda small, target, _: SpeculativeGenerator(["suffix", small], target, k=2),
    "a choice": lambda small, target, _: SpeculativeGenerator(
        DraftSpec("choice", options=(("choose_by", "length"),), parts=parse_draft(["suffix", small])), target, k=2
    ),
    **{name: lambda _small, target, folder, make=make: make(target, folder) for name, make in HEADED.items()},  # type: ignore[misc]
}
"""Every kind of graph that a round has."""


def generator(
    workshop: Workshop, mode: str, folder: Path, *, backend: str, buckets: Sequence[int]
) -> SpeculativeGenerator:
    """Run in a mode, over decoders of four slots with graphs for these batch sizes."""
    small, target = (
        fresh(workshop.checkpoint(role), backend=backend, batch_size=list(buckets)) for role in ("draft", "target")
    )
    for one in (small, target):
        one.on_graph = lambda _event: None
    return MODES[mode](small, target, folder)


class Arrivals:
    """A `paceline.engine.engine.RequestQueue` whose last request comes a little after all others but one have ended."""

    online = False

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting, self._others, self._asked, self.ended = list(requests), len(requests) - 1, 0, 0

    def pop(self, longest: int | None = None) -> Request | None:
        self._asked += self.ended == self._others - 1
        there = len(self._waiting) > 1 or (self._waiting and self._asked > 2)
        return self._waiting.pop(0) if there else None

    def take_aborted(self) -> Collection[int]:
        return ()


def texts(made: SpeculativeGenerator, setting: str) -> list[list[int]]:
    requests = [
        Request(index, tuple(prompt), replace(SETTINGS[setting], seed=index), len(prompt) + length)
        for index, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]
    found: list[list[int]] = [[] for _ in requests]
    queue = Arrivals(requests)
    for output in made.serve(queue):
        found[output.index] += output.tokens
        queue.ended += output.finish_reason is not None
    assert [len(text) for text in found] == list(LENGTHS)
    return found


def watch(monkeypatch: pytest.MonkeyPatch, target: CompiledDecoder) -> list[tuple[int, int]]:
    """How many slots each of the next rounds of a target computes, as they run, and how many of them are in use."""
    seen: list[tuple[int, int]] = []
    original = target.graph

    def graph(key: GraphKey, make: Any, example: Any, **more: Any) -> Step:
        step = original(key, make, example, **more)
        if not key.is_round:
            return step

        def run(*inputs: Tensor) -> list[Tensor]:
            seen.append((len(inputs[0]), int((inputs[4][:, 0] >= 0).sum())))
            return step(*inputs)

        return run

    monkeypatch.setattr(target, "graph", graph)
    return seen


def bucket(seated: int) -> int:
    """The smallest of 1, 2 and 4 that holds the requests."""
    return 1 << (seated - 1).bit_length()


@cache
def _plain(workshop: Workshop, setting: str) -> list[list[int]]:
    """Plain decoding in one graph for all slots."""
    return texts(SpeculativeGenerator(None, workshop.decoder(), k=0), setting)


def check_buckets(
    workshop: Workshop, mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *, backend: str
) -> dict[str, list[int]]:
    """Graphs for 1, 2 and 4 slots give the tokens of plain decoding, and every round computes no more slots than it has
    to. -> setting -> how many slots each round computed
    """
    made = generator(workshop, mode, folder, backend=backend, buckets=[1, 2, SLOTS])
    seen, rounds = watch(monkeypatch, made.target), dict[str, list[int]]()
    for setting in SETTINGS:
        seen.clear()
        assert texts(made, setting) == _plain(workshop, setting)
        assert [lines for lines, _ in seen] == [bucket(seated) for _, seated in seen]
        rounds[setting] = [lines for lines, _ in seen]
    return rounds
