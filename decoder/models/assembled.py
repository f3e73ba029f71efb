"""The network of a family that a `Blueprint` describes: norms, attention, MLP or experts, put together as it says.

Not here: what a family's config.json means and what its tensors are called (`paceline.decoder.models.families`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from paceline.decoder.kernels.protocol import AttentionRule, CachePosition, ExpertWeights, Kernels, MixtureKernels
from paceline.decoder.models.base import DecoderModel
from paceline.decoder.models.blueprint import AssembledConfig, Blueprint, Names
from paceline.decoder.models.layers import Rotation, Weights, biased, frozen, joined_vectors
from paceline.decoder.models.rope import rope_tables, rotation_at
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.quantize import QuantizedTensor, Stored, joined, joined_rows, matrix


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a model, the kernels it computes with, and what its tensors are called."""

    shard: Shard
    kernels: Kernels
    group: Collectives
    names: Names

    @property
    def config(self) -> AssembledConfig:
        config = self.shard.config
        assert isinstance(config, AssembledConfig), "the family's own `config` made it"
        return config

    def taken(self, weights: Weights, name: str) -> Stored:
        """A product's matrix as [out, in], which a quantised one is already. Takes it out of ``weights``."""
        weight = weights.pop(f"{name}.weight")
        return weight.t().contiguous() if self.names.transposed and isinstance(weight, Tensor) else weight


class _Mlp(nn.Module):
    """down(activation(up(x))), or gated: down(activation(gate(x)) * up(x))."""

    def __init__(self, part: Part, weights: Weights, inner: dict[str, str]) -> None:
        super().__init__()
        plan = part.config.blueprint
        self._kernels, self._group, self._gated = part.kernels, part.group, plan.gated
        self._activation = plan.activation
        sides = [side for side in ("gate up", "gate", "up") if side in inner]
        self.up = joined([part.taken(weights, inner[side]) for side in sides])
        self.up_bias = joined_vectors(weights, [f"{inner[side]}.bias" for side in sides]) if plan.mlp_bias else None
        self.down = matrix(part.taken(weights, inner["down"]))
        self.down_bias = frozen(weights.pop(f"{inner['down']}.bias")) if plan.mlp_bias else None

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [b, T, H] -> [b, T, H]; rows from ``real`` [b] on may hold anything finite."""
        return biased(self._group.reduce(self.share(x, real)), self.down_bias)

    def share(self, x: Tensor, real: Tensor | None) -> Tensor:
        """What this rank adds to the sum, without the bias."""
        inner = biased(self._kernels.linear(x, self.up, real), self.up_bias)
        inner = self._kernels.activate(inner, self._activation, gated=self._gated)
        return self._kernels.linear(inner, self.down, real)


class MixtureOfExperts(nn.Module):
    """A row adds up the experts that it chose: exact, and independent of the other rows. No row is ever dropped."""

    def __init__(self, part: Part, weights: Weights, inner: dict[str, str]) -> None:
        super().__init__()
        plan = part.config.blueprint
        assert plan.experts is not None
        assert plan.gated and not plan.mlp_bias, "experts are gated and have no biases"
        self._plan, self._kernels, self._group = plan.experts, part.kernels, part.group
        self.router = frozen(weights.pop(f"{inner['router']}.weight"))
        named = [{key: name.format(e=e) for key, name in inner.items()} for e in range(plan.experts.count)]
        kernels = part.kernels.mixture
        self.experts: EveryExpert | ChosenExperts = (
            EveryExpert(part, weights, named)
            if kernels is None
            else ChosenExperts(part, weights, named, kernels=kernels)
        )

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [b, T, H] -> [b, T, H]; rows from ``real`` [b] on may hold anything finite."""
        shares = self.chosen(torch.softmax(self._kernels.linear(x, self.router, real), -1))
        return self._group.reduce(self.experts(x, shares, real))

    def chosen(self, probs: Tensor) -> Tensor:
        """Router probabilities [b, T, E] -> of each expert what it counts for, 0 of those that are not chosen."""
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
        self._kernels, self._activation = kernels, part.config.blueprint.activation
        sides = [side for side in ("gate up", "gate", "up") if side in named[0]]
        self.gate_up = joined([part.taken(weights, inner[side]) for inner in named for side in sides])
        self.down = joined([part.taken(weights, inner["down"]) for inner in named])

    def forward(self, x: Tensor, shares: Tensor, real: Tensor | None) -> Tensor:
        """x [b, T, H], shares [b, T, E] -> [b, T, H]: what this rank adds to the sum."""
        weights = ExpertWeights(self.gate_up, self.down, self._activation)
        return self._kernels.experts(x, shares, weights, count=real)


class EveryExpert(nn.ModuleList):
    """Every expert computes every row, for graphs of fixed shape that cannot follow what a row chose.

    That reads all experts' weights, for a single token as for a window.
    """

    def __init__(self, part: Part, weights: Weights, named: Sequence[dict[str, str]]) -> None:
        super().__init__([_Mlp(part, weights, inner) for inner in named])

    def forward(self, x: Tensor, shares: Tensor, real: Tensor | None) -> Tensor:
        """As `ChosenExperts`."""
        total = torch.zeros_like(x)
        for index, expert in enumerate(self):
            total = total + shares[..., index : index + 1] * expert.share(x, real)  # type: ignore[operator]
        return total


