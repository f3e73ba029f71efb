"""Backend neuron-native on a fake for TorchNeuron's compiler, which records the graphs that it is given and runs
them: what Dynamo and AOTAutograd make of our steps is PyTorch's own, and the fake's options are TorchNeuron's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from paceline import SpeculativeGenerator
from paceline.checks import selftest
from paceline.core.errors import BackendError, ConfigurationError, SamplingError
from paceline.decoder import environment as decoder_environment
from paceline.decoder.backends.base import make
from paceline.decoder.parallel import sharding
from paceline.neuron import environment
from paceline.neuron import native as neuron_native
from paceline.neuron.lowering import lower, state_of
from paceline.neuron.native import NeuronNativeRanks, Runtime, in_place
from tests.decoder.steps import STEPS, fused, inputs, traceable
from tests.decoder.tiny import Workshop
from tests.neuron.conftest import load
from tests.neuron.native_stand_in import VERSIONS, Recorded, StandInMember

COLLECTIVES = "_c10d_functional."
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 2, [5, 5]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[Recorded]:
    """The backend over a fake, with the CPU as its device."""
    made = Recorded()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    home = Runtime(torch.device("cpu"), made.compiler, VERSIONS)
    monkeypatch.setattr(neuron_native, "runtime", lambda: home)
    torch._dynamo.reset()
    counters.clear()
    yield made
    torch._dynamo.reset()


def test_e4m3_weights_reach_the_compiler_unchanged(workshop: Workshop, recorded: Recorded) -> None:
    found = []
    for backend in ("eager", "neuron-native"):
        target = load(workshop, backend=backend, quantization="fp8_e4m3")
        found.append(target.sample(PROMPTS, max_new_tokens=8).tolist())
    assert found[0] == found[1]
    types = {x.meta["val"].dtype for graph in recorded.graphs for x in graph.graph.nodes if x.op == "placeholder"}
    assert torch.float8_e4m3fn in types


def test_a_fused_pair_keeps_the_tokens_and_compiles_once_per_key(workshop: Workshop, recorded: Recorded) -> None:
    draft, target = (load(workshop, role, backend="neuron-native", slots=[2]) for role in ("draft", "target"))
    generator = SpeculativeGenerator(draft, target, k=1, fused=True)
    wanted = workshop.decoder(backend="eager", slots=2).sample(PROMPTS, max_new_tokens=10)
    assert torch.equal(generator.sample(PROMPTS, max_new_tokens=10), wanted)
    assert generator.statistics.tau > 1.3
    keys = len(draft._steps) + len(target._steps)
    assert len(recorded.graphs) == keys, [str(key) for key, _ in (*draft._steps, *target._steps)]
    assert torch.equal(generator.sample(PROMPTS[:1], max_new_tokens=6), wanted[:1, : len(PROMPTS[0]) + 6])
    assert len(recorded.graphs) == keys, "a graph is compiled at its first call and never again"
    assert not counters["graph_break"]

    # Every cache is written into where it lies: a write into an input, of a value that was made from that input.
    largest = max(recorded.graphs, key=lambda graph: len(graph.graph.nodes))
    written = [node for node in largest.graph.nodes if str(node.target) == "aten.copy_.default"]
    assert len(written) == 2 * (draft.config.num_layers + target.config.num_layers)
    assert {node.args[0].op for node in written} == {"placeholder"}
    assert len({node.args[0] for node in written}) == len(written)

    with pytest.raises(SamplingError, match="refused on backend='neuron-native' until the check of the noise"):
        generator.sample(PROMPTS, do_sample=True, seed=1)


def test_graphs_are_announced_before_the_first_is_compiled(
    workshop: Workshop, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target = (load(workshop, role, backend="neuron-native", slots=[2]) for role in ("draft", "target"))
    said: list[tuple[str, int]] = []
    for decoder in (draft, target):
        decoder.on_graph = lambda event: said.append((event.message, len(recorded.graphs)))
    generator = SpeculativeGenerator(draft, target, k=1, fused=True)
    generator.compile(kinds=("greedy",))
    count = len(recorded.graphs)
    (told,) = [(message, done) for message, done in said if "an estimate" in message]
    assert told[0].startswith(f"{count} graphs, 1 at a time: about {5 * count} minutes") and told[1] == 0 < count
    assert said[-1][0].endswith(f", {count} of {count}") and said[-1][1] == count - 1
    wanted = workshop.decoder(backend="eager", slots=2).sample(PROMPTS, max_new_tokens=10)
    assert torch.equal(generator.sample(PROMPTS, max_new_tokens=10), wanted) and len(recorded.graphs) == count

    def refuses(_graph: object, _example: object, **_options: object) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(neuron_native, "runtime", lambda: Runtime(torch.device("cpu"), refuses, VERSIONS))
    other = load(workshop, backend="neuron-native", slots=[2])
    with pytest.raises(BackendError, match=r"(?s)2 of 2 graphs cannot be used.*compiling for Neuron failed.*no room"):
        SpeculativeGenerator(None, other, k=0).compile(kinds=("greedy",))


def test_sampling_is_rejected_until_the_noise_check_passes(recorded: Recorded) -> None:
    assert make("neuron-native").sampling_refusal() is not None
    passed, seen = selftest._noise("neuron-native")
    assert passed and "recorded" in seen
    assert make("neuron-native").sampling_refusal() is None


def test_the_graph_writes_the_lowered_steps_state_in_place(workshop: Workshop) -> None:
    """Weights and caches of 16 bits, multiplied by PyTorch's matmuls."""
    decoder, given = workshop.decoder(backend="eager", amp="bf16"), inputs("prefill", 1)
    step = STEPS["prefill"](traceable(decoder), 128)
    lowered = lower("prefill", step, given)
    state = {name: x.clone() for name, x in state_of(step, lowered).items()}
    changed, outputs = lowered.run(state, given)
    graph = in_place(lowered, torch.device("cpu"))
    assert not [node for node in graph.graph.nodes if "paceline_graph" in str(node.target)]
    for made, wanted in zip(graph(*state.values(), *given), outputs, strict=True):
        torch.testing.assert_close(made, wanted, rtol=0.05, atol=0.2)
    for name, value in changed.items():
        assert value.any() and value.dtype == torch.bfloat16
        torch.testing.assert_close(state[name].float(), value.float(), rtol=0.05, atol=0.1)


