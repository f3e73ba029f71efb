"""Costs of full rounds over a vocabulary of 128,256 ids, on each core of a model sharded by 1 and by 8.

All sizes but the vocabulary's are so small that nothing of a layer is as large as a rank's part of a row of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor, fx, nn

from paceline.core import tree
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.acceptance.match import Match
from paceline.core.acceptance.rejection import Reject
from paceline.core.acceptance.typical import Typical
from paceline.core.sampling import TOP_K_LIMIT
from paceline.core.types import DraftShape, FeatureSpec, SamplingKind
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.json_fields import Fields
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import DecoderOptions, LoadOptions
from paceline.decoder.parallel import sharding
from paceline.decoder.parallel.collectives import DeviceGroup
from paceline.decoder.parallel.sharding import Shard
from paceline.draft.heads import ChainStep
from paceline.draft.model import ModelHead
from paceline.draft.vocab_map import VocabMap
from paceline.eagle import train
from paceline.eagle.head import EagleHead
from paceline.eagle.tree import Chain, DraftTree, DynamicTree
from paceline.medusa.config import MedusaConfig
from paceline.medusa.drafter import MedusaHead, MedusaStep
from paceline.medusa.network import Heads
from paceline.medusa.tree import Choices
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import Lowered, lower, operator
from paceline.neuron.step_work import RowCost, step_work
from paceline.target.steps import FusedStep, VerifyStep
from tests.neuron.test_round_cost import fields

VOCABULARY, HEADS, HIDDEN, POSITIONS = 128_256, 8, 16, 32
LAYERS = (0, 0, 1)
K = 4
TILE = 128  # of step_work; what is compared here has none
WIDTH, DEPTH, NODES = 10, 8, 60  # of EAGLE-2's own tree
BUDGETS: dict[SamplingKind, tuple[float, float, float]] = {
    "greedy": (6, 2, 0),
    "top-k": (1, 0.5, 1.2),
    "full": (60, 10.5, 2.3),
}
"""Passes, reductions and calls of top-k for each row that is drafted or verified. More than two passes of the greedy
kind, and what the kind top-k has besides its top-k, is work on lists of few ids in each of many rows, which together
are as long as a row.
"""
TREE_ROWS = 1 + WIDTH * (DEPTH - 1) + NODES + 1
RULES: dict[tuple[str, SamplingKind], tuple[float, float, float]] = {
    ("reject", "greedy"): (16, 7, 0.3),
    ("reject", "top-k"): (24, 8, 2),
    ("reject", "full"): (115, 44, 2.5),
    ("reject", "wide"): (230, 98, 0.3),
    ("typical", "greedy"): (14, 7, 0),
    ("typical", "top-k"): (16, 6, 2),
    ("typical", "full"): (112, 34, 3),
    ("typical", "wide"): (265, 105, 0),
    ("match", "wide"): (180, 65, 0),
}
"""The same of what needs all probabilities, or searches rows for a border."""
MAKERS = {"reject": Reject, "typical": Typical}


def body(degree: int = 1) -> ModelWithCache:
    """Rank 0 of a model of one layer, all zeros."""
    tiny = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_attention_heads": HEADS, "head_dim": 2}
    tiny |= {"num_key_value_heads": HEADS, "num_hidden_layers": 1, "max_position_embeddings": POSITIONS}
    shape = fields("Llama-3.2-1B") | tiny
    config = ModelConfig.from_fields(Fields(shape, "a test"))
    options = DecoderOptions(LoadOptions(amp="f32"), (POSITIONS,), (16,), sharding.layout(config, degree))
    shard = Shard(config, options.layout)
    weights = {}
    for name, spec in registry.family(config.model_type).tensors(config).items():
        size, cut = list(spec.shape), shard.slice_of(spec)
        if cut is not None:
            size[cut.dim] = cut.size
        weights[name] = torch.zeros(size)
    group = DeviceGroup(degree) if degree > 1 else None
    return ModelWithCache(config, options, weights, kernels=TraceableKernels(), group=group).eval()


def pair_round(degree: int, kind: SamplingKind, *, k: int = 4, rule: AcceptanceRule | None = None) -> nn.Module:
    """A model drafts ``k`` tokens for another; drawn, where the rule wants that."""
    target, rule = body(degree), rule or Match()
    head = ModelHead(deepcopy(target), VocabMap(VOCABULARY, VOCABULARY), target.options)
    drafts = ChainStep(head, k, POSITIONS, drawn=rule.draft_probs, kind=kind)
    return FusedStep(drafts, VerifyStep(target, POSITIONS, draft_shape=DraftShape.chain(k), rule=rule, kind=kind))


def eagle_round(
    degree: int, kind: SamplingKind, draft_tree: DraftTree, *, version: int = 1, drafted: int = VOCABULARY
) -> nn.Module:
    """An EAGLE head that drafts ``drafted`` of the target's ids; version 1, of EAGLE-1 and 2, drafts them all."""
    target = body(degree)
    config = train.default_config(target.config, version=version, layers=LAYERS, draft_vocab_size=drafted)
    config = replace(config, num_heads=1, num_kv_heads=1)  # every rank has all of the head
    weights = {name: torch.zeros(shape) for name, shape in config.shapes().items()}
    if version == 3:
        weights["ids"] = torch.arange(drafted) * (VOCABULARY // drafted)
    head = EagleHead(config, weights, shared=target.shared, kernels=target.kernels, options=target.options)
    shape = draft_tree.draft_shape
    checked = VerifyStep(target, POSITIONS, draft_shape=shape, rule=Match(), reads=head.config.reads, kind=kind)
    return FusedStep(draft_tree.step(head, POSITIONS, kind), checked)


def medusa_round(degree: int, kind: SamplingKind, choices: Choices) -> nn.Module:
    """Tied heads that fill a tree."""
    target = body(degree)
    shape = MedusaConfig(choices.depth, 1, HIDDEN, VOCABULARY, tied=True)
    heads = Heads(shape, target.model.head, torch.float32, group=target.group, ids=target.model.ids)
    heads.fill({name: torch.zeros(size) for name, size in shape.shapes().items()})
    drafts = MedusaStep(MedusaHead(heads, target.kernels, target.options), choices, kind=kind)
    draft_shape = tree.draft_shape(choices.parents)
    checked = VerifyStep(target, POSITIONS, draft_shape=draft_shape, rule=Match(), reads=FeatureSpec(), kind=kind)
    return FusedStep(drafts, checked)


def inputs(step: nn.Module, depth: int) -> tuple[Tensor, ...]:
    """Inputs of a round whose proposals are ``depth`` deep, with the features that its head reads."""
    one = torch.ones(1, dtype=torch.int32)
    commit = (torch.ones(1, depth + 1, dtype=torch.int32), one, one)
    round_ = (*commit, one, torch.zeros(1, 4), torch.zeros(1, 4, dtype=torch.int32))
    reads = step.verify._reads if isinstance(step, FusedStep) else None
    if reads is None:
        return round_
    return (*round_, torch.zeros(1, depth + 1, HIDDEN * max(1, len(reads.layers))))


def cost(step: nn.Module, degree: int, *, depth: int = K) -> RowCost:
    return step_work(step, inputs(step, depth), VOCABULARY // degree, tile=TILE).rows


def check(found: RowCost, budget: tuple[float, float, float], rows: int) -> None:
    passes, reductions, topk = budget
    each = (found.passes / rows, found.reductions / rows, found.topk / rows)
    print(f"a row: {each[0]:.1f} passes, {each[1]:.1f} reductions, {each[2]:.2f} top-k; {found}")
    assert each[0] <= passes and each[1] <= reductions and each[2] <= topk, each
    assert found.sent <= TOP_K_LIMIT


CHOICES = Choices.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 0, 0]])
TREE = DynamicTree(NODES, depth=DEPTH, width=WIDTH)
ROUNDS: dict[str, tuple[Callable[[int, SamplingKind], nn.Module], int, int, int, tuple[float, float]]] = {
    "two models": (partial(pair_round, k=K), K, K + K + 1, 0, (0, 0)),
    # What is gathered is which choice of which head a node is.
    "medusa": (
        partial(medusa_round, choices=CHOICES),
        CHOICES.depth, CHOICES.depth + len(CHOICES) + 1, len(CHOICES), (0, 1),
    ),
    # A level asks for the best ten of every node, which is a call of top-k in the greedy kind too.
    "eagle 2": (partial(eagle_round, draft_tree=TREE), DEPTH, TREE_ROWS, 0, (0.1, 1)),
}  # fmt: skip
"""The round, its depth, its rows, the numbers it gathers; and reductions and top-k of the greedy kind beyond budget."""


