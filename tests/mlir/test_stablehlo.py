"""Every graph of `neuron-native` lowers to StableHLO by torch-mlir, the library that TorchNeuron's compiler uses.

Its steps around torch-mlir (fx_transform.py, 2026-04-21): its table of decompositions, writes into inputs become
outputs, then import and lowering. Its own pass for what torch-mlir lacks (top-k, collectives) is closed.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from paceline.decoder.decoder import ModelWithCache
from paceline.neuron import graph_lint
from paceline.neuron import native as neuron_native
from paceline.neuron.lowering import lower, state_of
from paceline.neuron.native import in_place
from tests.decoder.steps import SAMPLED, STEPS, inputs, traceable
from tests.decoder.tiny import Workshop

CASES = [(name, kind) for name in SAMPLED for kind in ("greedy", "top-k", "full", "wide")]
CASES += [(name, None) for name in STEPS if name not in SAMPLED]

aten = torch.ops.aten
TAKEN_APART = get_decompositions([aten.embedding, aten.split, aten.split_with_sizes, aten.silu, aten.squeeze.dims])
"""Those of its table (decompositions.py) that our graphs have."""


@pytest.fixture(scope="module")
def body(workshop: Workshop) -> ModelWithCache:
    return traceable(workshop.decoder(backend="eager"))


def functional(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a graph whose writes into inputs are outputs, after its own outputs."""
    (output,) = graph.graph.find_nodes(op="output")
    writes = graph.graph.find_nodes(op="call_function", target=aten.copy_.default)
    output.args = ((*output.args[0], *(node.args[1] for node in writes)),)
    for node in writes:
        graph.graph.erase_node(node)
    graph.graph.lint()
    graph.recompile()
    return graph


def without_topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Stand in for the device's own top-k: torch-mlir has a sort for it, which Neuron refuses."""
    rows = x[..., :count]
    return rows, torch.zeros_like(rows, dtype=torch.int32)


@pytest.mark.parametrize(("name", "kind"), CASES, ids=lambda x: str(x))
def test_a_graph_lowers_to_stablehlo(
    body: ModelWithCache, monkeypatch: pytest.MonkeyPatch, name: str, kind: str | None
) -> None:
    library: Any = importlib.import_module("torch_mlir.fx")
    monkeypatch.setattr(neuron_native, "topk", without_topk)
    step = STEPS[name](body, 128, **({"kind": kind} if kind else {}))
    given = inputs(name, 1)
    lowered = lower(name, step, given)
    assert graph_lint.lint(lowered) == []
    state = [tensor.clone() for tensor in state_of(step, lowered).values()]
    graph = make_fx(in_place(lowered, torch.device("cpu")), TAKEN_APART, "fake")(*state, *given)
    text = str(library.stateless_fx_import(functional(graph), output_type="stablehlo"))
    assert "stablehlo." in text and "torch.aten" not in text and "stablehlo.sort" not in text