def test_a_missing_older_or_compiling_torchneuron_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    neuron_native.runtime.cache_clear()
    said = r"needs TorchNeuron, which cannot be imported .*torch-neuronx 2\.13 or 2\.14"
    with pytest.raises(BackendError, match=said):
        make("neuron-native")
    monkeypatch.setitem(sys.modules, "torch_neuronx", ModuleType("torch_neuronx"))  # the older package of this name
    monkeypatch.setattr(neuron_native.metadata, "version", lambda _name: "2.9.0.2.12.22436")
    with pytest.raises(BackendError, match=r"torch-neuronx 2\.9\.0\.2\.12\.22436 has no device"):
        make("neuron-native")
    monkeypatch.setenv("TORCH_NEURONX_COMPILE_ONLY", "1")
    with pytest.raises(BackendError, match=r"TORCH_NEURONX_COMPILE_ONLY is set.*unset it \(`paceline export-hlo`"):
        make("neuron-native")


def test_new_tensors_of_a_step_are_created_on_the_device(workshop: Workshop) -> None:
    body = traceable(workshop.decoder(backend="eager"))
    lowered = lower("prefill", STEPS["prefill"](body, 128), inputs("prefill", 1))
    made = [node for node in in_place(lowered, torch.device("meta")).graph.nodes if "device" in node.kwargs]
    assert len(made) > 10 and {node.kwargs["device"] for node in made} == {torch.device("meta")}


def test_a_tensor_parallel_fused_round_is_one_graph_with_functional_collectives(workshop: Workshop) -> None:
    """No process group is needed to trace them, and TorchNeuron lowers them by the name of their group."""
    decoder = workshop.decoder("draft", backend="eager")
    config = decoder.config
    body = traceable(decoder, layout=sharding.layout(config, 3))  # with a rank of zeros
    step, given = fused(body, 128, kind="greedy"), inputs("fused", 1)
    lowered = lower("fused", step, given)
    names = [str(node.target) for node in in_place(lowered, torch.device("meta")).graph.nodes]
    gathers = names.count("_c10d_functional.all_gather_into_tensor.default")
    # A draft of two tokens is two passes, and the target's is the third.
    assert names.count("_c10d_functional.all_reduce.default") == 3 * (1 + 2 * config.num_layers) and gathers
    recorded = Recorded(runs=False)
    compiled = torch.compile(in_place(lowered, torch.device("cpu")), backend=recorded.compiler, fullgraph=True)
    with torch.no_grad():
        compiled(*state_of(step, lowered).values(), *given)
    (graph,) = recorded.graphs
    found = [str(node.target) for node in graph.graph.nodes]
    assert found.count("_c10d_functional.all_reduce.default") == 3 * (1 + 2 * config.num_layers)
    assert found.count("_c10d_functional.all_gather_into_tensor.default") == gathers
    torch._dynamo.reset()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[None]:
    """Ranks are those of the fake, and this process is none of them yet."""
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


def test_a_tensor_parallel_model_keeps_the_tokens_with_collectives_in_the_graph(
    workshop: Workshop, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One layer, by plain decoding: what a fused round adds is traced above, without other processes.

    The process has cores 4 and 5, as a plan would give it, and every rank sees one of them.
    """
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "4-5")
    decoder = load(workshop, "draft", backend="neuron-native", tp_degree=2)
    try:
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
    finally:
        decoder.close()


def test_each_rank_has_one_core_of_the_process_range(monkeypatch: pytest.MonkeyPatch, stand_in: None) -> None:
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
    """A parent process may have set the range of cores; TorchNeuron gives each rank one core of it."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="this process is already rank 1 of 2, started by torchrun or for"):
        make("neuron-native", 2)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigurationError, match="is already rank 0 of 2"):
        make("neuron-native", 4)


def test_variables_of_torchneuron_are_set_unless_the_user_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that fails is an error, and a tensor that was left on the CPU too."""
    switches = ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY")
    rounding = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
    for name in (*switches, rounding):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(switches[0], "0")
    environment.neuron_native_defaults()
    found = decoder_environment.with_variables({})
    assert [found[name] for name in (*switches, rounding)] == ["0", "1", "0"]
