"""MTP layers (multi-token prediction) as a head: one layer of the target's family, trained with the target.

The layer reads the target's last hidden state and the embedding of the next token, each normalised, through one
product. Its normed output gives the logits by the target's output layer, and is the state of the next draft; further
tokens take the same layer again. Row p of its cache belongs to the pair of the state at p and the token at p + 1.

Layouts: the layer within the target's own checkpoint (MiMo; GLM 4 MoE and DeepSeek V3), and folders of the speculators
library.

Letters: b batch rows, n pairs of a call, H width of the target, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import PairingError, UnknownArchitectureError
from paceline.core.types import DraftShape, FeatureSpec, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.json_fields import Fields
from paceline.decoder.kernels.protocol import CachePosition, Kernels
from paceline.decoder.models import registry
from paceline.decoder.models.blueprint import Names
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.layers import Part, Weights, frozen
from paceline.decoder.models.network import DecoderLayer
from paceline.decoder.models.rope import rope_tables
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.collectives import SingleRank
from paceline.decoder.parallel.sharding import WHOLE, Shard, TensorSpec
from paceline.decoder.parallel.vocab_parallel import SharedHead, choose, whole
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.decoder.weights.checkpoint import load_floats
from paceline.decoder.weights.hub import checkpoint_path
from paceline.draft.heads import AutoregressiveHead, HeadDrafter, at_index
from paceline.draft.options import parse_draft_tree
from paceline.draft.table_head import TableHead
from paceline.heads.checkpoint import as_dtype, check, read
from paceline.heads.layouts import HeadKeys, MustBe, check_target, read_config
from paceline.heads.options import Wanted

_COPIES = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "shared_head.head.weight")
"""Tensors in place of which the target's are used."""


@dataclass(frozen=True, slots=True)
class MtpLayout:
    """Storage of a layer, and details of its computation.

    families      ``model_type`` of the targets, whose layer it has
    prefix        of its tensors; {n} is the target's number of layers
    norms         names of the norms of the embedding, of the state and of the output
    product       the name of the product that reads the first two
    hidden_first  the product reads the state before the embedding, not after it
    masks_first   the embedding of the first pair of a text is zero
    """

    name: str
    families: tuple[str, ...]
    prefix: str
    norms: tuple[str, str, str] = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    product: str = "input_proj"
    hidden_first: bool = False
    masks_first: bool = False


MIMO = MtpLayout("mimo", ("mimo",), "model.mtp_layers.0.", hidden_first=True, masks_first=True)
NEXTN = MtpLayout(
    "nextn", ("glm4_moe", "deepseek_v3"), "model.layers.{n}.", ("enorm", "hnorm", "shared_head.norm"), "eh_proj"
)
SPECULATORS = MtpLayout("speculators", ("qwen3",), "mtp_layers.0.")
_SPECULATORS_KEYS = HeadKeys(
    "an MTP head",
    {"transformer_layer_config", "speculators_config", "speculators_version", "tie_word_embeddings"},
    {
        "speculators_model_type": MustBe(("mtp",), "it is another kind of head"),
        "model_type": MustBe(("speculator_model", "mtp"), "it is another kind of model"),
        "num_nextn_predict_layers": MustBe((1,), "only one layer is read"),
    },
)


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """One layer: ``layer`` has its sizes and options."""

    layout: MtpLayout
    layer: ModelConfig

    @classmethod
    def read(cls, folder: Path, target: ModelConfig) -> MtpConfig:
        """Read the config.json of a head, or of a target with MTP layers; UnknownArchitectureError: it has several
        layers, sliding windows, or a key that is not understood.
        """
        fields = read_config(folder)
        layouts: tuple[MtpLayout, ...] = (MIMO, NEXTN)
        if "speculators_model_type" in fields.values:
            layouts, layer = (SPECULATORS,), cls._speculators(fields)
        else:
            layer = ModelConfig.from_pretrained(folder)
            key = "num_nextn_predict_layers" if "num_nextn_predict_layers" in fields.values else "num_mtp_layers"
            if fields.integer(key) != 1:
                raise UnknownArchitectureError(
                    f"{fields.where}: {key}: expected 1, got {fields.integer(key)}, and only one layer is read; use "
                    "another drafter"
                )
        known = {name: one for one in layouts for name in one.families}
        if layer.model_type not in known:
            raise UnknownArchitectureError(
                f"{fields.where}: model_type: expected one of {', '.join(known)} for MTP layers in this layout, "
                f"got {layer.model_type!r}; use another drafter"
            )
        if any(layer.blueprint.windows):
            raise UnknownArchitectureError(
                f"{fields.where}: expected an MTP layer that sees all positions, got sliding windows; use another "
                "drafter"
            )
        if layer.model_type != target.model_type:
            raise PairingError(
                f"{fields.where}: model_type: expected the target's {target.model_type}, got {layer.model_type}; use "
                "the head that was trained for this target"
            )
        check_target("MTP layer", target, vocab_size=layer.vocab_size, hidden_size=layer.hidden_size)
        experts = layer.blueprint.experts and replace(layer.blueprint.experts, dense=())
        blueprint = replace(layer.blueprint, windows=(), experts=experts)
        return cls(known[layer.model_type], replace(layer, blueprint=blueprint))

    @classmethod
    def _speculators(cls, fields: Fields) -> ModelConfig:
        _SPECULATORS_KEYS.check(fields)
        inner = fields.child("transformer_layer_config")
        if inner is None:
            raise UnknownArchitectureError(
                f"{fields.where}: expected the key transformer_layer_config, got none; download the checkpoint again"
            )
        return ModelConfig.from_fields(inner)

    @property
    def prefix(self) -> str:
        return self.layout.prefix.format(n=self.layer.num_layers)

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor by its name without the prefix."""
        size, family = self.layer.hidden_size, registry.family(self.layer.model_type)
        return {
            **{f"{name}.weight": TensorSpec((size,)) for name in self.layout.norms},
            f"{self.layout.product}.weight": TensorSpec((size, 2 * size)),
            **family.layer_tensors(self.layer, ""),
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: spec.shape for name, spec in self.tensors().items()}


def load(folder: Path, target: ModelConfig, dtype: torch.dtype) -> tuple[MtpConfig, dict[str, Tensor]]:
    """Read a layer: its configuration, and its tensors by the names of `MtpConfig.tensors`, ready for use."""
    config = MtpConfig.read(folder, target)
    specs, prefix = config.tensors(), config.prefix
    if config.layout is not SPECULATORS:
        return config, load_floats(folder, specs, dtype, prefix=prefix, unused=_COPIES)
    found = read(folder, wanted=lambda name: name not in _COPIES)
    weights = {name.removeprefix(prefix): x for name, x in found.items()}
    check(folder, weights, config.shapes())
    return config, as_dtype(folder, weights, dtype)


def draft_shape(target: ModelConfig, wanted: Wanted, folder: Path, *, draft_tree: str = "chain") -> DraftShape:
    """Check the config.json and the tree; return the shape of the layer's drafts."""
    MtpConfig.read(folder, target)
    return parse_draft_tree(draft_tree, k=wanted.k)