class AssembledModel(DecoderModel):
    """See `DecoderModel`."""

    @classmethod
    def of(cls, part: Part, weights: Weights, positions: int) -> AssembledModel:
        """The network of a rank. Takes its tensors out of ``weights``."""
        config, plan, outer = part.config, part.config.blueprint, part.names.outer
        model = cls(
            part.shard,
            part.kernels,
            embedding=weights.pop(f"{outer['embedding']}.weight"),
            layers=[AssembledLayer(part, weights, index) for index in range(config.num_layers)],
            norm=weights.pop(f"{outer['norm']}.weight"),
            head=weights.pop(f"{outer['head']}.weight", None),
            positions=positions,
            group=part.group,
        )
        model.plan = plan
        bias = weights.pop(f"{outer['norm']}.bias", None)
        model.last = Normalise(part, model.norm, bias=bias)
        model.first = _norm(part, weights, outer["embedding norm"]) if plan.embedding_norm else None
        model.learned = frozen(weights.pop(f"{outer['positions']}.weight")) if plan.learned else None
        model.head_bias = frozen(weights.pop(f"{outer['head']}.bias")) if plan.head_bias else None
        if plan.rotated:
            for name, rope in (("", config.rope), ("local_", plan.local_rope)):
                if rope is not None:
                    for side, table in zip(("cos", "sin"), rope_tables(rope, plan.rotated, positions), strict=True):
                        model.register_buffer(f"{name}{side}", table)
        return model

    plan: Blueprint
    last: Normalise
    first: Normalise | None
    learned: nn.Parameter | None
    head_bias: nn.Parameter | None

    def entered(self, hidden: Tensor, at: Tensor) -> Tensor:
        """See `DecoderModel`."""
        if self.plan.embedding_scale != 1.0:
            hidden = hidden * self.plan.embedding_scale
        if self.learned is not None:
            hidden = hidden + self._kernels.embed(self.learned, at + self.plan.learned_from)
        return hidden if self.first is None else self.first(hidden)

    def rotations(self, at: Tensor) -> list[Rotation]:
        """See `DecoderModel`."""
        turned = partial(rotation_at, at, kernels=self._kernels)
        default = turned(self.cos, self.sin)
        if self.plan.local_rope is None:
            return [default] * len(self.layers)
        local = turned(self.get_buffer("local_cos"), self.get_buffer("local_sin"))
        return [local if window else default for window in self.plan.windows]

    def left(self, hidden: Tensor) -> Tensor:
        """See `DecoderModel`."""
        return self.last(hidden)  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor, count: Tensor | None = None) -> Tensor:
        """See `DecoderModel`."""
        logits = biased(super().logits(hidden, count), self.head_bias)
        cap = self.plan.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits


class AssembledLayer(nn.Module):
    """One layer."""

    def __init__(self, part: Part, weights: Weights, index: int) -> None:
        super().__init__()
        prefix = part.names.layer.format(i=index)
        inner = {name: prefix + rest for name, rest in part.names.inner.items()}
        plan = part.config.blueprint
        self.parallel = plan.parallel
        self.norm = _norm(part, weights, inner["norm"])
        self.attention = Attention(part, weights, inner, window=plan.windows[index] if plan.windows else 0)
        self.post_norm = _norm(part, weights, inner["post norm"]) if plan.post_norms else None
        self.mlp_norm = None if plan.shared_norm else _norm(part, weights, inner["mlp norm"])
        kind = _Mlp if plan.experts is None else MixtureOfExperts
        self.mlp = kind(part, weights, inner)
        self.post_mlp_norm = _norm(part, weights, inner["post mlp norm"]) if plan.post_norms else None

    def forward(self, hidden: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: Rotation) -> Tensor:
        """See `DecoderModel`."""
        x = self.norm(hidden)
        attention = self.attention(x, place, cache, rotation)
        if self.post_norm is not None:
            attention = self.post_norm(attention)
        between: Tensor = hidden if self.parallel else hidden + attention
        mlp = self.mlp(x if self.mlp_norm is None else self.mlp_norm(between), place.real)
        if self.post_mlp_norm is not None:
            mlp = self.post_mlp_norm(mlp)
        total: Tensor = between + mlp
        return total + attention if self.parallel else total


class Normalise(nn.Module):
    """A norm over the last dimension, in float32."""

    def __init__(self, part: Part, weight: Stored, *, bias: Stored | None) -> None:
        super().__init__()
        self._kernels, self.kind, self.eps = part.kernels, part.config.blueprint.norm, part.config.rms_norm_eps
        self.weight = weight if isinstance(weight, nn.Parameter) else frozen(weight)
        self.bias = None if bias is None else frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.norm(x, self.weight, eps=self.eps, bias=self.bias, kind=self.kind)


