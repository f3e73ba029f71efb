"""The network of a family: embedding, layers, norm and head, as described by its `Blueprint`.

It holds weights (of one rank, if the model is sharded) and reads the caches that it receives; it stores no length and
does not depend on backends or rounds. Activations are float32, whatever the type of the weights: they are rounded only
inside a matmul (`Kernels.linear`), so no fusion can change them. Each block ends with a sum over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.types import FeatureSpec
from paceline.decoder.kernels.protocol import (
    AttentionRule,
    AttentionWeights,
    CachePosition,
    ExpertWeights,
    Kernels,
    MixtureKernels,
    MlpWeights,
)
from paceline.decoder.models.blueprint import Blueprint, Names
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.family import shared
from paceline.decoder.models.layers import Rotation, Weights, biased, frozen, joined_vectors, scaled
from paceline.decoder.models.rope import rope_tables, rotation_at
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.parallel.vocab_parallel import embedded
from paceline.decoder.weights.quantize import QuantizedTensor, Stored, joined, joined_rows, matrix


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a model, the kernels it computes with, and what its tensors are called."""

    shard: Shard
    kernels: Kernels
    group: Collectives
    names: Names

    @property
    def config(self) -> ModelConfig:
        return self.shard.config

    @property
    def plan(self) -> Blueprint:
        return self.shard.config.blueprint

    def matrix(self, weights: Weights, name: str) -> Stored:
        """A product's matrix as [out, in], which a quantised one is already. Takes it out of ``weights``."""
        weight = weights.pop(f"{name}.weight")
        return weight.t().contiguous() if self.names.transposed and isinstance(weight, Tensor) else weight

    def norm(self, weights: Weights, name: str) -> Normalise:
        """A norm over the width of the model."""
        return Normalise(self, weights.pop(f"{name}.weight"), bias=weights.pop(f"{name}.bias", None))


