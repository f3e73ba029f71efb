"""What a trace is here: a graph of operations, which `torch_neuronx.ranks` executes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


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
