"""Graphs are made first and weights go to the device once, on the fake, which counts loads and memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline import SpeculativeGenerator
from paceline.core.errors import BackendError
from paceline.decoder import steps
from paceline.decoder.backends.base import Graph
from paceline.decoder.graph_key import GraphKey
from paceline.neuron import backend as neuron
from paceline.neuron import chip
from tests.decoder.tiny import Workshop, fresh
from tests.neuron.conftest import SDK, VARIABLES, Function, Install, Runtime, forget, write_packages
from tests.neuron.test_backend import PROMPTS, pair

X = torch.ones(2, 4)


class Products(nn.Module):
    """x times every weight, and a state that counts calls."""

    def __init__(self, weights: list[nn.Parameter], state: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)
        self.register_buffer("calls", state)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.add_(1)
        for weight in self.weights:
            x = x @ weight
        return x, self.calls + 0


def weights(count: int) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(4, 4), requires_grad=False) for _ in range(count)]


def kinds(runtime: Any) -> list[str]:
    return ["graph" if kind[0] == "g" else kind for kind, _ in runtime.loads]


def made(name: str, own: list[nn.Parameter], state: Tensor) -> Graph:
    return Graph(GraphKey(name), Products(own, state), (X,), {"graph": name})


def test_prepared_graphs_compile_in_parallel(install: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chip, "_MAX_COMPILERS", 3)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    backend, own, state, said = neuron.NeuronBackend(), weights(2), torch.zeros(1), []
    runtime().meeting = threading.Barrier(3, timeout=60)  # breaks unless three compile at a time
    with backend.prepare():
        steps = [backend.compile(made(name, own, state), said.append) for name in ("one", "two", "three")]
        blank = steps[0](X)
        assert [x.tolist() for x in blank] == [[[0.0] * 4] * 2, [0.0]], "zeros of the results' shapes"
        assert not runtime().loads
    assert kinds(runtime()) == ["weights", "states", "graph", "graph", "graph"]
    assert said[0].startswith("3 graphs, 3 at a time: about 5 minutes for those that the cache lacks, and")
    assert "about 126 MiB of programs a core, of which 96 MiB are micro-code" in said[0]
    assert sorted(text[:20] for text in said if "done" in text) == [f"{n} of 3 graphs done: "[:20] for n in (1, 2, 3)]
    runtime().meeting = None
    loads = len(runtime().loads)
    assert [step(X)[1].item() for step in steps] == [1, 2, 3], "one state for all of them, which no blank call changed"
    assert len(runtime().loads) == loads


def test_a_later_graph_loads_without_reloading_weights(install: Any, runtime: Runtime) -> None:
    backend, own, state = neuron.NeuronBackend(), weights(3), torch.zeros(1)
    first = backend.compile(made("one", own[:2], state), print)
    assert first(X)[1].item() == 1
    before = len(runtime().loads)
    second = backend.compile(made("two", own[:2], state), print)
    assert second(X)[1].item() == 2
    assert kinds(runtime())[before:] == ["graph"]
    assert not runtime().fetched, "no state went home"
    before = len(runtime().loads)
    backend.compile(made("three", own, state), print)(X)
    assert runtime().loads[before] == ("weights", 64) and kinds(runtime())[before + 1 :] == ["graph"]
    assert first(X)[1].item() == 4


def test_a_rejected_graph_is_dropped(install: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, own, state = neuron.NeuronBackend(), weights(1), torch.zeros(1)
    compile_one = backend._chip._compile

    def compile_but_one(entry: Any, folder: Any) -> None:
        if entry.key.kind == "bad":
            raise BackendError("bad: neuronx-cc failed")
        compile_one(entry, folder)

    monkeypatch.setattr(backend._chip, "_compile", compile_but_one)
    runtime().refused = {"g2"}
    steps = {}
    with pytest.raises(BackendError, match="2 of 4 graphs cannot be used; the others are ready"), backend.prepare():
        for name in ("good", "bad", "unloadable", "better"):
            steps[name] = backend.compile(made(name, own, state), print)
    for name, reason in (("bad", "bad: neuronx-cc failed"), ("unloadable", "cannot be loaded on the device .nrt_load")):
        with pytest.raises(BackendError, match=reason):
            steps[name](X)
    assert [steps[name](X)[1].item() for name in ("good", "better", "good")] == [1, 2, 3]


def test_an_interrupted_warm_up_is_made_good(install: Any, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, steps = neuron.NeuronBackend(), []
    with pytest.raises(KeyError), backend.prepare(), monkeypatch.context() as patch:
        patch.setattr(backend._chip, "_compiled", lambda _entry: None)  # as if its turn had not come
        steps.append(backend.compile(made("one", weights(1), torch.zeros(1)), print))
        raise KeyError
    assert not runtime().compiled
    assert steps[0](X)[1].item() == 1 and len(runtime().compiled) == 1


def test_more_than_a_cores_memory_is_rejected(install: Any, runtime: Runtime) -> None:
    backend, own, state = neuron.NeuronBackend(), weights(2), torch.zeros(1)
    assert runtime().capacity == 16 * 2**30
    runtime().capacity = 2 * 64 + 4
    step = backend.compile(made("fits", own, state), print)
    step(X)
    assert runtime().used == {0: 2 * 64 + 4}
    large = backend.compile(made("large", [*own, nn.Parameter(torch.ones(4, 4), requires_grad=False)], state), print)
    with pytest.raises(BackendError, match=r"the weights \(1 tensors of 0\.00 GiB a core\) could .*nrt_tensor_alloc"):
        large(X)


def test_warm_up_loads_the_weights_of_a_pair_once(workshop: Workshop, runtime: Runtime) -> None:
    asked = {"max_new_tokens": 8}
    wanted = pair(workshop, "eager")[1].sample(PROMPTS, **asked).tolist()
    generator = SpeculativeGenerator(*pair(workshop, "neuron"), k=2)
    generator.compile(kinds=["greedy"])
    assert not runtime().calls, "nothing ran"
    before, compiled = list(runtime().loads), len(runtime().compiled)
    assert kinds(runtime()).count("weights") == 1
    assert kinds(runtime()).count("graph") == compiled == len(neuron.chip().graphs)
    assert generator.sample(PROMPTS, **asked).tolist() == wanted
    assert runtime().loads == before and len(runtime().compiled) == compiled, "warm-up made every graph"


@pytest.fixture
def compiled(install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Function that compiles one graph in a process with its own compiler and machine: its flags, or nothing if the
    graph is in the folder that all processes have.
    """
    install()

    def flags(
        *, kind: str = "verify", by: float = 2.0, target: str = "trn2", logical: str = "2", **versions: str
    ) -> list[str]:
        forget()
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", target)
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", logical)
        for variable in VARIABLES:
            monkeypatch.delenv(variable, raising=False)
        write_packages(tmp_path / "site", SDK | {key.replace("_", "-"): value for key, value in versions.items()})
        graph = Graph(GraphKey(kind), Function(lambda x: x * by), (torch.ones(2),), {"graph": "the same"})
        step = neuron.NeuronBackend().compile(graph, lambda _line: None)
        assert step(torch.ones(2))[0].tolist() == [by, by]
        import torch_neuronx

        return list(torch_neuronx.RUNTIME.compiled)

    return flags


