"""The steps that compilers are given, over tiny decoders, with inputs for them; no tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core import tree
from paceline.core.acceptance.match import Match
from paceline.core.acceptance.rejection import Reject
from paceline.core.acceptance.typical import Typical
from paceline.core.types import DraftShape, FeatureSpec, SamplingKind
from paceline.decoder.decoder import FeatureBuffer, ModelWithCache, load_rank
from paceline.decoder.json_fields import Fields
from paceline.decoder.parallel.collectives import DeviceGroup, SingleRank
from paceline.decoder.parallel.sharding import WHOLE, Layout
from paceline.decoder.steps import CompactPathStep, MoveSlotStep, PrefillStep, ReorderSlotsStep, WindowStep
from paceline.draft.dflash.config import parse
from paceline.draft.dflash.head import BlockStep, DFlashHead
from paceline.draft.drafted_tokens import Kept
from paceline.draft.gemma4_assistant import AssistantHead
from paceline.draft.heads import ChainStep, MoveRowsStep, NextTreeStep, ReadStep
from paceline.draft.layerskip import EarlyExitHead
from paceline.draft.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorHead
from paceline.draft.model import ModelHead
from paceline.draft.mtp import MIMO, SPECULATORS, MtpHead, MtpLayout
from paceline.draft.pard import PardStep
from paceline.draft.vocab_map import IntersectionVocabMap, VocabMap
from paceline.eagle.division import part_of, shard_of
from paceline.eagle.head import EagleHead
from paceline.eagle.network import masked_state
from paceline.eagle.tree import Chain, DraftTree, DynamicTree, StaticTree
from paceline.medusa.config import MedusaConfig
from paceline.medusa.drafter import MedusaHead, MedusaStep
from paceline.medusa.network import Heads
from paceline.medusa.tree import Choices
from paceline.neuron.kernels import TraceableKernels
from paceline.target.steps import AutoregressiveStep, FusedStep, VerifyStep
from tests.decoder.tiny import VOCABULARY
from tests.draft.block_heads import fields, tensors
from tests.draft.random_heads import assistant_config, assistant_weights, mtp_config, random_weights
from tests.eagle.heads import NEWER, PARALLEL, random_head
from tests.eagle.heads import config as eagle_config

SLOTS, NODES, WIDTH = 4, 2, 3
FEATURES = {
    "fused medusa": 32, "fused eagle 1": 32, "fused eagle 1, static tree": 32, "fused eagle 2": 32,
    "fused DFlash": 2 * 32, "fused DFlash 2": 2 * 32, "fused DSpark": 2 * 32,
    "fused eagle 3": 3 * 32, "fused eagle 3, chain": 3 * 32, "fused eagle 3, static tree": 3 * 32,
    "fused eagle 3.1": 3 * 32, "fused P-EAGLE": 3 * 32, "fused P-EAGLE, static tree": 3 * 32,
    "fused MTP": 32, "fused MTP, MiMo": 32, "fused MTP, static tree": 32,
    "fused MLP speculator": 32, "fused Gemma 4 assistant": 32,
}  # fmt: skip
"""How wide the states are that a commit carries for a drafter."""
TREE = (-1, -1, 0, 0, 1)
DYNAMIC = DraftShape(4, 2, dynamic=True)

SAME = VocabMap(VOCABULARY, VOCABULARY)


def traceable(
    decoder: Any, *, layout: Layout = WHOLE, rank: int = 0, kernels: TraceableKernels | None = None
) -> ModelWithCache:
    """A decoder's model, or a rank's shard of it, built again over the kernels of graphs."""
    options = replace(decoder.options, layout=layout)
    group = DeviceGroup(layout.degree) if layout.degree > 1 else SingleRank()
    kernels = kernels or TraceableKernels()
    return load_rank(decoder.folder, decoder.config, options, kernels=kernels, rank=rank, group=group)


verify = partial(VerifyStep, rule=Match(), draft_shape=DraftShape.chain(NODES))


def draft(body: ModelWithCache, bucket: int, *, vocabulary: VocabMap = SAME, **options: Any) -> nn.Module:
    """A model that drafts."""
    return ChainStep(ModelHead(body, vocabulary, body.options), NODES, bucket, **options)


def fused(body: ModelWithCache, reach: int, *, kind: SamplingKind = "full") -> nn.Module:
    """A model that drafts for its copy; the copy has a separate cache."""
    return FusedStep(draft(deepcopy(body), reach, drawn=False, kind=kind), verify(body, reach, kind=kind))


def medusa(body: ModelWithCache, reach: int, *, carry: bool = False, kind: SamplingKind = "full") -> nn.Module:
    """Two tied heads, and the tree they fill. ``carry``: features stay on the device."""
    shape = MedusaConfig(2, 1, body.config.hidden_size, VOCABULARY, tied=True)
    heads = Heads(shape, body.model.head, torch.float32, group=body.group, ids=body.model.ids)
    torch.manual_seed(0)
    heads.fill({name: torch.randn(size) * 0.2 for name, size in shape.shapes().items()})
    choices = Choices.of([[0], [1], [0, 0], [0, 1], [1, 0]])
    drafts = MedusaStep(MedusaHead(heads, body.kernels, body.options), choices, kind=kind)
    checked = verify(body, reach, draft_shape=tree.draft_shape(choices.parents), reads=FeatureSpec(), kind=kind)
    return FusedStep(drafts, checked, FeatureBuffer((SLOTS, WIDTH, body.config.hidden_size)) if carry else None)


def eagle(
    body: ModelWithCache,
    reach: int,
    *,
    version: int,
    draft_tree: DraftTree,
    kind: SamplingKind = "full",
    changes: Mapping[str, object] = MappingProxyType({}),
) -> nn.Module:
    """A random head that shares weights with the target, and the target."""
    head = eagle_head(body, version, **changes)
    reads = head.config.reads
    checked = verify(body, reach, draft_shape=draft_tree.draft_shape, reads=reads, kind=kind)
    return FusedStep(draft_tree.step(head, reach, kind), checked)


def eagle_head(body: ModelWithCache, version: int, **changes: object) -> EagleHead:
    found = random_head(eagle_config(body.config, version, **changes))
    degree, weights = body.group.degree, dict(found.weights)
    if found.config.mask_token is not None:
        weights["masked"] = masked_state(found.config, weights)
        del weights["mask_hidden"]
    if degree > 1:
        weights = part_of(weights, found.config, shard_of(found.config, degree, body.shard.rank))
    return EagleHead(
        found.config, weights, shared=body.shared, kernels=body.kernels, options=body.options, group=body.group
    )


def some_known(body: ModelWithCache, reach: int, *, kind: SamplingKind = "full") -> nn.Module:
    """A draft that stops where it doubts, has tokens that the target has not, and others under other ids."""
    target = {str(number): number for number in range(VOCABULARY)}
    own = {str(number if number % 5 else -number): VOCABULARY - 1 - number for number in range(VOCABULARY)}
    between = IntersectionVocabMap(target, own, sizes=(VOCABULARY, VOCABULARY))
    return draft(body, reach, drawn=False, vocabulary=between, kept=Kept(confidence=0.3), kind=kind)


def pard(body: ModelWithCache, reach: int, *, parents: tuple[int, ...] = (), kind: SamplingKind = "full") -> nn.Module:
    """A model that drafts in one pass; ``parents``: a tree of the best tokens of each position."""
    kept = Kept(parents=parents)
    return PardStep(ModelHead(body, SAME, body.options), NODES, reach, mask=7, kept=kept, kind=kind)


def block(body: ModelWithCache, reach: int, *, variant: str, kind: SamplingKind = "full") -> nn.Module:
    """A random head that drafts a block, and the target."""
    told = fields(body, variant)
    config = parse(Fields(told, "config.json"), body.config)
    weights = {**tensors(body, told), "ids": torch.arange(config.vocab_size)}
    head = DFlashHead(config, weights, shared=body.shared, kernels=body.kernels, options=body.options)
    return FusedStep(BlockStep(head, NODES, reach, kind=kind), verify(body, reach, reads=config.reads, kind=kind))


def mtp(
    body: ModelWithCache, reach: int, *, layout: MtpLayout, parents: tuple[int, ...] = (), kind: SamplingKind = "full"
) -> nn.Module:
    """A random MTP layer that drafts a chain, or a tree, and the target."""
    config = mtp_config(body.config.hidden_size, VOCABULARY, layout)
    weights = random_weights(config.shapes())
    head = MtpHead(config, weights, shared=body.shared, kernels=body.kernels, options=body.options)
    if not parents:
        return FusedStep(head.step(NODES, reach, kind), verify(body, reach, reads=head.reads, kind=kind))
    checked = verify(body, reach, draft_shape=tree.draft_shape(parents), reads=head.reads, kind=kind)
    return FusedStep(NextTreeStep(head, parents, reach, kind=kind), checked)


def mlp_speculator(body: ModelWithCache, reach: int, *, kind: SamplingKind = "full") -> nn.Module:
    """Random stages, and the target."""
    config = MlpSpeculatorConfig(NODES, body.config.hidden_size, 24, VOCABULARY, tied=False, scale_input=True)
    head = MlpSpeculatorHead(config, random_weights(config.shapes()), kernels=body.kernels, options=body.options)
    return FusedStep(head.step(NODES, reach, kind), verify(body, reach, reads=head.reads, kind=kind))


def assistant(body: ModelWithCache, reach: int, *, kind: SamplingKind = "full") -> nn.Module:
    """A random assistant of Gemma 4 that drafts from some clusters of tokens, and the target."""
    config = assistant_config(body.config, clusters=12)
    head = AssistantHead(config, assistant_weights(config), body)
    return FusedStep(head.step(NODES, reach, kind), verify(body, reach, reads=head.reads, kind=kind))


def layerskip(body: ModelWithCache, reach: int, *, kind: SamplingKind = "full") -> nn.Module:
    """The target's first layer drafts for it."""
    return FusedStep(EarlyExitHead(body, 1).step(NODES, reach, kind), verify(body, reach, kind=kind))