class DecoderModel(nn.Module):
    """The network of one rank.

    positions  maximum length of a sequence; rows of a window past it read the last rotation, and are not used
    """

    def __init__(self, part: Part, weights: Weights, positions: int) -> None:
        super().__init__()
        config, plan, outer = part.config, part.plan, part.names.outer
        self._kernels, self._group, self.plan = part.kernels, part.group, plan
        self.embedding = matrix(weights.pop(f"{outer['embedding']}.weight"))
        self.layers = nn.ModuleList(self.layer(part, weights, index) for index in range(config.num_layers))
        self.norm = part.norm(weights, outer["norm"])
        head = weights.pop(f"{outer['head']}.weight", None)
        self.head = self.embedding if head is None else matrix(head)
        self.first = part.norm(weights, outer["embedding norm"]) if plan.embedding_norm else None
        self.learned = frozen(weights.pop(f"{outer['positions']}.weight")) if plan.learned else None
        self.head_bias = frozen(weights.pop(f"{outer['head']}.bias")) if plan.head_bias else None
        for name, rope in (("", config.rope), ("local_", config.local_rope)):
            if rope is not None and plan.turned:
                for side, table in zip(("cos", "sin"), rope_tables(rope, config.rotated, positions), strict=True):
                    self.register_buffer(f"{name}{side}", table)
        self.register_buffer(
            "ids", torch.tensor(part.shard.ids, dtype=torch.int32)
        )  # of this rank's rows of both tables
        self._last = positions - 1

    ids: Tensor

    def layer(self, part: Part, weights: Weights, index: int) -> nn.Module:
        """Call one layer with hidden states [b, T, H], a `CachePosition`, its cache [slots, G, R, D] twice, which it
        changes in place, and the rotation of the positions, or None. -> hidden states
        """
        return DecoderLayer(part, weights, index)

    def forward(
        self,
        tokens: Tensor,
        place: CachePosition,
        caches: list[tuple[Tensor, Tensor]],
        *,
        reads: FeatureSpec | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """tokens [b, T] int32 -> hidden [b, T, H], before the head, and the requested features [b, T, F].

        Changes ``caches`` in place. With the caches of the first layers alone, the others are left out.
        """
        at = place.positions(tokens.shape[1]).clamp(max=self._last)
        hidden = self._entered(embedded(tokens, self.embedding, self.ids, group=self._group, kernels=self._kernels), at)
        streams = [hidden]
        for layer, cache, rotation in zip(self.layers, caches, self._rotations(at), strict=False):
            hidden = layer(hidden, place, cache, rotation)
            streams.append(hidden)
        hidden = self.norm(hidden)
        if reads is None:
            return hidden, None
        return hidden, torch.cat([streams[i] for i in reads.layers], -1) if reads.layers else hidden

    def _entered(self, hidden: Tensor, at: Tensor) -> Tensor:
        """Embeddings [b, T, H] of positions [b, T] int32 -> what the first layer reads."""
        hidden = scaled(hidden, self.plan.embedding_scale)
        if self.learned is not None:
            hidden = hidden + self._kernels.embed(self.learned, at + self.plan.learned_from)
        return hidden if self.first is None else self.first(hidden)

    def _rotations(self, at: Tensor) -> list[Rotation | None]:
        """Return the rotations of positions [b, T] int32, for each layer."""
        plan, count = self.plan, len(self.layers)
        if not plan.turned:
            return [None] * count
        turned = partial(rotation_at, at, kernels=self._kernels)
        default = local = turned(self.get_buffer("cos"), self.get_buffer("sin"))
        if plan.local_rope:
            local = turned(self.get_buffer("local_cos"), self.get_buffer("local_sin"))
        sides = [local if window else default for window in plan.windows or [0] * count]
        return [None if plan.unturned and plan.unturned[index] else side for index, side in enumerate(sides)]

    def logits(self, hidden: Tensor, count: Tensor | None = None) -> Tensor:
        """hidden [b, T, H] -> [b, T, n] float32, of this rank's ids; for the first ``count`` [b] rows of every batch
        row, as in `Kernels.linear`.
        """
        logits = scaled(biased(self._kernels.linear(hidden, self.head, count), self.head_bias), self.plan.logit_scale)
        cap = self.plan.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits


class DecoderLayer(nn.Module):
    """Attention and MLP with their norms, each added to the residual stream.

    Kernels that compute a whole block, with its norm and its addition, are used for blocks equal to Llama's.
    """

    def __init__(self, part: Part, weights: Weights, index: int) -> None:
        super().__init__()
        prefix, plan = part.names.layer.format(i=index), part.plan
        inner = {name: prefix + rest for name, rest in part.names.inner.items()}
        after = plan.norms != "before"
        self._plan = plan
        self.norm = None if plan.norms == "after" else part.norm(weights, inner["norm"])
        self.attention = Attention(part, weights, inner, index=index)
        self.post_norm = part.norm(weights, inner["post norm"]) if after else None
        self.mlp_norm = None if plan.norms == "after" or plan.shared_norm else part.norm(weights, inner["mlp norm"])
        self.mlp = Mlp(part, weights, inner) if plan.experts is None else MixtureOfExperts(part, weights, inner)
        self.post_mlp_norm = part.norm(weights, inner["post mlp norm"]) if after else None
        plain = plan.norm == "rms" and plan.norms == "before" and not plan.parallel and plan.residual_scale == 1.0
        self._fused = part.kernels.layers if plain else None

    def forward(
        self, hidden: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: Rotation | None
    ) -> Tensor:
        """Run one layer."""
        plan, fused = self._plan, self._fused
        if fused is not None and rotation is not None and self.attention.plain:
            assert self.norm is not None
            between = fused.attention(
                hidden, self.attention.with_norm(self.norm), place, cache=cache, rotation=rotation
            )
            return self._added(between, None, place)
        x = hidden if self.norm is None else self.norm(hidden)
        attention = self.attention(x, place, cache, rotation)
        if self.post_norm is not None:
            attention = self.post_norm(attention)
        attention = scaled(attention, plan.residual_scale)
        if plan.parallel:
            return self._added(hidden, x, place) + attention
        return self._added(hidden + attention, None, place)

    def _added(self, hidden: Tensor, x: Tensor | None, place: CachePosition) -> Tensor:
        """hidden [b, T, H] with the MLP's part, which reads ``x`` where it shares attention's norm."""
        mlp, norm = self.mlp, self.mlp_norm
        if self._fused is not None and isinstance(mlp, Mlp) and mlp.plain:
            assert norm is not None
            return self._fused.mlp(hidden, mlp.with_norm(norm), place.real)
        if norm is not None or x is None:
            x = hidden if norm is None else norm(hidden)
        added = mlp(x, place.real)
        if self.post_mlp_norm is not None:
            added = self.post_mlp_norm(added)
        total: Tensor = hidden + scaled(added, self._plan.residual_scale)
        return total


class Normalise(nn.Module):
    """A norm over the last dimension, in float32."""

    def __init__(self, part: Part, weight: Stored, *, bias: Stored | None = None) -> None:
        super().__init__()
        self._kernels, self.kind, self.eps = part.kernels, part.plan.norm, part.config.rms_norm_eps
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.norm(x, self.weight, eps=self.eps, bias=self.bias, kind=self.kind)


class Attention(nn.Module):
    """Query, key and value products, rotation, attention over the cache, output product."""

    def __init__(self, part: Part, weights: Weights, inner: Mapping[str, str], *, index: int) -> None:
        super().__init__()
        config, plan, shard = part.config, part.plan, part.shard
        self._shard, self._kernels, self._group = shard, part.kernels, part.group
        self.qkv = matrix(_gathered(part, weights, inner, kind="weight"))
        self.qkv_bias = frozen(_gathered(part, weights, inner, kind="bias")) if plan.qkv_bias else None
        self.out = matrix(part.matrix(weights, inner["out"]))
        self.out_bias = frozen(weights.pop(f"{inner['out']}.bias")) if plan.out_bias else None
        self.q_norm, self.k_norm = (
            HeadNorm(part, weights.pop(f"{inner[side]}.weight"), heads) if plan.head_norms else None
            for side, heads in (("q norm", _queries), ("k norm", _keys))
        )
        self.scale = plan.query_scale * config.head_dim**0.5 if plan.query_scale else 1.0
        self.window, self._cap = plan.windows[index] if plan.windows else 0, plan.score_cap
        self.plain = (
            not (plan.head_norms or plan.alibi or self.window or self._cap)
            and self.scale == 1.0
            and config.rotated == config.head_dim
        )
        if shard.gathers:
            self.register_buffer("key_heads", torch.tensor(shard.key_heads, dtype=torch.int32))
        self._sloped = plan.alibi
        if plan.alibi:
            slopes = torch.tensor([*alibi_slopes(config.num_heads), *[0.0] * shard.heads], dtype=torch.float32)
            self.register_buffer("slopes", slopes.narrow(0, shard.queries.start, shard.heads).clone())

    def with_norm(self, norm: Normalise) -> AttentionWeights:
        """For kernels that know attention as a whole, which is only what is ``plain``."""
        return AttentionWeights(norm.weight, self.qkv, self.qkv_bias, self.out, self.out_bias, norm.eps)

    def forward(
        self, x: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: Rotation | None
    ) -> Tensor:
        """x [b, T, H] -> [b, T, H]; keys and values go to their rows of the cache [slots, G, R, D]."""
        mixed = biased(self._kernels.linear(x, self.qkv, place.real), self.qkv_bias)
        width, share = self._shard.config.head_dim, self._shard.key_part
        q, keys, values = mixed.split((self._shard.heads * width, share, share), dim=-1)
        q = q.view(*q.shape[:-1], -1, width)
        k, v = self._key_heads(keys, values)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation is not None:
            q, k = self._kernels.rotate(q, rotation), self._kernels.rotate(k, rotation)
        rule = AttentionRule(self.window, self._cap, self.get_buffer("slopes") if self._sloped else None)
        mixed = self._kernels.attend((scaled(q, self.scale), k, v), cache, place, rule=rule)
        return biased(self._group.reduce(self._kernels.linear(mixed, self.out, place.real)), self.out_bias)

    def _key_heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Map keys and values of this rank's rows of both matrices, [b, T, n], to the heads of its cache, [b, T, G, D]
        each.
        """
        shape = (*keys.shape[:-1], -1, self._shard.config.head_dim)
        if not self._shard.gathers:
            return keys.view(shape), values.view(shape)
        every = self._group.gather(torch.stack((keys, values)))  # [ranks, 2, b, T, n]
        heads = every.permute(1, 2, 3, 0, 4).reshape(2, *shape).index_select(3, self.get_buffer("key_heads"))
        return heads[0], heads[1]


class HeadNorm(nn.Module):
    """A norm of queries or keys [b, T, n, D]: for every head separately, or over all heads of the model at once.

    heads  heads of the rank; -1: padding
    """

    def __init__(self, part: Part, weight: Stored, heads: Callable[[Shard], Sequence[int]]) -> None:
        super().__init__()
        shard, width, own = part.shard, part.config.head_dim, heads(part.shard)
        self._kernels, self._group, self._whole = part.kernels, part.group, part.plan.head_norms == "whole"
        self.kind, self.eps = part.plan.norm, part.config.rms_norm_eps
        held = frozen(weight)
        self.weight = frozen(_apart(held.flatten(), width, part.config.rotated)) if part.plan.neighbours else held
        self._numbers = held.numel()
        self._apart = part.plan.head_norms != "head"
        if self._apart:
            rows = self.weight.view(-1, width)[torch.tensor([max(0, head) for head in own])]
            self.weight = frozen(rows.flatten() if self._whole and shard.degree == 1 else rows)
            self.register_buffer("ones", torch.ones(width, dtype=rows.dtype))
        if self._whole and shard.degree > 1:  # of a head that several ranks have, each adds a part of the sum
            every = [heads(Shard(part.config, shard.layout, rank)) for rank in range(shard.degree)]
            copies = [sum(list(one).count(head) for one in every) for head in own]
            parts = [1 / count if head >= 0 else 0.0 for head, count in zip(own, copies, strict=True)]
            self.register_buffer("parts", torch.tensor(parts))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of the shape of x."""
        norm = partial(self._kernels.norm, eps=self.eps, kind=self.kind)
        if not self._apart:
            return norm(x, self.weight)
        if not self._whole:
            return norm(x, self.get_buffer("ones")) * self.weight
        if self._group.degree == 1:
            return norm(x.flatten(2), self.weight).view(x.shape)
        assert self.kind == "rms", "a norm over all ranks has no mean"
        squares = (x.pow(2).sum(-1) * self.get_buffer("parts")).sum(-1, keepdim=True)
        mean = self._group.reduce(squares) / self._numbers
        return x * torch.rsqrt(mean + self.eps).unsqueeze(-1) * self.weight


def _queries(shard: Shard) -> list[int]:
    return [*shard.queries, *[-1] * (shard.heads - len(shard.queries))]


def _keys(shard: Shard) -> Sequence[int]:
    return shard.key_heads


class Mlp(nn.Module):
    """down(activation(up(x))), or gated: down(activation(gate(x)) * up(x))."""

    def __init__(self, part: Part, weights: Weights, inner: Mapping[str, str]) -> None:
        super().__init__()
        plan = part.plan
        self._kernels, self._group, self._gated = part.kernels, part.group, plan.gated
        self._activation = plan.activation
        sides = [side for side in ("gate up", "gate", "up") if side in inner]
        self.up = joined([part.matrix(weights, inner[side]) for side in sides])
        self.up_bias = joined_vectors(weights, [f"{inner[side]}.bias" for side in sides]) if plan.mlp_bias else None
        self.down = matrix(part.matrix(weights, inner["down"]))
        self.down_bias = frozen(weights.pop(f"{inner['down']}.bias")) if plan.mlp_bias else None
        self.plain = plan.gated and plan.activation == "silu"

    def with_norm(self, norm: Normalise) -> MlpWeights:
        """For kernels that know the MLP as a whole, which is only what is ``plain``."""
        return MlpWeights(norm.weight, self.up, self.up_bias, self.down, self.down_bias, norm.eps)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [b, T, H] -> [b, T, H]; rows from ``real`` [b] on may hold anything finite."""
        return biased(self._group.reduce(self.share(x, real)), self.down_bias)

    def share(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Return this rank's part of the sum, without the bias."""
        inner = biased(self._kernels.linear(x, self.up, real), self.up_bias)
        inner = self._kernels.activate(inner, self._activation, gated=self._gated)
        return self._kernels.linear(inner, self.down, real)


class MixtureOfExperts(nn.Module):
    """A row sums its active experts: exact, and independent of other rows. No row is dropped."""

    def __init__(self, part: Part, weights: Weights, inner: Mapping[str, str]) -> None:
        super().__init__()
        plan = part.plan.experts
        assert plan is not None
        assert part.plan.gated and not part.plan.mlp_bias, "experts are gated and have no biases"
        self._plan, self._kernels, self._group = plan, part.kernels, part.group
        self.router = frozen(weights.pop(f"{inner['router']}.weight"))
        named = [{key: name.format(e=e) for key, name in inner.items()} for e in range(plan.count)]
        kernels = part.kernels.mixture
        self.experts: EveryExpert | ChosenExperts = (
            EveryExpert(part, weights, named)
            if kernels is None
            else ChosenExperts(part, weights, named, kernels=kernels)
        )
        self.shared = Mlp(part, weights, shared(inner)) if plan.shared else None
        self.shared_router = frozen(weights.pop(f"{inner['shared router']}.weight")) if plan.shared else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [b, T, H] -> [b, T, H]; rows from ``real`` [b] on may hold anything finite."""
        mixed = self.experts(x, self.chosen(torch.softmax(self._kernels.linear(x, self.router, real), -1)), real)
        if self.shared is not None and self.shared_router is not None:
            logits = self._kernels.linear(x, self.shared_router, real)
            taken = 0.5 * torch.tanh(0.5 * logits) + 0.5  # a sigmoid, made of operators that are known to lower to HLO
            mixed = mixed + taken * self.shared.share(x, real)
        return self._group.reduce(mixed)

    def chosen(self, probs: Tensor) -> Tensor:
        """Map router probabilities [b, T, E] to the weight of each expert, 0 for inactive ones."""
        numbers = torch.arange(probs.shape[-1], device=probs.device)
        own, other = probs.unsqueeze(-1), probs.unsqueeze(-2)
        ahead = (other > own) | ((other == own) & (numbers < numbers.unsqueeze(-1)))
        chosen_probs = torch.where(ahead.to(torch.float32).sum(-1) < self._plan.chosen, probs, 0.0)
        return chosen_probs / chosen_probs.sum(-1, keepdim=True) if self._plan.normalise else chosen_probs


class ChosenExperts(nn.Module):
    """The matrices of all experts below each other, for kernels that read those of chosen ones alone."""

    def __init__(
        self, part: Part, weights: Weights, named: Sequence[dict[str, str]], *, kernels: MixtureKernels
    ) -> None:
        super().__init__()
        self._kernels, self._activation = kernels, part.plan.activation
        sides = [side for side in ("gate up", "gate", "up") if side in named[0]]
        self.gate_up = joined([part.matrix(weights, inner[side]) for inner in named for side in sides])
        self.down = joined([part.matrix(weights, inner["down"]) for inner in named])

    def forward(self, x: Tensor, shares: Tensor, real: Tensor | None) -> Tensor:
        """x [b, T, H], shares [b, T, E] -> [b, T, H]: what this rank adds to the sum."""
        weights = ExpertWeights(self.gate_up, self.down, self._activation)
        return self._kernels.experts(x, shares, weights, count=real)


class EveryExpert(nn.ModuleList):
    """Compute every row with every expert, for graphs of fixed shape that cannot select experts.

    This reads all experts' weights, even for a single token.
    """

    def __init__(self, part: Part, weights: Weights, named: Sequence[dict[str, str]]) -> None:
        super().__init__([Mlp(part, weights, inner) for inner in named])

    def forward(self, x: Tensor, shares: Tensor, real: Tensor | None) -> Tensor:
        """Compute what `ChosenExperts` does."""
        total = torch.zeros_like(x)
        for index, expert in enumerate(self):
            total = total + shares[..., index : index + 1] * expert.share(x, real)  # type: ignore[operator]
        return total


def alibi_slopes(heads: int) -> list[float]:
    """Return the slope of each head (Press et al., arXiv 2108.12409): a geometric sequence, for 2^n heads from 2^(-8 /
    2^n) on.

    For other numbers the rest are every second slope of the next power of two, as in the authors' code and BLOOM.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]


def _gathered(part: Part, weights: Weights, inner: Mapping[str, str], *, kind: str) -> Stored:
    """Return query, key and value of this rank concatenated by rows, with rotary pairs half a head apart."""
    names = [inner["qkv"]] if part.plan.joined else [inner[side] for side in "qkv"]
    sides = [part.matrix(weights, n) if kind == "weight" else weights.pop(f"{n}.bias") for n in names]
    packed = [side for side in sides if isinstance(side, QuantizedTensor)]
    if not packed:
        return _ordered(part, torch.cat([side for side in sides if isinstance(side, Tensor)]))
    gathered = joined_rows(packed)
    return gathered.at(_ordered(part, torch.arange(gathered.shape[0])))


def _ordered(part: Part, rows: Tensor) -> Tensor:
    """Rows of this rank as a checkpoint has them, in the order in which attention reads them."""
    plan, width = part.plan, part.config.head_dim
    queries, keys = part.shard.heads * width, part.shard.key_part
    if plan.joined == "heads":
        sides = [side.flatten(0, 1) for side in rows.view(part.shard.heads, 3, width, *rows.shape[1:]).unbind(1)]
    else:
        sides = list(rows.split((queries, keys, keys)))
    if plan.neighbours:
        sides[:2] = [_apart(side, width, part.config.rotated) for side in sides[:2]]
    return torch.cat(sides)


def _apart(rows: Tensor, width: int, rotated: int) -> Tensor:
    """Reorder rows of heads [n * width, ...]: rotary pairs 2i, 2i + 1 move to i, i + half. Scores do not change."""
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, width)]
    moved: Tensor = rows.view(-1, width, *rows.shape[1:])[:, order]
    return moved.flatten(0, 1)
