"""The Neuron backend against a fake of the SDK: the same tokens, the documented rules, and little traffic."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.checks import selftest
from paceline.core.errors import ArtefactError, BackendError, ConfigurationError
from paceline.decoder.backends.base import Graph
from paceline.decoder.compile import cache
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.options import LoadOptions, decoder_options
from paceline.eagle.tree import Chain
from paceline.neuron import backend as neuron
from paceline.neuron import round_cost
from paceline.target.verifier import CompiledVerifier
from tests.decoder import batched
from tests.decoder.families import save_pair
from tests.decoder.headed import SMALL
from tests.decoder.tiny import VOCABULARY, Workshop, fresh
from tests.eagle import heads
from tests.neuron.conftest import Function, Runtime, load
from tests.neuron.test_hlo_lint import BREAKING, proto
from tests.orchestrator.test_trees import PROMPTS as FOUR
from tests.orchestrator.test_trees import Orchard

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3, [5, 5]]
ASKED = {"max_new_tokens": 24, "do_sample": True, "seed": 3, "temperature": 1.2, "top_k": 30}


def pair(workshop: Workshop, backend: str, slots: int = 2, *, amp: str = "f32") -> tuple[Any, Any]:
    """Draft and target, whose rounds have one graph for all slots."""
    draft, target = (load(workshop, role, backend=backend, amp=amp, slots=[slots]) for role in ("draft", "target"))
    return draft, target


@dataclass
class Traffic:
    """Bytes that crossed between host and device in a round.

    calls    graph, bytes in, bytes out
    fetched  bytes of states the host read, where no graph came in meanwhile (for that all states go home and back)
    """

    calls: list[tuple[str, int, int]]
    fetched: int


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> list[Traffic]:
    """Record every fused round on the fake SDK from this call on."""
    found: list[Traffic] = []
    original = CompiledVerifier.fused

    def watched(*given: Any, **more: Any) -> Any:
        if "torch_neuronx" not in sys.modules:  # a round of eager
            return original(*given, **more)
        seen, graphs = runtime(), len(neuron.chip().graphs)
        calls, fetched = len(seen.calls), len(seen.fetched)
        made = original(*given, **more)
        sizes = [size for _, size in seen.fetched[fetched:]] if len(neuron.chip().graphs) == graphs else []
        found.append(Traffic(seen.calls[calls:], sum(sizes)))
        return made

    monkeypatch.setattr(CompiledVerifier, "fused", watched)
    return found


def check_rounds(rounds: list[Traffic], *, most: int) -> None:
    """A round is one call with at most ``size`` bytes of results, and no other access to the device."""
    assert rounds
    assert {len(one.calls) for one in rounds} == {1}
    assert max(one.calls[0][2] for one in rounds) == most
    assert {one.fetched for one in rounds} == {0}


def test_a_fused_round_is_one_call_with_few_bytes(workshop: Workshop, runtime: Runtime, rounds: list[Traffic]) -> None:
    k, slots = 2, 2
    wanted = pair(workshop, "eager")[1].sample(PROMPTS, **ASKED).tolist()
    generator = SpeculativeGenerator(*pair(workshop, "neuron"), k=k)
    done = generator.sample(PROMPTS, return_dict=True, **ASKED)
    assert done.sequences.tolist() == wanted
    assert done.statistics.tau > 1.3
    # k + 1 tokens, their count and how deep the proposal went, for every slot.
    check_rounds(rounds, most=(k + 1 + 2) * slots * 4)
    read = [call for call in runtime().calls if call[2] >= VOCABULARY * 4]  # reading a prompt gives logits
    assert len(read) >= 2 * sum(-(-len(prompt) // 16) for prompt in PROMPTS)
    assert len(runtime().calls) == len(read) + len(rounds)
    # The state went home and back when graphs came in; a second run finds all of them.
    before = len(runtime().compiled)
    assert generator.sample(PROMPTS, **ASKED).tolist() == wanted
    assert len(runtime().compiled) == before


@pytest.mark.parametrize("heads", SMALL)
def test_hidden_states_stay_on_the_device(
    workshop: Workshop, runtime: Runtime, tmp_path: Path, heads: str, rounds: list[Traffic]
) -> None:
    """A round of heads is one call too, with no more bytes out; its drafts are those of eager, so the features are."""
    asked = {**ASKED, "max_new_tokens": 40, "temperature": 0.8, "seed": 1}
    seen = []
    for backend in ("eager", "neuron"):
        target = pair(workshop, backend)[1]
        generator = SMALL[heads](target, tmp_path / backend)
        # Three prompts for two slots: when the third one comes in, the features of the other slot are fetched.
        done = generator.sample([*PROMPTS, [7] * 5], return_dict=True, **asked)
        seen.append((done.sequences.tolist(), done.statistics.num_rounds, done.statistics.num_accepted_tokens_per_pos))
    assert seen[0] == seen[1] and sum(seen[0][2])
    depth, slots = generator.drafter.draft_shape.depth, 2
    # Every round, the last one of a text too, where nothing can be accepted.
    check_rounds(rounds, most=(depth + 3) * slots * 4)
    # Features go in where a prompt was read since the last round, and never come out.
    features = target.config.hidden_size * (depth + 1) * slots * 4
    assert sum(call[1] > features for one in rounds for call in one.calls) <= 3 < len(rounds)


def test_separate_steps_and_plain_decoding_keep_the_tokens(workshop: Workshop, runtime: Runtime) -> None:
    wanted = pair(workshop, "eager")[1].sample(PROMPTS, **ASKED).tolist()
    draft, target = pair(workshop, "neuron")
    assert SpeculativeGenerator(draft, target, k=2, fused=False).sample(PROMPTS, **ASKED).tolist() == wanted
    assert target.sample(PROMPTS, **ASKED).tolist() == wanted


def test_bf16_weights_are_not_widened(workshop: Workshop, runtime: Runtime) -> None:
    """By torch_xla's dot with float32 sums; what a fused round chooses is what a plain one chooses."""
    draft, target = pair(workshop, "neuron", amp="bf16")
    plain = target.sample(PROMPTS, max_new_tokens=8).tolist()
    assert SpeculativeGenerator(draft, target, k=2).sample(PROMPTS, max_new_tokens=8).tolist() == plain
    assert "torch_xla" in sys.modules