STEPS: dict[str, Callable[[ModelWithCache, int], nn.Module]] = {
    "prefill": PrefillStep,
    "prefill, states": partial(PrefillStep, reads=FeatureSpec((0, 2))),
    "window": WindowStep,
    "window, tree": WindowStep,
    "keep": CompactPathStep,
    "reorder": ReorderSlotsStep,
    "move": MoveSlotStep,
    "move, eagle 3": lambda body, reach: MoveRowsStep(eagle_head(body, 3), reach),
    "verify": verify,
    "verify nothing": partial(verify, draft_shape=DraftShape.chain(0)),
    "verify, reject, drawn": partial(verify, rule=Reject()),
    "verify, typical": partial(verify, rule=Typical()),
    "verify, tree": partial(verify, draft_shape=tree.draft_shape(TREE)),
    "verify, dynamic tree": partial(verify, draft_shape=DYNAMIC),
    "draft": partial(draft, drawn=False),
    "draft, drawn": partial(draft, drawn=True),
    "draft, some known": some_known,
    "draft, PARD": pard,
    "draft, PARD, static tree": partial(pard, parents=(-1, -1, 0)),
    "fused": fused,
    "plain": partial(AutoregressiveStep, steps=3, width=3),
    "fused medusa": medusa,
    "fused medusa, kept": partial(medusa, carry=True),
    "eagle 3 reads": lambda body, reach: ReadStep(eagle_head(body, 3), reach),
    "fused eagle 1": partial(eagle, version=1, draft_tree=Chain(NODES)),
    "fused eagle 1, static tree": partial(eagle, version=1, draft_tree=StaticTree((-1, -1, 0))),
    "fused eagle 2": partial(eagle, version=1, draft_tree=DynamicTree(5, depth=2, width=2)),
    "fused eagle 3": partial(eagle, version=3, draft_tree=DynamicTree(5, depth=2, width=2)),
    "fused eagle 3, chain": partial(eagle, version=3, draft_tree=Chain(NODES)),
    **{f"fused {variant}": partial(block, variant=variant) for variant in ("DFlash", "DFlash 2", "DSpark")},
    "fused eagle 3, static tree": partial(eagle, version=3, draft_tree=StaticTree((-1, -1, 0))),
    "fused eagle 3.1": partial(eagle, version=3, draft_tree=Chain(NODES), changes=NEWER),
    "fused P-EAGLE": partial(eagle, version=3, draft_tree=Chain(NODES), changes=PARALLEL),
    "fused P-EAGLE, static tree": partial(eagle, version=3, draft_tree=StaticTree((-1, -1, 0)), changes=PARALLEL),
    "fused MTP": partial(mtp, layout=SPECULATORS),
    "fused MTP, MiMo": partial(mtp, layout=MIMO),
    "fused MTP, static tree": partial(mtp, layout=SPECULATORS, parents=(-1, -1, 0)),
    "fused MLP speculator": mlp_speculator,
    "fused LayerSkip": layerskip,
    "fused Gemma 4 assistant": assistant,
}