def test_the_cache_key_covers_versions_chip_flags_and_graph(compiled: Callable[..., list[str]]) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"neuronx_cc": "2.24.5133.0"},
        {"neuronx_cc": "2.23.9999.0"},
        {"torch_neuronx": "2.9.0.2.13.0"},
        {"neuronx_distributed": "0.18.1"},
        {"target": "inf2", "logical": "1"},
        {"target": "trn1", "logical": "1"},
        {"logical": "1"},
        {"by": 3.0},
        {"kind": "prefill"},  # the same graph, with the flags of one that reads a prompt
    ]
    flags = [compiled(**change) for change in changes]
    assert [len(one) for one in flags] == [1] * len(changes), "each is compiled by itself"
    assert [compiled(**change) for change in changes] == [[]] * len(changes), "and found again"
    assert "-O1" in flags[-1][0] and "-O2" in flags[0][0]
    assert "--lnc=2" in flags[0][0] and "--lnc=1" in flags[7][0] and "--target=inf2" in flags[5][0]


def test_the_cache_key_does_not_depend_on_trace_order(workshop: Workshop, runtime: Any) -> None:
    tokens, row, said, seen = torch.ones(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), [], 0
    for order in (1, -1):
        decoder = fresh(workshop.checkpoint(), backend="neuron", amp="f32", batch_size=2)
        jobs: list[Any] = [
            lambda one=decoder: steps.prefill(one, 0, [1, 2, 3]),
            lambda one=decoder: steps.window(one, tokens, row, bucket=64),
            lambda one=decoder: one.sample([[5, 5]], max_new_tokens=3),
        ]
        for job in jobs[::order]:
            job()
        said.append(decoder.sample([[5, 5]], max_new_tokens=3).tolist())
        made, seen = len(runtime().compiled) - seen, len(runtime().compiled)
        neuron.chip.cache_clear()
    assert said[0] == said[1]
    assert (made, seen >= 3) == (0, True)
