"""Whole rounds of one slot over a vocabulary of 128,256 ids, tiny otherwise, to count over; no tests.

All sizes but the vocabulary's are so small that nothing of a layer is as large as a rank's part of a row of logits.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.core import tree
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.acceptance.match import Match
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
from paceline.eagle.tree import DraftTree
from paceline.medusa.config import MedusaConfig
from paceline.medusa.drafter import MedusaHead, MedusaStep
from paceline.medusa.network import Heads
from paceline.medusa.tree import Choices
from paceline.neuron.kernels import TraceableKernels
from paceline.target.steps import FusedStep, VerifyStep

VOCABULARY, HEADS, HIDDEN, POSITIONS = 128_256, 8, 16, 32
LAYERS = (0, 0, 1)


def body(degree: int = 1) -> ModelWithCache:
    """Rank 0 of a model of one layer, all zeros."""
    shape = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": 2,
        "max_position_embeddings": POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
    }
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