SAMPLED = tuple(name for name in STEPS if name.startswith(("verify", "draft", "fused", "plain")))
"""Those in which tokens are chosen: they take a kind of sampling."""


def inputs(name: str, seed: int, *, row: int | None = None, slots: int = SLOTS) -> tuple[Tensor, ...]:
    """Inputs of a step; another seed changes every value and no shape. ``row``: where every slot's tokens go."""
    generator = torch.Generator().manual_seed(seed)

    def ids(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    def rows(count: int) -> Tensor:
        return ids(0, 90, count) if row is None else torch.full((count,), row, dtype=torch.int32)

    if name.startswith("prefill"):
        return ids(0, VOCABULARY, 1, 16), rows(1), ids(1, 16, 1), ids(0, slots, 1)
    if name.startswith("window"):
        parents = (
            torch.cat([ids(0, max(1, node), slots, 1) for node in range(WIDTH)], 1) - (torch.arange(WIDTH) == 0).int()
        )
        return ids(0, VOCABULARY, slots, WIDTH), rows(slots), *((parents,) if name == "window, tree" else ())
    if name == "eagle 3 reads":
        features = torch.randn(1, 16, 3 * 32, generator=generator)
        return ids(0, VOCABULARY, 1, 16), rows(1), ids(1, 16, 1), ids(0, slots, 1), features
    if name == "reorder":
        return (torch.randperm(slots, generator=generator, dtype=torch.int32),)
    if name.startswith("move"):
        return ids(0, 1, 1), torch.full((1,), 1 + seed % (slots - 1), dtype=torch.int32)
    if name == "keep":
        path = torch.tensor([[1, 3], [2, -1], [-1, -1], [1, 2]], dtype=torch.int32)
        return rows(slots), path.repeat(slots, 1)[:slots]
    commit = (ids(0, VOCABULARY, slots, WIDTH), ids(1, WIDTH, slots), rows(slots))
    temperature, top_k = torch.rand(slots, generator=generator) * seed, ids(0, 40, slots).to(torch.float32)
    top_p, min_p = 1 - torch.rand(2, slots, generator=generator) * 0.3
    params = torch.stack((temperature, top_k, top_p, 0.1 - min_p * 0.1), 1)
    keys = ids(0, (1 << 16) - 1, slots, 4)
    if name.startswith("draft"):
        return *commit, params, keys
    round_ = (*commit, ids(0, NODES + 1, slots), params, keys)
    if name in FEATURES:
        return *round_, torch.randn(slots, WIDTH, FEATURES[name], generator=generator)
    nodes = {"verify, tree": len(TREE), "verify, dynamic tree": DYNAMIC.num_draft_tokens}.get(name, NODES)
    drafts, distribution = ids(-1, VOCABULARY, slots, nodes), torch.rand(slots, nodes, VOCABULARY, generator=generator)
    parents = torch.cat([ids(-1, node, slots, 1) for node in range(nodes)], 1)
    more: dict[str, tuple[Tensor, ...]] = {
        "verify nothing": (),
        "fused": (),
        "fused LayerSkip": (),
        "fused medusa, kept": (),
        "plain": (),
        "verify, reject, drawn": (drafts, distribution),
        "verify, dynamic tree": (drafts, parents),
    }
    return *round_, *more.get(name, (drafts,))