@pytest.mark.parametrize("degree", [1, 8])
@pytest.mark.parametrize("kind", BUDGETS)
@pytest.mark.parametrize("name", ROUNDS)
def test_a_round_stays_within_its_budget(name: str, kind: SamplingKind, degree: int) -> None:
    make, depth, rows, gathered, more = ROUNDS[name]
    passes, reductions, topk = BUDGETS[kind]
    if kind == "greedy":
        reductions, topk = reductions + more[0], topk + more[1]
    found = cost(make(degree, kind), degree, depth=depth)
    check(found, (passes, reductions, topk), rows)
    assert found.gathered == gathered and (found.sent > 0) == (degree > 1)


@pytest.mark.parametrize("kind", BUDGETS)
def test_a_head_that_drafts_some_ids_looks_up_no_more_than_its_list(kind: SamplingKind) -> None:
    """EAGLE-3 drafts 32,000 ids under the target's numbers: those are looked up for what is listed of every row."""
    chain = cost(eagle_round(1, kind, Chain(K), version=3, drafted=32_000), 1)
    check(chain, BUDGETS[kind], K + K + 1)
    assert chain.gathered <= TOP_K_LIMIT
    assert cost(eagle_round(1, kind, TREE, version=3, drafted=32_000), 1, depth=DEPTH).gathered <= TOP_K_LIMIT * WIDTH