@pytest.mark.parametrize("family", ["gemma2", "mixtral", "neox"])
def test_other_families_keep_the_tokens_on_neuron(runtime: Runtime, tmp_path: Path, family: str) -> None:
    """Capped scores and sliding windows, experts, and gelu: the greedy text of eager, drafted or not."""
    folder = save_pair(tmp_path, family)[1]
    asked = {"max_new_tokens": 10}
    wanted = fresh(folder, backend="eager", batch_size=2).sample(PROMPTS, **asked).tolist()
    target = fresh(folder, backend="neuron", batch_size=2)
    assert target.sample(PROMPTS, **asked).tolist() == wanted
    assert SpeculativeGenerator("ngram", target, k=2).sample(PROMPTS, **asked).tolist() == wanted


def test_trees_keep_the_tokens_and_compact_the_cache(workshop: Workshop, runtime: Runtime) -> None:
    target = pair(workshop, "neuron", slots=4)[1]
    plain = target.sample(FOUR, max_new_tokens=20, return_dict=True)
    texts = [row[:length].tolist() for row, length in zip(plain.sequences, plain.lengths, strict=True)]
    made = SpeculativeGenerator(Orchard(texts, grown=True), target).sample(FOUR, max_new_tokens=20, return_dict=True)
    assert torch.equal(made.sequences, plain.sequences)
    assert made.statistics.tau > 1.3


def test_graphs_are_saved_and_reused(
    workshop: Workshop, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = pair(workshop, "neuron")[1]
    with pytest.raises(ArtefactError, match="save: expected compiled graphs, got none"):
        target.save(tmp_path / "shipped")
    wanted = target.sample(PROMPTS, max_new_tokens=6).tolist()
    assert all("--target=inf2" in flags and "--auto-cast=none" in flags for flags in runtime().compiled)
    assert {flags.split("-O")[1][0] for flags in runtime().compiled} == {"1", "2"}
    assert all("--enable-ccop-compute-overlap" in flags for flags in runtime().compiled)
    assert all(("--modular-flow-mac-threshold=10" in flags) == ("-O1" in flags) for flags in runtime().compiled)
    count = len(runtime().compiled)
    target.save(tmp_path / "shipped")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "other"))
    again = pair(workshop, "neuron")[1]
    with pytest.raises(ArtefactError, match="expected compiled graphs, got none; write them with decoder"):
        again.load(tmp_path)
    again.load(tmp_path / "shipped")
    assert again.sample(PROMPTS, max_new_tokens=6).tolist() == wanted
    assert len(runtime().compiled) == count
    # What was shipped can be shipped on; other graphs of the machine's cache stay where they are.
    cache.ensure(tmp_path / "other" / "neuron", {"of": "another model"}, lambda _folder: None)
    again.save(tmp_path / "on")
    names = [sorted(path.name for path in (tmp_path / at).iterdir()) for at in ("shipped", "on")]
    assert names[0] == names[1] and len(names[0]) == count


