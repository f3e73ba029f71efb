"""A trace in the fake SDK: a graph of operations, and its execution on ranks, which are threads.

`SPMDModel` is `torch.classes.neuron.SPMDModel`, which runs a compiled graph for the real `NxDModel`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torch_neuronx


@dataclass
class Recorded:
    """Stands for an HLO module: what was traced, as a graph of operations.

    ``computations`` are those of the module's protobuf. There are none, unless a test puts some here.
    """

    computations: ClassVar[list[object]] = []

    graph: torch.fx.GraphModule
    weights: list[str]
    states: list[str]

    def SerializeToString(self, *, deterministic: bool = False) -> bytes:  # noqa: N802  # protobuf's name
        assert deterministic, "the maps of a protobuf have no order: bytes to compare must be deterministic"
        return str(self.graph.code).encode()

    def fingerprint(self) -> str:
        return hashlib.sha256(self.SerializeToString(deterministic=True)).hexdigest()


def record(model, inputs: dict[str, torch.Tensor]) -> Recorded:
    buffers = dict(model.named_buffers())
    held = dict(model.named_parameters()) | buffers
    states: list[str] = []

    def pure(values, given):
        before = dict(zip(held, values, strict=True))
        with _swapped(model, before):
            out = model.forward(**dict(zip(inputs, given, strict=True)))
            after = {name: getattr(model, name) for name in held}
        states[:] = [name for name in held if after[name] is not before[name]]
        for name in states:
            if name not in buffers:
                raise RuntimeError(f"{name} is a parameter: only registered buffers can be states")
            if (after[name].shape, after[name].dtype) != (before[name].shape, before[name].dtype):
                raise RuntimeError(f"state {name} changes its shape or type, so it cannot be aliased")
        return [after[name] for name in states], list(out) if isinstance(out, (tuple, list)) else [out]

    with tracing(TracingContext(FakeTensorMode(allow_non_fake_inputs=True))):  # else one for every operation
        graph = make_fx(pure)([x.detach() for x in held.values()], list(inputs.values()))
    for node in graph.graph.nodes:
        name = str(node.target).removeprefix("aten.").split(".")[0]
        if node.op == "call_function" and name.endswith("_") and not name.startswith("__"):
            raise RuntimeError(f"in-place operation {node.target} on a traced tensor")
    return Recorded(graph, list(held), list(states))


@contextmanager
def _swapped(model, tensors: dict[str, torch.Tensor]) -> Iterator[None]:
    """Other tensors in place of a module's own, and its own back at the end."""
    stores = {name: model._buffers if name in model._buffers else model._parameters for name in tensors}
    own = {name: store[name] for name, store in stores.items()}
    try:
        for name, tensor in tensors.items():
            stores[name].pop(name)
            object.__setattr__(model, name, tensor)
        yield
    finally:
        for name, store in stores.items():
            model.__dict__.pop(name, None)
            store[name] = own[name]


if not hasattr(torch.ops.neuron_double, "reduce"):

    @torch.library.custom_op("neuron_double::reduce", mutates_args=())
    def reduce(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @torch.library.custom_op("neuron_double::gather", mutates_args=())
    def gather(x: torch.Tensor, degree: int) -> torch.Tensor:
        return torch.cat([x] * degree, -1)


OPERATIONS = torch.ops.neuron_double
"""Of the cores of one group: ``reduce`` adds up, ``gather`` puts last dimensions side by side."""


class Meeting:
    """Ranks as threads, which exchange tensors in a collective."""

    def __init__(self, degree: int) -> None:
        self._barrier, self._given = threading.Barrier(degree, timeout=60), [torch.empty(0)] * degree

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = x
        self._barrier.wait()
        every = list(self._given)
        self._barrier.wait()
        return every

    def abort(self) -> None:
        self._barrier.abort()


class Rank(torch.fx.Interpreter):
    """Runs a graph as one rank of several."""

    def __init__(self, graph, rank, meeting) -> None:
        super().__init__(graph)
        self._rank, self._meeting = rank, meeting

    def call_function(self, target, args, kwargs):
        if str(target).startswith("neuron_double."):
            every = self._meeting.exchange(self._rank, args[0])
            return sum(every[1:], every[0]) if "reduce" in str(target) else torch.cat(every, -1)
        return super().call_function(target, args, kwargs)


def execute(key, graph, states, weights, args):
    """A recorded graph on every rank's states and weights, which it names. -> rank 0's outputs; states are written."""
    meeting = Meeting(len(states))

    def one(rank):
        try:
            values = [(states[rank] if name in states[rank] else weights[rank])[name] for name in graph.weights]
            with torch.no_grad():
                # A flat list: what a graph of lists takes, in order.
                return Rank(graph.graph, rank, meeting).run(*values, *[x.clone() for x in args])
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(len(states)) as pool:
        results = list(pool.map(one, range(len(states))))
    for rank, (changed, _) in enumerate(results):
        for name, value in zip(graph.states, changed, strict=True):
            states[rank][name].copy_(value)
    out = [x.clone() for x in results[0][1]]
    if any(not torch.equal(x, y) for _, other in results[1:] for x, y in zip(out, other, strict=True)):
        raise RuntimeError(f"{key}: ranks disagree, and only the first one's outputs come back")
    return out


class SPMDModel:
    def __init__(self, neff: bytes, metaneff: bytes, local_ranks_size: int, world_size: int) -> None:
        from torch_neuronx.xla_impl.trace import MODULES

        assert local_ranks_size == world_size and metaneff
        self._graph, self._neff = MODULES[neff], neff
        self._stores = None

    def initialize(self, states, weights, start_rank) -> None:
        assert start_rank == 0 and self._stores is None
        for rank_states, rank_weights in zip(states, weights, strict=True):
            missing = [name for name in self._graph.weights if name not in rank_states and name not in rank_weights]
            if missing or any(name not in rank_states for name in self._graph.states):
                raise RuntimeError(f"not on the device: {missing or self._graph.states}")
        torch_neuronx.RUNTIME.load_graph(f"graph {len(torch_neuronx.RUNTIME.loads)}", self._neff)
        self._stores = states, weights

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        assert self._stores is not None, "initialize() comes first"
        out = execute("a graph", self._graph, *self._stores, inputs)
        size = [sum(x.numel() * x.element_size() for x in part) for part in (inputs, out)]
        torch_neuronx.RUNTIME.calls.append(("a graph", size[0], size[1]))
        return out


torch.classes.neuron = SimpleNamespace(SPMDModel=SPMDModel, LayoutTransformation=None)
