"""The graphs of a speculative pair on an accelerator, from configurations only: weights are shapes without numbers.

`paceline cost` counts them and `paceline export-hlo` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.core.acceptance.match import Match
from paceline.core.errors import UnknownArchitectureError
from paceline.core.types import DraftShape, FeatureSpec, SamplingKind
from paceline.decoder.decoder import FeatureBuffer, ModelWithCache
from paceline.decoder.json_fields import Fields, read_json_object
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.layers import Weights
from paceline.decoder.options import DecoderOptions, LoadOptions
from paceline.decoder.parallel import sharding
from paceline.decoder.parallel.collectives import DeviceGroup
from paceline.decoder.parallel.sharding import Shard, TensorSpec
from paceline.decoder.steps import PrefillStep
from paceline.draft.dflash.config import is_dflash_config
from paceline.draft.heads import ChainStep
from paceline.draft.model import ModelHead
from paceline.draft.vocab_map import VocabMap
from paceline.eagle import division, formats
from paceline.eagle.config import EagleConfig, is_eagle_config
from paceline.eagle.head import EagleHead
from paceline.neuron.kernels import TraceableKernels
from paceline.target.steps import FusedStep, VerifyStep

Padding = dict[str, tuple[int, int]]
CHUNK = 128
"""Tokens of a prompt's chunk."""


class RoundDraft(Protocol):
    """Source of a round's drafts.

    layers    number of equal layers to count one by one; 1 for a head
    features  hidden states that it reads; None = tokens only
    """

    @property
    def layers(self) -> int: ...

    @property
    def features(self) -> FeatureSpec | None: ...

    def step(self, target: ModelWithCache, setup: RoundSetup, layers: int) -> nn.Module:
        """Return the step that drafts ``setup.k`` tokens, with ``layers`` layers."""

    def memory(self, setup: RoundSetup) -> int:
        """Return the bytes of weights and caches on one core, in 16 bits."""

    def padding(self, degree: int) -> Padding:
        """Return the padding, as `paceline.decoder.parallel.sharding.padding`."""


@dataclass(frozen=True, slots=True)
class ModelDraft:
    """A draft model, sharded over the target's cores."""

    config: ModelConfig

    @property
    def layers(self) -> int:
        return self.config.num_layers

    @property
    def features(self) -> FeatureSpec | None:
        return None

    def step(self, target: ModelWithCache, setup: RoundSetup, layers: int) -> nn.Module:
        body = body_of(self.config, layers, setup)
        vocabulary = VocabMap(self.config.vocab_size, target.config.vocab_size)
        return ChainStep(ModelHead(body, vocabulary, body.options), setup.k, setup.rows, kind=setup.kind)

    def memory(self, setup: RoundSetup) -> int:
        return model_memory(self.config, setup)

    def padding(self, degree: int) -> Padding:
        return sharding.padding(self.config, degree)


@dataclass(frozen=True, slots=True)
class EagleDraft:
    """An EAGLE head that drafts chains.

    divided  whether it is sharded over the target's cores, or replicated except for shared weights; None: as in a
             generator
    """

    config: EagleConfig
    divided: bool | None = None

    @property
    def layers(self) -> int:
        return 1

    @property
    def features(self) -> FeatureSpec | None:
        # Streams of any layers cost the same, and a target of one layer has only the first ones.
        return FeatureSpec(tuple(min(1, place) for place in range(len(self.config.layers))))

    def step(self, target: ModelWithCache, setup: RoundSetup, layers: int) -> nn.Module:
        weights = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in self.config.shapes().items()}
        if self.config.version == 3:
            weights["ids"] = torch.arange(self.config.draft_vocab_size)
        divided = self._shard(setup.degree).degree > 1
        head = EagleHead(
            self.config,
            division.part_of(weights, self.config, self._shard(setup.degree)) if divided else weights,
            shared=target.shared,
            kernels=target.kernels,
            options=target.options,
            group=target.group if divided else None,
        )
        return ChainStep(head, setup.k, setup.rows, kind=setup.kind)

    def memory(self, setup: RoundSetup) -> int:
        return _memory(self._shard(setup.degree), division.tensors(self.config), setup)

    def padding(self, degree: int) -> Padding:
        shard = self._shard(degree)
        return sharding.padding(shard.config, shard.degree)

    def _shard(self, degree: int) -> Shard:
        divided = division.is_divided(self.config, degree, self.divided)
        return division.shard_of(self.config, degree if divided else 1)


@dataclass(frozen=True, slots=True)
class RoundSetup:
    """A fused pair: ``k`` drafted tokens per round over ``slots`` sequences of up to ``rows`` tokens, on ``degree``
    cores.

    ``batch``: the first slots, which the graph computes (a batch bucket); 0: all of them. ``quantization``: of the
    target's matmul weights; None: 16 bits. With ``k`` 0 (plain decoding) the draft is ignored.
    """

    target: ModelConfig
    draft: RoundDraft
    degree: int
    k: int
    kind: SamplingKind = "greedy"
    slots: int = 1
    rows: int = 2048
    batch: int = 0
    quantization: str | None = None

    def saved(self, layers: int) -> int:
        """Return the bytes of ``layers`` layers of the target that 8-bit weights save on a core."""
        if self.quantization is None:
            return 0
        shard = Shard(replace(self.target, num_layers=layers), sharding.layout(self.target, self.degree))
        specs = registry.family(self.target.model_type).tensors(shard.config).values()
        return sum(shard.numbers_of(spec) for spec in specs if spec.is_product)