@pytest.mark.parametrize("form", ["fp8_e4m3", "int8"])
def test_quantised_weights_give_the_tokens_of_eager(workshop: Workshop, runtime: Runtime, form: str) -> None:
    """A draft model and its target; graphs that hold e4m3, and no others, are compiled with the flag for it."""
    found = []
    for backend in ("eager", "neuron"):
        draft, target = (load(workshop, role, backend=backend, quantization=form) for role in ("draft", "target"))
        found.append(SpeculativeGenerator(draft, target, k=2).sample(PROMPTS, **ASKED).tolist())
    assert found[0] == found[1]
    assert runtime().compiled
    assert {"fp8e4m3fn-as-fp8e4m3" in flags for flags in runtime().compiled} == {form == "fp8_e4m3"}


def test_the_environment_is_set_before_the_runtime_starts(workshop: Workshop, runtime: Runtime) -> None:
    pair(workshop, "neuron")
    assert (runtime().timeout, runtime().rounding) == ("60", "0")


def test_inputs_in_another_memory_layout_are_accepted(install: Any) -> None:
    install()
    turned, dense = torch.arange(6.0).view(2, 3).T, torch.arange(6.0).view(3, 2)
    flat = Function(lambda x: x.reshape(-1) * 2)
    step = neuron.NeuronBackend().compile(Graph(GraphKey("flat"), flat, (dense,), {}), print)
    assert torch.equal(step(turned)[0], turned.reshape(-1) * 2)
    assert torch.equal(step(dense)[0], dense.reshape(-1) * 2)


def test_a_graph_that_breaks_a_rule_is_refused_before_the_compiler_sees_it(install: Any) -> None:
    install()
    sorting = Graph(GraphKey("sorting"), Function(lambda x: x.sort(-1).values), (torch.randn(3),), {})
    with pytest.raises(BackendError, match="cannot be compiled for Neuron: operator"):
        neuron.NeuronBackend().compile(sorting, print)


