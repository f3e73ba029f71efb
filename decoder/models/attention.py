"""Attention of a model: query, key and value products, rotation, and the output product."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from paceline.decoder.kernels.protocol import AttentionRule, AttentionWeights, CachePosition
from paceline.decoder.models.blueprint import Alibi
from paceline.decoder.models.layers import Normalise, Part, Rotation, Weights, biased, frozen, scaled
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.quantize import QuantizedTensor, Stored, joined_rows, matrix


class Attention(nn.Module):
    """Query, key and value products, rotation, attention over the cache, output product."""

    def __init__(self, part: Part, weights: Weights, inner: Mapping[str, str], *, index: int) -> None:
        super().__init__()
        part = part.of_layer(index)
        config, plan, shard = part.config, part.plan, part.shard
        self._shard, self._kernels, self._group = shard, part.kernels, part.group
        sides = "qkv" if plan.gemma is None else plan.gemma.sides(index)
        self._own, self.value_norm = "k" in sides, frozen(torch.ones(config.head_dim)) if plan.gemma else None
        self.qkv = matrix(_gathered(part, weights, inner, kind="weight", sides=sides))
        self.qkv_bias = frozen(_gathered(part, weights, inner, kind="bias", sides=sides)) if plan.qkv_bias else None
        self.out = matrix(part.matrix(weights, inner["out"]))
        self.out_bias = frozen(weights.pop(f"{inner['out']}.bias")) if plan.out_bias else None
        unrotated = bool(plan.unrotated and plan.unrotated[index])
        unnormed = plan.head_norms == "bare" and unrotated
        self.q_norm, self.k_norm = (
            HeadNorm(part, weights, inner.get(side, ""), heads=heads)
            if plan.head_norms and not unnormed and side[0] in sides
            else None
            for side, heads in (("q norm", _queries), ("k norm", _keys))
        )
        self._eps = config.rms_norm_eps
        self.scale = plan.query_scale * config.head_dim**0.5 if plan.query_scale else 1.0
        self.window, self._cap = plan.windows[index] if plan.windows else 0, plan.score_cap
        self._chunk = plan.chunks[index] if plan.chunks else 0
        self._sharper = None if plan.only_unturned_sharper and not unrotated else plan.sharper
        self.plain = (
            not (plan.head_norms or plan.alibi or self.window or self._cap or plan.qkv_clip or plan.sinks)
            and not (self._chunk or self._sharper)
            and self.scale == 1.0
            and config.rotated == config.head_dim
        )
        if shard.gathers:
            self.register_buffer("key_heads", torch.tensor(shard.key_heads, dtype=torch.int32))
        self.sinks = None
        if plan.sinks:
            every = frozen(weights.pop(inner["sinks"]))
            self.sinks = frozen(every[torch.tensor([max(0, head) for head in _queries(shard)])])
        self._sloped, self._late, self._clip = bool(plan.alibi), plan.late_head_norms, plan.qkv_clip
        if plan.alibi:
            slopes = torch.tensor(
                [*alibi_slopes(config.num_heads, plan.alibi), *[0.0] * shard.heads], dtype=torch.float32
            )
            self.register_buffer("slopes", slopes.narrow(0, shard.queries.start, shard.heads).clone())

    def with_norm(self, norm: Normalise) -> AttentionWeights:
        """For kernels that know attention as a whole, which is only what is ``plain``."""
        return AttentionWeights(norm.weight, self.qkv, self.qkv_bias, self.out, self.out_bias, norm.eps)

    def forward(
        self, x: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: Rotation | None
    ) -> Tensor:
        """x [b, T, H] -> [b, T, H]; keys and values go to their rows of the cache [slots, G, R, D]."""
        q, k, v = self.heads(x, place, rotation)
        assert k is not None and v is not None, "the layer has keys and values"
        return self.attended(q, (k, v), place, cache=cache)

    def heads(
        self, x: Tensor, place: CachePosition, rotation: Rotation | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x [b, T, H] -> queries [b, T, heads, D], and keys and values [b, T, G, D] if the layer has its own."""
        mixed = biased(self._kernels.linear(x, self.qkv, place.real), self.qkv_bias)
        if self._clip:
            mixed = mixed.clamp(-self._clip, self._clip)
        width, share = self._shard.config.head_dim, self._shard.key_part
        if not self._own:
            return self._placed(mixed.unflatten(-1, (-1, width)), self.q_norm, rotation), None, None
        q, keys, values = mixed.split((self._shard.heads * width, share, share), dim=-1)
        q = q.view(*q.shape[:-1], -1, width)
        k, v = self._key_heads(keys, values)
        if self.value_norm is not None:
            v = self._kernels.norm(v, self.value_norm, eps=self._eps)
        return self._placed(q, self.q_norm, rotation), self._placed(k, self.k_norm, rotation), v

    def _placed(self, x: Tensor, norm: HeadNorm | None, rotation: Rotation | None) -> Tensor:
        if norm is not None and not self._late:
            x = norm(x)
        if rotation is not None:
            x = self._kernels.rotate(x, rotation)
        return norm(x) if norm is not None and self._late else x

    def attended(
        self, q: Tensor, kv: tuple[Tensor, Tensor], place: CachePosition, *, cache: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Attention and the output product, of `heads`. -> [b, T, H]"""
        rule = AttentionRule(
            self.window, self._cap, self.get_buffer("slopes") if self._sloped else None, self.sinks, self._chunk
        )
        if self._sharper is not None:
            q = q * sharpness(place.positions(q.shape[1]), self._sharper)[..., None, None]
        mixed = self._kernels.attend((scaled(q, self.scale), *kv), cache, place, rule=rule)
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


class LatentAttention(nn.Module):
    """Multi-head latent attention, see `Latent`: what heads share is multiplied on every rank."""

    def __init__(self, part: Part, weights: Weights, inner: Mapping[str, str]) -> None:
        super().__init__()
        latent, config, heads = part.plan.latent, part.config, part.shard.heads
        assert latent is not None
        self._kernels, self._group, self._latent = part.kernels, part.group, latent
        self.width, self._heads = config.head_dim, heads
        self.scale = part.plan.query_scale * self.width**0.5 if part.plan.query_scale else 1.0
        self.q_a = matrix(part.matrix(weights, inner["q a"])) if latent.query else None
        self.q_norm = self._norm(part, weights, inner["q a norm"]) if latent.query else None
        queries = part.matrix(weights, inner["q b" if latent.query else "q"])
        # Rotated dimensions go first, and the pairs half of them apart, where `Kernels.rotate` expects them.
        count = latent.rope
        rope = [*range(0, count, 2), *range(1, count, 2)] if part.plan.neighbours else [*range(count)]
        order = [*(latent.nope + at for at in rope), *range(latent.nope)]
        self.q = matrix(_reordered(queries, [head * self.width + at for head in range(heads) for at in order]))
        down = part.matrix(weights, inner["kv a"])
        self.kv_a = matrix(_reordered(down, [*(latent.rank + at for at in rope), *range(latent.rank)]))
        self.kv_norm = self._norm(part, weights, inner["kv a norm"])
        self.kv = matrix(part.matrix(weights, inner["kv b"]))
        self.out = matrix(part.matrix(weights, inner["out"]))

    @staticmethod
    def _norm(part: Part, weights: Weights, name: str) -> Normalise:
        return Normalise(part, weights.pop(f"{name}.weight"), eps=_LATENT_EPS)

    def forward(
        self, x: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: Rotation | None
    ) -> Tensor:
        """Compute what `Attention` does."""
        linear, latent = self._kernels.linear, self._latent
        if self.q_a is not None and self.q_norm is not None:
            q = linear(self.q_norm(linear(x, self.q_a, place.real)), self.q, place.real)
        else:
            q = linear(x, self.q, place.real)
        q = q.unflatten(-1, (self._heads, self.width))
        shared, compressed = linear(x, self.kv_a, place.real).split((latent.rope, latent.rank), dim=-1)
        both = linear(self.kv_norm(compressed), self.kv, place.real)
        nope, v = both.unflatten(-1, (self._heads, -1)).split((latent.nope, latent.value), dim=-1)
        k = torch.cat((shared.unsqueeze(-2).expand(*nope.shape[:-1], -1), nope), -1)
        assert rotation is not None, "some dimensions of a head are rotated"
        q, k = self._kernels.rotate(q, rotation), self._kernels.rotate(k, rotation)
        v = nn.functional.pad(v, (0, self.width - latent.value))
        mixed = self._kernels.attend((scaled(q, self.scale), k, v), cache, place)
        mixed = mixed.unflatten(-1, (self._heads, self.width))[..., : latent.value].flatten(-2)
        return self._group.reduce(linear(mixed, self.out, place.real))


_LATENT_EPS = 1e-6
"""Of the norms of short vectors, whatever rms_norm_eps says."""


def _reordered(weight: Stored, rows: list[int]) -> Stored:
    return weight[rows] if isinstance(weight, Tensor) else weight.at(torch.tensor(rows))


class HeadNorm(nn.Module):
    """A norm of queries or keys [b, T, n, D]: for every head separately, or over all heads of the model at once.

    heads  heads of the rank; -1: padding
    """

    def __init__(self, part: Part, weights: Weights, name: str, *, heads: Callable[[Shard], Sequence[int]]) -> None:
        super().__init__()
        shard, width, own = part.shard, part.config.head_dim, heads(part.shard)
        self._kernels, self._group, self._whole = part.kernels, part.group, part.plan.head_norms == "whole"
        self.kind, self.eps = part.norm_kind, part.config.rms_norm_eps
        bare = part.plan.head_norms == "bare"
        held = frozen(torch.ones(width) if bare else part.norm_weight(weights, name, width))
        bias = weights.pop(f"{name}.bias", None)
        self.bias = None if bias is None else frozen(bias)
        self.weight = frozen(_apart(held.flatten(), width, part.config.rotated)) if part.plan.neighbours else held
        self._numbers = held.numel()
        self._apart = part.plan.head_norms in ("own", "whole")
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
            return norm(x, self.weight, bias=self.bias)
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


def sharpness(at: Tensor, sharper: tuple[float, int, int]) -> Tensor:
    """Factors of queries at positions [b, T], see `Blueprint.sharper`."""
    factor, shift, every = sharper
    return 1.0 + factor * torch.log(1.0 + torch.floor((at.to(torch.float32) + shift) / every))


def alibi_slopes(heads: int, kind: Alibi = "bloom") -> list[float]:
    """Return the slope of each head (Press et al., arXiv 2108.12409): a geometric sequence, for 2^n heads from 2^(-8 /
    2^n) on.

    For other numbers the rest are every second slope of the next power of two, as in the authors' code and BLOOM; MPT
    takes all slopes from the next power of two, every second one first.
    """
    if kind == "mpt":
        most = 1 << (heads - 1).bit_length()
        every = [2.0 ** (-8.0 * (i + 1) / most) for i in range(most)]
        return every if most == heads else [*every[1::2], *every[::2]][:heads]
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]


def _gathered(part: Part, weights: Weights, inner: Mapping[str, str], *, kind: str, sides: str) -> Stored:
    """Return query, key and value of this rank concatenated by rows, with rotary pairs half a head apart."""
    names = [inner["qkv"]] if part.plan.joined else [inner[side] for side in sides]
    read = {n: part.matrix(weights, n) if kind == "weight" else weights.pop(f"{n}.bias") for n in dict.fromkeys(names)}
    made = [read[n] for n in names]
    packed = [side for side in made if isinstance(side, QuantizedTensor)]
    if not packed:
        return _ordered(part, torch.cat([side for side in made if isinstance(side, Tensor)]))
    gathered = joined_rows(packed)
    return gathered.at(_ordered(part, torch.arange(gathered.shape[0])))


def _ordered(part: Part, rows: Tensor) -> Tensor:
    plan, width = part.plan, part.config.head_dim
    queries, keys = part.shard.heads * width, part.shard.key_part
    if plan.gemma:
        return rows
    if plan.joined == "heads":
        sides = [side.flatten(0, 1) for side in rows.view(part.shard.heads, 3, width, *rows.shape[1:]).unbind(1)]
    else:
        sides = list(rows.split((queries, keys, keys)))
    if plan.neighbours:
        sides[:2] = [_apart(side, width, part.config.rotated) for side in sides[:2]]
    if plan.backwards:  # the halves in the other order: turning them by an angle turns these by its negative
        half = part.config.rotated // 2
        order = [*range(half, 2 * half), *range(half), *range(2 * half, width)]
        sides[:2] = [side.view(-1, width, *side.shape[1:])[:, order].flatten(0, 1) for side in sides[:2]]
    return torch.cat(sides)


def _apart(rows: Tensor, width: int, rotated: int) -> Tensor:
    """Reorder rows of heads [n * width, ...]: rotary pairs 2i, 2i + 1 move to i, i + half. Scores do not change."""
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, width)]
    moved: Tensor = rows.view(-1, width, *rows.shape[1:])[:, order]
    return moved.flatten(0, 1)