def read_config(path: Path) -> ModelConfig:
    """Read the configuration of a ``config.json``, or of a folder with only that file."""
    return ModelConfig.from_file(_file(path))


def read_draft(path: Path, target: ModelConfig) -> RoundDraft:
    """Read a draft model, or an EAGLE head, from its ``config.json``. Weights are not needed: a head without a
    vocabulary is taken as version 1, any head as one layer with a separate output layer.

    Raises:
        CheckpointError: it is not a configuration of either.
        PairingError: the head is for another target.
    """
    fields = Fields(read_json_object(_file(path)), str(_file(path)))
    if is_dflash_config(fields.values) or "pard_token" in fields.values:
        raise UnknownArchitectureError(
            f"{fields.where}: expected a draft model or an EAGLE head, whose rounds can be planned, got a head or "
            "model that drafts in one pass; plan with another draft"
        )
    if not is_eagle_config(fields.values):
        return ModelDraft(read_config(path))
    if "paceline_eagle" in fields.values:
        layout, version = formats.layout_of(fields, ())
    else:
        nested = "transformer_layer_config" in fields.values
        layout, version = ("speculators" if nested else "eagle"), (3 if "draft_vocab_size" in fields.values else 1)
    config = formats.parse(fields, layout, version, target=target, names=(formats.HEAD,))
    config.check_target(target)
    return EagleDraft(config)


def _file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def fused_round(setup: RoundSetup, target_layers: int, draft_layers: int) -> tuple[FusedStep, tuple[Tensor, ...]]:
    """Return a whole round of models with these numbers of layers, and its inputs; call it in a fake tensor mode."""
    target = body_of(setup.target, target_layers, setup)
    drafts = setup.draft.step(target, setup, draft_layers)
    reads = setup.draft.features
    shape = DraftShape.chain(setup.k)
    verify = VerifyStep(target, setup.rows, draft_shape=shape, rule=Match(), kind=setup.kind, reads=reads)
    carry = None if reads is None else FeatureBuffer(round_features(setup, reads).shape)
    return FusedStep(drafts, verify, carry), round_inputs(setup)


def prefill_step(setup: RoundSetup, layers: int) -> tuple[PrefillStep, tuple[Tensor, ...]]:
    """Return the step of a prompt's chunk with ``layers`` layers, and its inputs; as `fused_round`."""
    one = torch.ones(1, dtype=torch.int32)
    body = body_of(setup.target, layers, setup)
    step = PrefillStep(body, setup.rows, setup.draft.features if setup.k else None)
    return step, (torch.ones(1, min(CHUNK, setup.rows), dtype=torch.int32), one, one, one)


def round_features(setup: RoundSetup, reads: FeatureSpec) -> Tensor:
    """Return the target's hidden states that a commit carries for a draft."""
    width = setup.target.hidden_size * max(1, len(reads.layers))
    return torch.zeros(setup.batch or setup.slots, setup.k + 1, width)


def round_inputs(setup: RoundSetup) -> tuple[Tensor, ...]:
    """Return tokens, count, first row and limit of a commit, sampling parameters and seeds."""
    batch = setup.batch or setup.slots
    one = torch.ones(batch, dtype=torch.int32)
    tokens = torch.ones(batch, setup.k + 1, dtype=torch.int32)
    return (tokens, one, one, one, torch.zeros(batch, 4), torch.zeros(batch, 4, dtype=torch.int32))


def body_of(config: ModelConfig, layers: int, setup: RoundSetup) -> ModelWithCache:
    """Return rank 0's shard of a model with ``layers`` layers, in 16 bits."""
    config = replace(config, num_layers=layers)
    layout = sharding.layout(config, setup.degree)
    options = DecoderOptions(LoadOptions(batch_size=setup.slots), (setup.rows,), (min(CHUNK, setup.rows),), layout)
    shard = Shard(config, layout)
    weights: Weights = {}
    for name, spec in registry.family(config.model_type).tensors(config).items():
        size, cut = list(spec.shape), shard.slice_of(spec)
        if cut is not None:
            size[cut.dim] = cut.size
        weights[name] = torch.zeros(size, dtype=torch.bfloat16)
    group = DeviceGroup(setup.degree) if setup.degree > 1 else None
    body: nn.Module = ModelWithCache(config, options, weights, kernels=TraceableKernels(), group=group).eval()
    assert isinstance(body, ModelWithCache)
    return body


def model_memory(config: ModelConfig, setup: RoundSetup) -> int:
    """Return the bytes of a model's weights and caches on one core, in 16 bits."""
    shard = Shard(config, sharding.layout(config, setup.degree))
    return _memory(shard, registry.family(config.model_type).tensors(config), setup)


def _memory(shard: Shard, tensors: Mapping[str, TensorSpec], setup: RoundSetup) -> int:
    numbers = sum(map(shard.numbers_of, tensors.values()))
    return 2 * (numbers + shard.cache_numbers(setup.slots * setup.rows))