def test_the_hlo_of_the_sdk_is_linted_too(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults that our own graph does not show: the module has an operator more. One that no list forbids is only
    logged.
    """
    install()
    backend = neuron.NeuronBackend()  # sets the environment, which has to be there before the SDK is imported
    functions = importlib.import_module("neuronx_distributed.trace.functions")
    graph, said = Graph(GraphKey("doubling"), Function(lambda x: x + x), (torch.randn(3),), {}), list[str]()
    monkeypatch.setattr(functions.Recorded, "computations", proto(BREAKING["sort"]).computations)
    with pytest.raises(BackendError, match=r"cannot be compiled for Neuron as it was traced: sort: s\.20"):
        backend.compile(graph, said.append)
    monkeypatch.setattr(functions.Recorded, "computations", proto(BREAKING["unlisted"]).computations)
    backend.compile(graph, said.append)
    assert any("may not compile for Neuron: unlisted: q.20" in one for one in said)


@pytest.mark.parametrize("gqa", ["replicated-heads", "all-gather-heads"])
def test_a_tensor_parallel_model_keeps_the_tokens(workshop: Workshop, runtime: Runtime, gqa: str) -> None:
    """The steps of all ranks are one graph, with separate weights and states. One layout of heads drafts too."""
    asked = {**ASKED, "max_new_tokens": 10}  # the stand-in interprets every operation of every rank
    wanted = pair(workshop, "eager")[1].sample(PROMPTS, **asked).tolist()
    roles = ("draft", "target") if gqa == "all-gather-heads" else ("target",)
    made = [load(workshop, role, tp_degree=4, group_query_attention=gqa) for role in roles]
    source = SpeculativeGenerator(*made, k=2) if len(made) > 1 else made[0]
    done = source.sample(PROMPTS, return_dict=True, **asked)
    assert done.sequences.tolist() == wanted
    assert done.statistics.tau > 1.3 or len(made) == 1
    assert len(runtime().locks) == 4
    with pytest.raises(ConfigurationError, match="load it with tp_degree=4"):
        fresh(workshop.checkpoint(), backend="neuron")


def test_a_sharded_eagle_head_keeps_the_tokens(workshop: Workshop, runtime: Runtime, tmp_path: Path) -> None:
    """Two cores, each with its heads and its part of the ids that can be drafted, which have gaps."""
    asked = {**ASKED, "max_new_tokens": 6}
    found = []
    for backend, degree in (("eager", 1), ("neuron", 2)):
        target = load(workshop, backend=backend, tp_degree=degree)
        drafter = heads.drafter(tmp_path, target, 3, Chain(2), divided=degree > 1)
        done = SpeculativeGenerator(drafter, target).sample(PROMPTS, return_dict=True, **asked)
        found.append((done.sequences.tolist(), done.statistics.num_accepted_tokens_per_pos))
    assert found[0] == found[1]


def test_degrees_the_chip_lacks_are_rejected_first(
    workshop: Workshop, install: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(target="trn1")
    monkeypatch.setattr("paceline.build.load_weights", None)
    with pytest.raises(BackendError, match=r"tp_degree: expected .* on trn1, got 4"):
        AutoDecoder.from_pretrained(workshop.checkpoint(), backend="neuron", tp_degree=4)


@pytest.mark.parametrize("mode", ["model, fused", "eagle 3, chain"])
def test_batch_buckets_keep_the_tokens(
    workshop: Workshop, runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Two models in a graph; and features that stay on the device between rounds of as many slots."""
    plain = SpeculativeGenerator(None, workshop.decoder(backend="eager"), k=0)
    made = batched.generator(workshop, mode, tmp_path / "heads", backend="neuron", buckets=[1, 4])
    seen = batched.watch(monkeypatch, made.target)
    assert batched.texts(made, "greedy") == batched.texts(plain, "greedy")
    assert [lines for lines, _ in seen] == [1 if seated == 1 else 4 for _, seated in seen]
    assert {lines for lines, _ in seen} == {1, 4}


@pytest.mark.parametrize(("slots", "most"), [(1, 16), (16, 28)])
def test_by_default_a_pair_has_few_graphs(workshop: Workshop, runtime: Runtime, slots: int, most: int) -> None:
    """Each graph takes minutes to compile; a CPU would have 44 and 112 at 4,096 positions."""
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


def test_compiling_ahead_makes_the_graphs_of_every_bucket(workshop: Workshop, runtime: Runtime, tmp_path: Path) -> None:
    """And those that move requests, so that no call has to wait."""
    made = batched.generator(workshop, "eagle 3, chain", tmp_path / "heads", backend="neuron", buckets=[1, 4])
    made.compile(kinds=["greedy"])
    before = [graph.key for graph, _ in made.target.graphs()]
    assert {key.batch for key in before if key.is_round} == {0, 1}
    assert [key.kind for key in before].count("move") == 2  # of the target and of its head
    batched.texts(made, "greedy")
    assert [graph.key for graph, _ in made.target.graphs()] == before


def test_selftest_reports_times(workshop: Workshop, install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    decoder = load(workshop)
    decoder.sample([[3, 1, 4]], max_new_tokens=1)
    monkeypatch.setattr(selftest, "CALLS", 3)
    ticks = count()
    assert round_cost.expected_here() is None
    monkeypatch.setattr(round_cost, "instance_family", lambda: "inf2.xlarge")
    found = selftest.graph_times(decoder, round_cost.expected_here(), clock=lambda: 0.001 * next(ticks))
    assert [one.name for one in found] == [graph.name for graph, _ in decoder.graphs()] and found
    for one in found:
        assert one.seconds == pytest.approx(0.001) and one.expected is not None
        assert 437e-6 < one.expected < 0.01, "the host's call, and a tiny model"
    assert str(found[0]).endswith("by arithmetic)") and " 1.00 ms (" in str(found[0])
    assert [one.expected for one in selftest.graph_times(decoder, None)] == [None] * len(found)
