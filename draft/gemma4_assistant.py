"""Gemma 4's assistant: a few layers without keys and values, which attend to the target's.

They read the embedding of the last token and the state that predicted it, through one product, and give the next token
and the next state. Queries of a round all have the position of the last committed token, whose keys are not written
yet: they see the rows before it. The key and value of the last of those rows are written once more, where they lie.
Files: google/gemma-4-*-assistant.

Letters: B slots, n tokens of a call, G heads of keys, D width of a head, H width of the target, A of the assistant, V
vocabulary, C clusters of it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, PairingError, UnknownArchitectureError
from paceline.core.types import DraftKey, DraftShape, FeatureSpec, SamplingTensors
from paceline.decoder.decoder import CompiledDecoder, ModelWithCache, first_rows
from paceline.decoder.json_fields import Fields
from paceline.decoder.kernels.cache_rows import NARROW_CACHES, store, unpack
from paceline.decoder.kernels.protocol import CachePosition
from paceline.decoder.models import registry
from paceline.decoder.models.config import NEUTRAL, STANDARD, ModelConfig
from paceline.decoder.models.layers import frozen, scaled
from paceline.decoder.parallel.collectives import SingleRank
from paceline.decoder.parallel.sharding import Shard, TensorSpec
from paceline.decoder.parallel.vocab_part import topk
from paceline.decoder.weights.checkpoint import load_floats
from paceline.decoder.weights.hub import checkpoint_path
from paceline.draft.heads import AutoregressiveHead, HeadDrafter, at_index
from paceline.draft.options import parse_draft_tree
from paceline.heads.checkpoint import read
from paceline.heads.layouts import HeadKeys, MustBe, check_target, read_config
from paceline.heads.options import Wanted

_OF = "Gemma 4's assistant"
_FAMILY = "gemma4_text"
_ORDER = "masked_embedding.token_ordering"
_CENTROIDS = "masked_embedding.centroids"
_KEYS = HeadKeys(
    _OF,
    {
        *("model_type", "text_config", "backbone_hidden_size", "use_ordered_embeddings", "num_centroids"),
        *("centroid_intermediate_top_k", "bos_token_id", "eos_token_id", "pad_token_id"),
        *(f"{side}_token_id" for side in ("image", "video", "audio", "boi", "eoi", "boa", "eoa")),
    },
    {"tie_word_embeddings": MustBe((True,), "its output layer is its embedding")},
)
_LAYER_KEYS = STANDARD | NEUTRAL.keys() | registry.family(_FAMILY).keys


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """Sizes of an assistant.

    layer    of its layers
    sources  for each layer: the target's layer whose keys and values it reads
    size     H
    clusters, chosen   C, and how many of them a token is chosen from; 0: from the whole vocabulary
    """

    layer: ModelConfig
    sources: tuple[int, ...]
    size: int
    clusters: int = 0
    chosen: int = 0

    @classmethod
    def read(cls, folder: Path, target: ModelConfig) -> AssistantConfig:
        fields = read_config(folder)
        _KEYS.check(fields)
        inner = fields.child("text_config")
        if inner is None:
            raise CheckpointError(f"{fields.where}: the key text_config is missing; download the file again")
        layer, ordered = layers_of(inner), fields.flag("use_ordered_embeddings", False)
        size = fields.integer("backbone_hidden_size")
        check_target("assistant", target, vocab_size=layer.vocab_size, hidden_size=size)
        clusters = fields.integer("num_centroids", 2048) if ordered else 0
        chosen = fields.integer("centroid_intermediate_top_k", 32) if ordered else 0
        if ordered and (layer.vocab_size % clusters or chosen > clusters):
            raise CheckpointError(
                f"{fields.where}: num_centroids: expected a divisor of vocab_size = {layer.vocab_size}, and at least "
                f"centroid_intermediate_top_k = {chosen}, got {clusters}; correct the file"
            )
        return cls(layer, _sources(layer, target), size, clusters, chosen)

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor by its name, the order of the clusters' tokens not counted."""
        width = self.layer.hidden_size
        specs = registry.family(_FAMILY).tensors(self.layer)
        specs["pre_projection.weight"] = TensorSpec((width, 2 * self.size))
        specs["post_projection.weight"] = TensorSpec((self.size, width))
        if self.clusters:
            specs[f"{_CENTROIDS}.weight"] = TensorSpec((self.clusters, width))
        return specs