class Attention(nn.Module):
    """As `paceline.decoder.models.layers.SelfAttention`, with what a blueprint may add."""

    def __init__(self, part: Part, weights: Weights, inner: dict[str, str], *, window: int) -> None:
        super().__init__()
        config, plan, shard = part.config, part.config.blueprint, part.shard
        self._shard, self._kernels, self._group, self._plan = shard, part.kernels, part.group, plan
        self.qkv = matrix(_gathered(part, weights, inner, kind="weight"))
        self.qkv_bias = frozen(_gathered(part, weights, inner, kind="bias")) if plan.qkv_bias else None
        self.out = matrix(part.taken(weights, inner["out"]))
        self.out_bias = frozen(weights.pop(f"{inner['out']}.bias")) if plan.out_bias else None
        self.q_norm, self.k_norm = (
            Normalise(part, weights.pop(f"{inner[side]}.weight"), bias=None) if plan.head_norms else None
            for side in ("q norm", "k norm")
        )
        self.scale = plan.query_scale * config.head_dim**0.5 if plan.query_scale else 1.0
        self.window = window
        if shard.gathers:
            self.register_buffer("key_heads", torch.tensor(shard.key_heads, dtype=torch.int32))
        if plan.alibi:
            slopes = torch.tensor([*alibi_slopes(config.num_heads), *[0.0] * shard.heads], dtype=torch.float32)
            self.register_buffer("slopes", slopes.narrow(0, shard.queries.start, shard.heads).clone())

    def forward(self, x: Tensor, place: CachePosition, cache: tuple[Tensor, Tensor], rotation: Rotation) -> Tensor:
        """x [b, T, H] -> [b, T, H]; keys and values go to their rows of the cache [slots, G, R, D]."""
        plan = self._plan
        mixed = biased(self._kernels.linear(x, self.qkv, place.real), self.qkv_bias)
        width, share = self._shard.config.head_dim, self._shard.key_part
        q, keys, values = mixed.split((self._shard.heads * width, share, share), dim=-1)
        q = q.view(*q.shape[:-1], -1, width)
        k, v = self._key_heads(keys, values)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if plan.rotated:
            q, k = self._kernels.rotate(q, rotation), self._kernels.rotate(k, rotation)
        if self.scale != 1.0:
            q = q * self.scale
        rule = AttentionRule(self.window, plan.score_cap, self.get_buffer("slopes") if plan.alibi else None)
        out = self._kernels.linear(self._kernels.attend((q, k, v), cache, place, rule=rule), self.out, place.real)
        return biased(self._group.reduce(out), self.out_bias)

    def _key_heads(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        shape = (*keys.shape[:-1], -1, self._shard.config.head_dim)
        if not self._shard.gathers:
            return keys.view(shape), values.view(shape)
        every = self._group.gather(torch.stack((keys, values)))  # [ranks, 2, b, T, n]
        heads = every.permute(1, 2, 3, 0, 4).reshape(2, *shape).index_select(3, self.get_buffer("key_heads"))
        return heads[0], heads[1]


def alibi_slopes(heads: int) -> list[float]:
    """Of each head (Press et al., arXiv 2108.12409): a geometric sequence, for 2^n heads from 2^(-8 / 2^n) on.

    Other numbers take every second one of twice as many, as the authors' code and BLOOM do.
    """
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(heads - power)]


def _norm(part: Part, weights: Weights, name: str) -> Normalise:
    weight, bias = weights.pop(f"{name}.weight"), weights.pop(f"{name}.bias", None)
    return Normalise(part, weight, bias=bias)


def _gathered(part: Part, weights: Weights, inner: dict[str, str], *, kind: str) -> Stored:
    """Query, key and value of this rank below each other, whose heads have their rotary pairs half a turn apart."""
    names = [inner["qkv"]] if part.config.blueprint.joined else [inner[side] for side in "qkv"]
    sides = [part.taken(weights, n) if kind == "weight" else weights.pop(f"{n}.bias") for n in names]
    packed = [side for side in sides if isinstance(side, QuantizedTensor)]
    if not packed:
        return _ordered(part, torch.cat([side for side in sides if isinstance(side, Tensor)]))
    gathered = joined_rows(packed)
    return gathered.at(_ordered(part, torch.arange(gathered.shape[0])))


def _ordered(part: Part, rows: Tensor) -> Tensor:
    """Rows of this rank as a checkpoint has them, in the order in which attention reads them."""
    plan, width = part.config.blueprint, part.config.head_dim
    queries, keys = part.shard.heads * width, part.shard.key_part
    if plan.joined == "heads":
        sides = [side.flatten(0, 1) for side in rows.view(part.shard.heads, 3, width, *rows.shape[1:]).unbind(1)]
    else:
        sides = list(rows.split((queries, keys, keys)))
    if plan.neighbours:
        sides[:2] = [_apart(side, width, plan.rotated) for side in sides[:2]]
    return torch.cat(sides)


def _apart(rows: Tensor, width: int, rotated: int) -> Tensor:
    """Rows of heads [n * width, ...] whose rotary pairs 2i, 2i + 1 move to i, i + half. Scores do not change."""
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, width)]
    moved: Tensor = rows.view(-1, width, *rows.shape[1:])[:, order]
    return moved.flatten(0, 1)
