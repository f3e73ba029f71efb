"""Rounds of the slots in use on the stand-ins for both ways to Neuron."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.decoder.options import LoadOptions, decoder_options
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


@pytest.mark.parametrize(("slots", "most"), [(1, 16), (16, 28)])
def test_by_default_a_pair_has_few_graphs(
    workshop: Workshop, runtime: Callable[[], ModuleType], slots: int, most: int
) -> None:
    """Each takes minutes to compile; as many as on a CPU would be 44 and 112 at 4,096 positions."""
    defaults = decoder_options(LoadOptions(backend="neuron", batch_size=slots), 4096)
    assert defaults.kv_buckets == (1024, 4096) and defaults.batch_buckets == ((4, 16) if slots == 16 else (1,))
    assert len(decoder_options(LoadOptions(batch_size=slots), 4096).kv_buckets) == 6
    # The tiny models are trained on 128 positions: as many buckets of them.
    loaded = {"backend": "neuron", "amp": "f32", "batch_size": slots, "n_positions": [32, 128]}
    draft, target = (AutoDecoder.from_pretrained(workshop.checkpoint(role), **loaded) for role in ("draft", "target"))
    SpeculativeGenerator(draft, target).compile(kinds=["greedy"])
    made = [*draft.graphs(), *target.graphs()]
    print(sorted(str(graph.key) for graph, _ in made))
    assert len(made) <= most


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