@pytest.mark.parametrize(("rule", "kind"), RULES)
def test_rounds_that_search_rows_have_separate_budgets(rule: str, kind: SamplingKind) -> None:
    made = MAKERS[rule]() if rule in MAKERS else None
    found = cost(pair_round(1, kind, k=K, rule=made), 1)
    check(found, RULES[rule, kind], K + K + 1)
    assert found.gathered == 0


def test_every_sampling_mode_has_a_budget() -> None:
    assert {*BUDGETS, "wide"} == set(get_args(SamplingKind))


def lowered_cost(lowered: Lowered, width: int) -> RowCost:
    """The same counts of what depends on an input or a state in a lowered graph."""
    cost, dependent = RowCost(width), set[fx.Node]()
    for node in lowered.graph.graph.nodes:
        if node.op == "placeholder" or any(one in dependent for one in node.all_input_nodes):
            dependent.add(node)
        if node.op == "call_function" and node in dependent:
            given = fx.node.map_arg(node.args, lambda one: one.meta.get("val"))
            cost.add(operator(node.target), given, node.meta.get("val"))
    return cost


@pytest.mark.parametrize("make", [partial(pair_round, 8, "greedy", k=2), partial(eagle_round, 8, "top-k", Chain(1))])
def test_counts_of_the_lowered_graph_equal_the_steps(make: partial[nn.Module]) -> None:
    step = make()
    depth = 2 if make.func is pair_round else 1
    width = VOCABULARY // 8
    found = lowered_cost(lower("round", step, inputs(step, depth)), width)
    assert found == step_work(step, inputs(step, depth), width, tile=TILE).rows
    assert found.sent > 0 and found.passes + found.topk > 0


class Gathering(nn.Module):
    """Operations that budgets forbid: a row gathered by its ids, and a full row sent. Embedding lookups do not
    count.
    """

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.group = what, body(8).group

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.what == "sent":
            return self.group.gather(x)
        return x.index_select(-1, ids) if self.what == "gathered" else x.index_select(0, ids[:1])


@pytest.mark.parametrize("what", ["sent", "gathered", "rows"])
def test_gathers_and_collectives_are_counted(what: str) -> None:
    example = torch.zeros(2, 900), torch.zeros(900, dtype=torch.int32)
    found = step_work(Gathering(what), example, 900, tile=TILE).rows
    assert (found.sent, found.gathered) == {"sent": (900, 0), "gathered": (0, 1800), "rows": (0, 0)}[what]