def layers_of(inner: Fields) -> ModelConfig:
    """Return the configuration of layers that have no keys and values; a window counts the rows before the token."""
    HeadKeys(_OF, _LAYER_KEYS).check(inner)
    count = inner.integer("num_hidden_layers")
    shared = inner.integer("num_kv_shared_layers", 0, minimum=0)
    own = {key: value for key, value in inner.values.items() if key != "num_kv_shared_layers"}
    made = ModelConfig.from_fields(Fields({"model_type": _FAMILY, **own}, inner.where))
    plan, gemma = made.blueprint, made.blueprint.gemma
    if gemma is None or gemma.inputs or plan.experts or shared not in (0, count) or len(set(gemma.widths)) > 1:
        raise UnknownArchitectureError(
            f"{inner.where}: expected {_FAMILY} with layers that all share keys and values, without inputs of their "
            "own and experts, got other values, which are not supported; use another drafter"
        )
    windows = tuple(window + 1 if window else 0 for window in plan.windows)
    plan = replace(plan, windows=windows, logit_cap=0.0, gemma=replace(gemma, sources=(-1,) * count))
    return replace(made, blueprint=plan, tie_word_embeddings=True)


def _sources(layer: ModelConfig, target: ModelConfig) -> tuple[int, ...]:
    """Return the target's last layer of each layer's kind that has keys and values; PairingError: there is none."""
    sources = []
    windows = target.blueprint.windows if target.blueprint.gemma else ()
    last = {bool(windows[index]): index for index in (target.cached_layers if windows else ())}
    for index, window in enumerate(layer.blueprint.windows):
        source, own = last.get(bool(window)), layer.of_layer(index)
        has = None if source is None else target.of_layer(source)
        if source is None or has is None or (has.head_dim, has.num_kv_heads) != (own.head_dim, own.num_kv_heads):
            raise PairingError(
                f"draft: expected a Gemma 4 with {own.num_kv_heads} K/V heads of {own.head_dim} in its layers "
                f"{'with' if window else 'without'} a window for this assistant, got a {target.model_type} with "
                f"others; use the assistant that was trained for this target"
            )
        sources.append(source)
    return tuple(sources)


def load(folder: Path, target: ModelConfig, dtype: torch.dtype) -> tuple[AssistantConfig, dict[str, Tensor]]:
    """Read an assistant: its configuration, and its tensors by name, as they are computed with; with clusters, also
    ``order`` [C, V / C], their tokens.
    """
    config = AssistantConfig.read(folder, target)
    weights = load_floats(folder, config.tensors(), dtype, prefix="", unused=("lm_head.weight", _ORDER))
    if config.clusters:
        order = read(folder, wanted=lambda name: name == _ORDER).get(_ORDER)
        size = config.layer.vocab_size
        if order is None or order.is_floating_point() or order.flatten().sort().values.tolist() != list(range(size)):
            raise CheckpointError(
                f"{folder}: {_ORDER}: expected every id below {size} once, got other numbers or none; download the "
                "checkpoint again"
            )
        weights["order"] = order.view(config.clusters, -1).to(torch.int32)
    return config, weights


def draft_shape(target: ModelConfig, wanted: Wanted, folder: Path, *, draft_tree: str = "chain") -> DraftShape:
    """Check the config.json and the tree; return the shape of its drafts. Errors as in `AssistantConfig.read` and
    `parse_draft_tree`.
    """
    AssistantConfig.read(folder, target)
    return parse_draft_tree(draft_tree, k=wanted.k)


