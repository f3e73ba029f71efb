"""Graphs for compilers: fixed shapes, no branch on data, operations that every backend has."""

from __future__ import annotations

from functools import lru_cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from paceline.core import tree
from paceline.core.acceptance.match import Match
from paceline.core.acceptance.rejection import Reject
from paceline.core.types import DraftShape, FeatureSpec
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.native.ops import SHAPES
from paceline.decoder.steps import PrefillStep, WindowStep
from paceline.draft.heads import ChainStep
from paceline.draft.model import ModelHead
from paceline.draft.vocab_map import VocabMap
from paceline.target.steps import FusedStep, VerifyStep
from tests.decoder.tiny import VOCABULARY, Workshop

pytestmark = pytest.mark.full  # no backend of CPUs compiles

SLOTS, NODES, WIDTH = 4, 3, 5
CHAIN, TREE, GROWN = DraftShape.chain(NODES), (-1, -1, 0), DraftShape(NODES, 3, dynamic=True)
FORBIDDEN = {
    "sort",
    "topk",
    "kthvalue",
    "median",
    "nonzero",
    "unique",
    "masked_select",
    "_local_scalar_dense",
    "item",
    "_assert_async",
    "multinomial",
    "bernoulli",
    "rand",
    "bincount",
    "argmax",
    "argmin",
    "cond",
    "while_loop",
}
"""Data-dependent shapes and branches, state of a random generator, and reductions whose ties are the backend's."""


def draft_step(body: ModelWithCache, bucket: int, *, drawn: bool) -> nn.Module:
    head = ModelHead(body, VocabMap(VOCABULARY, VOCABULARY), body.options)
    return ChainStep(head, NODES, bucket, drawn=drawn)


STEPS = {
    "prefill": PrefillStep,
    "window": WindowStep,
    "verify": partial(VerifyStep, draft_shape=CHAIN, rule=Match()),
    "verify nothing": partial(VerifyStep, draft_shape=DraftShape.chain(0), rule=Match()),
    "verify, reject": partial(VerifyStep, draft_shape=CHAIN, rule=Reject()),
    "verify, reject, drawn": partial(VerifyStep, draft_shape=CHAIN, rule=Reject()),
    "verify, tree": partial(VerifyStep, draft_shape=tree.draft_shape(TREE), rule=Match(), reads=FeatureSpec()),
    "verify, grown": partial(VerifyStep, draft_shape=GROWN, rule=Match(), reads=FeatureSpec((0, 2))),
    "fused": lambda body, reach: FusedStep(
        draft_step(body, reach, drawn=False), VerifyStep(body, reach, draft_shape=CHAIN, rule=Match())
    ),
    "draft": partial(draft_step, drawn=False),
    "draft, drawn": partial(draft_step, drawn=True),
}


def inputs(name: str, seed: int) -> tuple[Tensor, ...]:
    """Inputs of a step; another seed changes every value and no shape."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    if name == "prefill":
        return ids(0, VOCABULARY, 1, 16), ids(0, 50, 1), ids(1, 16, 1), ids(0, SLOTS, 1)
    if name == "window":
        return ids(0, VOCABULARY, SLOTS, WIDTH), ids(0, 90, SLOTS)
    commit = (ids(0, VOCABULARY, SLOTS, WIDTH), ids(1, WIDTH, SLOTS), ids(0, 90, SLOTS))
    params, keys = torch.rand(SLOTS, 4, generator=generator) * seed, ids(0, (1 << 16) - 1, SLOTS, 4)
    if name == "fused":
        return *commit, ids(0, NODES, SLOTS), params, keys
    if name == "verify, grown":
        drafts, parents = ids(-1, VOCABULARY, SLOTS, NODES), ids(-1, 1, SLOTS, NODES)
        return *commit, ids(0, NODES, SLOTS), params, keys, drafts, parents
    if name.startswith("draft"):
        return *commit, params, keys
    drafts, distribution = ids(-1, VOCABULARY, SLOTS, NODES), torch.rand(SLOTS, NODES, VOCABULARY, generator=generator)
    more = {"verify nothing": (), "verify, reject, drawn": (drafts, distribution)}.get(name, (drafts,))
    return *commit, ids(0, NODES, SLOTS), params, keys, *more


@pytest.fixture(scope="module", params=STEPS)
def traced(request: pytest.FixtureRequest, workshop: Workshop) -> tuple[str, nn.Module, ExportedProgram]:
    """A step over the native kernels, and its graph."""
    decoder = workshop.decoder(backend="native")
    _tell_shapes()
    step = STEPS[request.param](decoder.body, decoder.n_positions)
    return request.param, step, program(step, inputs(request.param, 0))


@lru_cache
def _tell_shapes() -> None:
    """Tell PyTorch's export, which knows no kernels, what they give."""
    for name, shape in SHAPES.items():
        torch.library.register_fake(f"paceline::{name}", shape)


def program(step: nn.Module, example: tuple[Tensor, ...]) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(step, example, strict=False)


Traced = tuple[str, nn.Module, ExportedProgram]


def test_values_do_not_change_the_graph(traced: Traced) -> None:
    name, step, exported = traced
    other = program(step, inputs(name, 1))
    assert str(other.graph) == str(exported.graph)
    assert other.graph_module.code == exported.graph_module.code


def test_no_shape_depends_on_data(traced: Traced) -> None:
    exported = traced[2]
    assert not exported.range_constraints
    for value in values(exported):
        assert all(type(size) is int for size in (*value.shape, *value.stride()))


def values(exported: ExportedProgram) -> list[Tensor]:
    """Every tensor of a graph."""
    found = [node.meta.get("val") for node in exported.graph.nodes]
    flat = [x for value in found for x in (value if isinstance(value, (list, tuple)) else (value,))]
    return [x for x in flat if isinstance(x, Tensor)]


def test_graphs_use_only_operations_of_every_backend(traced: Traced) -> None:
    called = {str(node.target) for node in traced[2].graph.nodes if node.op == "call_function"}
    assert called
    words = {target: target.removeprefix("aten.").split(".")[0] for target in called}
    assert not {target for target, word in words.items() if word in FORBIDDEN}


def test_graphs_have_no_64_bit_numbers_except_pytorch_indices(traced: Traced) -> None:
    exported = traced[2]
    assert torch.float64 not in {value.dtype for value in values(exported)}
    wide = {
        str(node.target).removeprefix("aten.").split(".")[0]
        for node in exported.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor) and value.dtype == torch.int64
    }
    # Made for gather, and from arange where ids are compared; no product or sum of them.
    assert wide <= {"to", "_to_copy", "view", "expand", "unsqueeze", "arange", "clamp", "sub", "add"}


def test_graphs_have_no_infinite_constants(traced: Traced) -> None:
    for node in traced[2].graph.nodes:
        for argument in node.args:
            assert not (isinstance(argument, float) and abs(argument) == float("inf"))


def test_only_weights_and_caches_are_state(traced: Traced) -> None:
    """A tensor made inside a step would travel with the package."""
    name, step, exported = traced
    named = {*dict(step.named_parameters(remove_duplicate=False)), *dict(step.named_buffers(remove_duplicate=False))}
    held = {*exported.state_dict, *exported.constants}
    assert held <= named
    assert all(any(one.endswith(f"body.keys_{index}") for one in held) for index in range(2)), name
