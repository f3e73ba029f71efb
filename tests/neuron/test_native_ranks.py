"""Backend neuron-native on several cores: every rank a process, over stand-ins for TorchNeuron's compiler and group."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from paceline import AutoDecoder
from paceline.core.errors import ConfigurationError
from paceline.decoder.backends.base import make
from paceline.neuron import environment
from paceline.neuron import native as neuron_native
from paceline.neuron.native import NeuronNativeRanks
from tests.decoder.tiny import CHUNK, Workshop
from tests.neuron.native_stand_in import StandInMember
from tests.neuron.torch_mlir_operators import takes

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 2, [5, 5]]
COLLECTIVES = "_c10d_functional."


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """Ranks are those of the stand-in, and this process is none of them yet."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    for name in (*environment.rank_variables(0, 2, 0), "NEURON_RT_VISIBLE_CORES", "PACELINE_RANK_CORES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    neuron_native.runtime.cache_clear()
    monkeypatch.setattr(NeuronNativeRanks, "kind", "tests.neuron.native_stand_in:StandInMember")
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_a_divided_model_has_the_tokens_of_eager_and_collectives_in_whole_graphs(
    workshop: Workshop, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer, decoded plainly: what a fused round adds is traced without other processes in test_native.py.

    The process has cores 4 and 5, as a plan would give it, and every rank sees one of them.
    """
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-5")
    decoder = AutoDecoder.from_pretrained(
        workshop.checkpoint("draft"),
        backend="neuron-native",
        amp="f32",
        batch_size=2,
        context_length_estimate=[CHUNK],
        tp_degree=2,
    )
    try:
        decoder.on_graph = lambda _event: None
        wanted = workshop.decoder("draft", backend="eager", slots=2).sample(PROMPTS, max_new_tokens=6)
        assert torch.equal(decoder.sample(PROMPTS, max_new_tokens=6), wanted)
        member = decoder.backend.ranks.member
        assert isinstance(member, StandInMember)
        assert decoder.body.shard.degree == 2 and not counters["graph_break"]
        recorded = member.recorded
        assert len(recorded.graphs) == len(decoder._steps), "each key is compiled once"
        names = [str(node.target) for node in recorded.calls() if isinstance(node.target, torch._ops.OpOverload)]
        # Two sums a layer and one for the embedding, in each graph.
        assert names.count(COLLECTIVES + "all_reduce.default") >= len(recorded.graphs) * (1 + 2)
        assert COLLECTIVES + "all_gather_into_tensor.default" in names
        others = {name for name in names if not name.startswith((COLLECTIVES, "aten.copy_."))}
        assert {name for name in others if not takes(name)} == set()
    finally:
        decoder.close()


def test_a_rank_has_its_own_core_of_the_process_s_range(monkeypatch: pytest.MonkeyPatch, stand_in: None) -> None:
    def cores(degree: int) -> list[str | None]:
        found = [environment.rank_variables(rank, degree, 0) for rank in range(degree)]
        return [one.get("NEURON_RT_VISIBLE_CORES") for one in found]

    assert cores(2) == [None, None], "TorchNeuron gives a rank the core of its number"
    for given, wanted in (("8-11", ["8", "9", "10", "11"]), ("4,5,6-7", ["4", "5", "6", "7"])):
        monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", given)
        assert cores(4) == wanted
        with pytest.raises(ConfigurationError, match=f"expected 8 cores for tp_degree=8, got '{given}'"):
            cores(8)
    environment.become_rank(environment.rank_variables(0, 4, 0))
    assert cores(4) == ["4", "5", "6", "7"], "rank 0 still knows the range"
    monkeypatch.setenv("PACELINE_RANK_CORES", "")
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "all")
    with pytest.raises(ConfigurationError, match="expected cores such as 0-3, got 'all'"):
        cores(2)


def test_a_process_is_one_rank(monkeypatch: pytest.MonkeyPatch, stand_in: None) -> None:
    """Who started it may have made it one; and TorchNeuron gives it one core."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="this process is already rank 1 of 2, started by torchrun or for"):
        make("neuron-native", 2)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="is already rank 0 of 2"):
        make("neuron-native", 4)