class MtpHead(TableHead, AutoregressiveHead):
    """The layer with its cache. ``shared``: the target's embedding and output layer, not copied."""

    reads = FeatureSpec()
    keys: Tensor
    values: Tensor
    ids: Tensor

    def __init__(
        self,
        config: MtpConfig,
        weights: Mapping[str, Tensor],
        *,
        shared: SharedHead,
        kernels: Kernels,
        options: DecoderOptions,
    ) -> None:
        super().__init__(kernels, options)
        layer, own = config.layer, Weights(weights)
        names = registry.family(layer.model_type).names
        part = Part(
            Shard(layer, WHOLE, 0), kernels, SingleRank(), Names(names.outer, "", names.inner, names.transposed)
        )
        self.config, self.output = config, shared.head
        self.share(shared, rope_tables(layer.rope, layer.rotated, options.n_positions))
        self.token_norm, self.hidden_norm, self.norm = (part.norm(own, name) for name in config.layout.norms)
        self.fuse = frozen(own.pop(f"{config.layout.product}.weight"))
        self.layer = DecoderLayer(part, own, 0)
        assert not own, "`load` has checked the names"
        keys, values = self.allocate_cache(layer.num_kv_heads, layer.head_dim)
        for name, value in {"keys": keys, "values": values, "ids": shared.ids}.items():
            self.register_buffer(name, value)

    def caches(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.keys, self.values)]

    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        assert features is not None, "`reads` asks for them"
        return self.norm(at_index(self._pairs(tokens, features, place), last).contiguous())  # type: ignore[no-any-return]

    def next(self, token: Tensor, hidden: Tensor, place: CachePosition) -> Tensor:
        return self.norm(self._pairs(token, hidden, place))  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return whole(self.kernels.linear(hidden, self.output), self.config.layer.vocab_size, self.groups[1])

    def sample_tokens(self, hidden: Tensor, positions: Tensor, sampling: SamplingTensors) -> Tensor:
        part = VocabPart(self.ids, self.config.layer.vocab_size, self.groups[1])
        scores = self.kernels.linear(hidden, self.output, self.real_rows(sampling, hidden.shape[1]))
        return choose(scores.contiguous(), positions, sampling, part=part, kernels=self.kernels)

    def _pairs(self, tokens: Tensor, states: Tensor, place: CachePosition) -> Tensor:
        """tokens [b, n] int32, states [b, n, H] -> the layer's output [b, n, H], before its last norm."""
        positions = place.positions(tokens.shape[1])
        inputs = self.embed(tokens)
        if self.config.layout.masks_first:
            inputs = torch.where((positions > 0).unsqueeze(-1), inputs, 0.0)
        pair = [self.token_norm(inputs), self.hidden_norm(states.contiguous())]
        both = torch.cat(pair[::-1] if self.config.layout.hidden_first else pair, -1)
        fused = self.kernels.linear(both, self.fuse, place.real)
        return self.layer(fused, place, (self.keys, self.values), self.rotation(positions))  # type: ignore[no-any-return]


class MtpDrafter(HeadDrafter):
    """Drafts chains of ``k`` tokens, or static trees, with one MTP layer."""

    head: MtpHead

    def __init__(self, head: MtpHead, target: CompiledDecoder, k: int | DraftShape) -> None:
        super().__init__(head, target, k)
        self.max_positions = min(target.n_positions, head.config.layer.max_position_embeddings)

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], target: CompiledDecoder, k: int = 4, *, draft_tree: str = "chain"
    ) -> MtpDrafter:
        """Load a layer for a target.

        draft_tree  "chain" of ``k`` tokens, or "tree:PARENTS" with the parent of each node, -1 for the root
        path  the target's own folder, if it holds the layer, or a folder of the speculators library; or an id of the
              Hugging Face hub

        Raises:
            CheckpointError: the folder cannot be used.
            PairingError: it is for another target.
        """
        shape = parse_draft_tree(draft_tree, k=k)
        config, weights = load(checkpoint_path(path), target.config, target.options.dtype)
        kernels, options = target.backend.kernels, target.options
        return cls(MtpHead(config, weights, shared=target.body.shared, kernels=kernels, options=options), target, shape)

    def cache_key(self) -> dict[str, object]:
        config, options = self.head.config, self.head.options
        return {"mtp": config.layout.name, "layer": config.layer.to_dict(), "dtype": str(options.dtype)}
