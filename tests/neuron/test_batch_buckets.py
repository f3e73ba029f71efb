"""Rounds of the slots in use on the stand-ins for both ways to Neuron."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from paceline import SpeculativeGenerator
from tests.decoder import batched
from tests.decoder.tiny import Workshop

MODES = ("model, fused", "eagle 3, chain")
"""Two models in a graph; and features that stay on the device between rounds of as many slots."""


@pytest.mark.parametrize("mode", MODES)
def test_tokens_are_those_of_eager(
    workshop: Workshop,
    runtime: Callable[[], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
) -> None:
    plain = SpeculativeGenerator(None, workshop.decoder(backend="eager"), k=0)
    made = batched.generator(workshop, mode, tmp_path / "heads", backend="neuron", buckets=[1, 4])
    seen = batched.watch(monkeypatch, made.target)
    assert batched.texts(made, "greedy") == batched.texts(plain, "greedy")
    assert [lines for lines, _ in seen] == [1 if seated == 1 else 4 for _, seated in seen]
    assert {lines for lines, _ in seen} == {1, 4}


def test_compiling_ahead_makes_the_graphs_of_every_bucket(
    workshop: Workshop, runtime: Callable[[], ModuleType], tmp_path: Path
) -> None:
    """And those that move requests, so that no call has to wait."""
    made = batched.generator(workshop, "eagle 3, chain", tmp_path / "heads", backend="neuron", buckets=[1, 4])
    made.compile(kinds=["greedy"])
    before = [graph.key for graph, _ in made.target.graphs()]
    assert {key.lines for key in before if key.is_round} == {0, 1}
    assert [key.kind for key in before].count("move") == 2  # of the target and of its head
    batched.texts(made, "greedy")
    assert [graph.key for graph, _ in made.target.graphs()] == before