class AssistantHead(AutoregressiveHead):
    """The layers, over the cache of ``body``, the target. Takes ``weights``."""

    reads = FeatureSpec()
    sees_drafts = False
    order: Tensor
    cluster: Tensor

    def __init__(self, config: AssistantConfig, weights: Mapping[str, Tensor], body: ModelWithCache) -> None:
        super().__init__(body.kernels, body.options)
        own = dict(weights)
        self.config, self.body = config, body
        self.enter, self.leave = (frozen(own.pop(f"{side}_projection.weight")) for side in ("pre", "post"))
        self.centroids = frozen(own.pop(f"{_CENTROIDS}.weight")) if config.clusters else None
        order = own.pop("order", torch.empty(0, 0, dtype=torch.int32))
        self.register_buffer("order", order)
        self.register_buffer("cluster", (order.flatten().argsort() // max(1, order.shape[1])).to(torch.int32))
        build = registry.family(_FAMILY).build
        positions = self.options.n_positions
        self.network = build(Shard(config.layer), own, self.kernels, positions=positions, group=SingleRank())  # type: ignore[arg-type]
        assert not own, "`load` has checked the names"

    def real_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        return self.body.real_rows(sampling, window)

    def read(self, tokens: Tensor, features: Tensor | None, place: CachePosition, *, last: Tensor) -> Tensor:
        assert features is not None, "`reads` asks for them"
        at = replace(place, row=(place.row + last).clamp(min=0, max=self.options.n_positions - 1))
        return self.next(at_index(tokens, last), at_index(features, last), replace(at, count=at.count.clamp(max=1)))

    def next_place(self, row: Tensor, ahead: int, bucket: int, *, sampling: SamplingTensors) -> CachePosition:
        return self.place(row, 1, bucket, sampling=sampling)

    def next(self, token: Tensor, hidden: Tensor, place: CachePosition) -> Tensor:
        """Compute `AutoregressiveHead.next` at the last row with a key; hidden [B, 1, H + A], its first H are read."""
        kernels, body, real = self.kernels, self.body, place.real
        caches = dict(zip(body.config.cached_layers, body.caches, strict=True))
        rows = {source: self._rows(caches[source], place) for source in set(self.config.sources)}
        x = scaled(kernels.embed(body.shared.embedding, token), body.config.blueprint.embedding_scale)
        x = kernels.linear(torch.cat((x, hidden[..., : self.config.size].contiguous()), -1), self.enter, real)
        rotations = self.network.rotations((place.row + 1).clamp(max=self.options.n_positions - 1).unsqueeze(1))
        for layer, source, rotation in zip(self.network.layers, self.config.sources, rotations, strict=True):
            kept = tuple(unpack(side).transpose(1, 2) for side in rows[source])
            x, _ = layer(x, place, caches[source], rotation, None, kept)
        for source, sides in rows.items():  # rows of 8 bits are not the same if their numbers are rounded again
            for cache, side in zip(caches[source], sides, strict=True):
                if cache.dtype in NARROW_CACHES:
                    store(_movable(cache), _movable(side), slots=place.slots, rows=place.row.unsqueeze(1))
        x = self.network.norm(x)
        return torch.cat((kernels.linear(x, self.leave, real), x), -1)

    def _rows(self, cache: tuple[Tensor, Tensor], place: CachePosition) -> tuple[Tensor, ...]:
        """Rows of a cache as they are stored, [B, G, 1, D] of keys and of values."""
        index = place.row.to(torch.int64).view(-1, 1, 1, 1)
        sides = (_movable(first_rows(side, len(place.row))) for side in cache)
        rows = (side.gather(2, index.expand(-1, side.shape[1], 1, side.shape[3])) for side in sides)
        return tuple(row.view(cache[0].dtype) if cache[0].dtype in NARROW_CACHES else row for row in rows)

    def logits(self, hidden: Tensor) -> Tensor:
        x, (_, members) = hidden[..., self.config.size :].contiguous(), self.order.shape
        if self.centroids is None:
            return self.network.logits(x)
        _, best = topk(self.kernels.linear(x, self.centroids), self.config.chosen)  # [B, n, chosen]
        if self.kernels.sampling_kinds:  # graphs of accelerators have no scatter
            every = torch.arange(self.config.clusters, dtype=torch.int32, device=x.device)
            among = (best.unsqueeze(-1) == every).to(torch.float32).sum(-2).index_select(-1, self.cluster) > 0
            scores = self.network.logits(x)
            least = torch.where(among, scores, scores.amax(-1, keepdim=True)).amin(-1, keepdim=True) - 1.0
            return torch.where(among, scores, least)
        tokens = self.order.index_select(0, best.flatten()).view(*best.shape[:2], -1)
        rows = self.kernels.embed(self.network.embedding, tokens.flatten(1)).view(*tokens.shape, -1)
        some = (rows * x.unsqueeze(-2)).sum(-1)
        least = some.amin(-1, keepdim=True) - 1.0
        every = least.expand(-1, -1, self.config.clusters * members)
        return every.scatter(-1, tokens.to(torch.int64), some)


def _movable(rows: Tensor) -> Tensor:
    """View rows of a cache as a type whose numbers PyTorch can move."""
    return rows.view(torch.uint8) if rows.dtype in NARROW_CACHES else rows


class AssistantDrafter(HeadDrafter):
    """Drafts chains of ``k`` tokens, or static trees, with Gemma 4's assistant."""

    head: AssistantHead

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], target: CompiledDecoder, k: int = 4, *, draft_tree: str = "chain"
    ) -> AssistantDrafter:
        """Load an assistant for a target, which is not sharded.

        path        folder in the layout of transformers, or an id of the Hugging Face hub
        draft_tree  "chain" of ``k`` tokens, or "tree:PARENTS" with the parent of each node, -1 for the root

        Raises:
            CheckpointError: the folder cannot be used.
            PairingError: it is for another target.
        """
        shape = parse_draft_tree(draft_tree, k=k)
        config, weights = load(checkpoint_path(path), target.config, target.options.dtype)
        if target.backend.group.degree > 1:
            raise PairingError(
                f"tp_degree: expected 1 for {_OF}, which reads the target's whole cache, got "
                f"{target.backend.group.degree}; use another drafter"
            )
        return cls(AssistantHead(config, weights, target.body), target, shape)

    def bucket(self, rows: int) -> int:
        return self.decoder.bucket_for(rows)

    def step_key(self, bucket: int) -> DraftKey:
        return DraftKey("gemma4 assistant", self.draft_shape, bucket)

    def cache_key(self) -> dict[str, object]:
        config = self.head.config
        sizes = {
            "layer": config.layer.to_dict(),
            "sources": config.sources,
            "clusters": [config.clusters, config.chosen],
        }
        return {"gemma4 assistant": sizes, "dtype": str(self.head.options.dtype)}
