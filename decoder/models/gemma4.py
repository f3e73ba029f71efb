"""Networks of Gemma 3n and 4: layers that read others' keys and values, and have separate inputs for each token."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.core.types import FeatureSpec
from paceline.decoder.kernels.protocol import CachePosition
from paceline.decoder.models.attention import Attention
from paceline.decoder.models.experts import MixtureOfExperts
from paceline.decoder.models.family import parts
from paceline.decoder.models.layers import Mlp, Normalise, Part, Rotation, Weights, frozen
from paceline.decoder.models.network import DecoderModel
from paceline.decoder.parallel.vocab_parallel import embedded
from paceline.decoder.weights.quantize import matrix

KeysAndValues = tuple[Tensor, Tensor]


class Gemma4Model(DecoderModel):
    """The network of one rank."""

    def __init__(self, part: Part, weights: Weights, positions: int) -> None:
        outer, plan = part.names.outer, part.plan.gemma
        assert plan is not None
        self._inputs, self._hidden = plan.inputs, part.config.hidden_size
        self._sources, self._cached = plan.sources, part.config.cached_layers
        super().__init__(part, weights, positions)
        self._rows = plan.rows
        if plan.inputs:
            self.table = matrix(weights.pop(f"{outer['inputs']}.weight"))
            first = part.shard.rank * self.table.shape[0]
            self.register_buffer("rows", first + torch.arange(self.table.shape[0], dtype=torch.int32))
            self.projection = matrix(weights.pop(f"{outer['input projection']}.weight"))
            self.input_norm = Normalise(part, weights.pop(f"{outer['input norm']}.weight"))

    def layer(self, part: Part, weights: Weights, index: int) -> nn.Module:
        return Gemma4Layer(part, weights, index)

    def forward(
        self,
        tokens: Tensor,
        place: CachePosition,
        caches: list[tuple[Tensor, Tensor]],
        *,
        reads: FeatureSpec | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """``caches`` are those of the layers that have one."""
        at = place.positions(tokens.shape[1]).clamp(max=self._last)
        hidden = self._entered(embedded(tokens, self.embedding, self.ids, group=self._group, kernels=self._kernels), at)
        streams, inputs = [hidden], self._inputs_of(tokens, hidden, place)
        hidden = self._spread(hidden, place)
        kept: dict[int, KeysAndValues] = {}
        own = dict(zip(self._cached, caches, strict=False))
        depth = len(self.layers) if len(own) == len(self._cached) else len(own)
        for index, rotation in enumerate(self.rotations(at)[:depth]):
            layer, source = self.layers[index], self._sources[index]
            hidden, kept[source] = layer(hidden, place, own[source], rotation, inputs[index], kept.get(source))
            streams.append(self._active(hidden))
        hidden = self.norm(self._left(hidden, place))
        if reads is None:
            return hidden, None
        return hidden, torch.cat([streams[i] for i in reads.layers], -1) if reads.layers else hidden

    def _inputs_of(self, tokens: Tensor, hidden: Tensor, place: CachePosition) -> list[Tensor | None]:
        """Embeddings of tokens for each layer [b, T, n], of a table and of the embeddings [b, T, H] that all read."""
        if not self._inputs:
            return [None] * len(self.layers)
        own, rows = torch.where(tokens < self._rows, tokens, 0), self.get_buffer("rows")
        known = embedded(own, self.table, rows, group=self._group, kernels=self._kernels) * self._inputs**0.5
        made = self._kernels.linear(hidden, self.projection, place.real) * self._hidden**-0.5
        made = self.input_norm(made.unflatten(-1, (-1, self._inputs)))
        every = (made + known.unflatten(-1, (-1, self._inputs))) * 2.0**-0.5
        return [one.squeeze(-2) for one in every.split(1, -2)]

    def _spread(self, hidden: Tensor, place: CachePosition) -> Tensor:
        """Map embeddings [b, T, H] to the layers' residual streams."""
        return hidden

    def _left(self, hidden: Tensor, place: CachePosition) -> Tensor:
        """Map residual streams to what the last norm reads, [b, T, H]."""
        return hidden

    def _active(self, hidden: Tensor) -> Tensor:
        """The stream that drafters read, [b, T, H]."""
        return hidden


class Gemma4Layer(nn.Module):
    """Attention, MLP and perhaps experts with norms before and after them, the layer's own input, and a factor."""

    def __init__(self, part: Part, weights: Weights, index: int) -> None:
        super().__init__()
        prefix = part.names.layer.format(i=index)
        inner = {name: prefix + rest for name, rest in part.names.inner.items()}
        self._kernels = part.kernels
        self.norm, self.post_norm, self.mlp_norm, self.post_mlp_norm = (
            part.norm(weights, inner[name]) for name in ("norm", "post norm", "mlp norm", "post mlp norm")
        )
        self.attention = Attention(part, weights, inner, index=index)
        self.mlp = Mlp(part, weights, inner)
        self.mixture = BesideExperts(part, weights, inner) if part.plan.experts is not None else None
        self.factor = frozen(weights.pop(inner["layer factor"]))
        self._activation = part.plan.activation
        self._reads = part.plan.gemma is not None and part.plan.gemma.inputs > 0
        if self._reads:
            self.gate = matrix(part.matrix(weights, inner["input gate"]))
            self.projection = matrix(part.matrix(weights, inner["input out"]))
            self.input_norm = part.norm(weights, inner["input norm"])

    def forward(
        self,
        hidden: Tensor,
        place: CachePosition,
        cache: tuple[Tensor, Tensor],
        rotation: Rotation | None,
        own: Tensor | None,
        kept: KeysAndValues | None,
    ) -> tuple[Tensor, KeysAndValues]:
        """Run one layer on hidden states [b, T, H] and its ``own`` input [b, T, n].

        ``kept``: keys and values of the layer whose cache this one reads. They are written to it once more, where they
        lie already. -> hidden states, and the keys and values of that cache
        """
        q, k, v = self.attention.heads(self.norm(hidden), place, rotation)
        if kept is None:
            assert k is not None and v is not None, "the first layer of a cache has keys and values"
            kept = (k, v)
        hidden = hidden + self.post_norm(self.attention.attended(q, kept, place, cache=cache))
        added = self.mlp(self.mlp_norm(hidden), place.real)
        if self.mixture is not None:
            added = self.mixture(hidden, added, place.real)
        hidden = hidden + self.post_mlp_norm(added)
        if own is not None:
            gate = self._kernels.activate(
                self._kernels.linear(hidden, self.gate, place.real), self._activation, gated=False
            )
            hidden = hidden + self.input_norm(self._kernels.linear(gate * own, self.projection, place.real))
        return hidden * self.factor, kept


class BesideExperts(nn.Module):
    """Experts that read what the MLP's norm reads, by a router with a separate norm."""

    def __init__(self, part: Part, weights: Weights, inner: Mapping[str, str]) -> None:
        super().__init__()
        width, plan = part.config.hidden_size, part.plan.experts
        assert plan is not None
        self._kernels, self._eps = part.kernels, part.config.rms_norm_eps
        self.scale = frozen(frozen(weights.pop(inner["router scale"])).float() * width**-0.5)
        self.weighting = frozen(weights.pop(inner["expert scale"]))
        self.before, self.after, self.mlp_after = (
            part.norm(weights, inner[f"expert {name}"]) for name in ("norm", "post norm", "mlp norm")
        )
        self.mixture = MixtureOfExperts(part, weights, {**parts(inner, "expert"), "router": inner["router"]})

    def forward(self, hidden: Tensor, mlp: Tensor, real: Tensor | None) -> Tensor:
        """hidden and the MLP's output [b, T, H] -> the sum of that and of the experts' output, each normalised."""
        shares = self.mixture.shares(self._kernels.norm(hidden, self.scale, eps=self._eps), real)
        mixed = self.mixture.mixed(self.before(hidden), shares * self.weighting, real)
        summed: Tensor = self.mlp_after(mlp) + self.after(mixed)
        return summed


# ---- Gemma 3n


class Gemma3nModel(Gemma4Model):
    """The network of one rank, with several residual streams [b, T, S, H]."""

    def __init__(self, part: Part, weights: Weights, positions: int) -> None:
        super().__init__(part, weights, positions)
        outer, plan = part.names.outer, part.plan.gemma
        assert plan is not None
        self._stream = plan.active
        others = range(plan.streams - 1)
        self.spread, self.left = (
            nn.ParameterList(frozen(weights.pop(f"{outer[side].format(s=s)}.weight")) for s in others)
            for side in ("stream", "unstream")
        )

    def layer(self, part: Part, weights: Weights, index: int) -> nn.Module:
        return Gemma3nLayer(part, weights, index)

    def _spread(self, hidden: Tensor, place: CachePosition) -> Tensor:
        others = [_as_large(self._kernels.linear(hidden, one, place.real), hidden) for one in self.spread]
        return torch.stack((hidden, *others), -2)

    def _left(self, hidden: Tensor, place: CachePosition) -> Tensor:
        first, *others = hidden.unbind(-2)
        linear, total = self._kernels.linear, first
        for stream, one in zip(others, self.left, strict=True):
            total = total + _as_large(linear(stream, one, place.real), first)
        return total / (1 + len(others))

    def _active(self, hidden: Tensor) -> Tensor:
        return hidden[..., self._stream, :]


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x [b, T, H] scaled to the root mean square of another."""
    return x * like.pow(2).mean(-1, keepdim=True).sqrt() / x.pow(2).mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


class Gemma3nLayer(nn.Module):
    """Attention and a product of low rank next to it, MLP, and streams that are predicted and corrected."""

    def __init__(self, part: Part, weights: Weights, index: int) -> None:
        super().__init__()
        prefix, plan = part.names.layer.format(i=index), part.plan.gemma
        assert plan is not None
        inner = {name: prefix + rest for name, rest in part.names.inner.items()}
        self._kernels, self._stream, self._activation = part.kernels, plan.active, part.plan.activation
        self._size = part.config.hidden_size
        self.norm, self.post_norm, self.mlp_norm, self.post_mlp_norm = (
            part.norm(weights, inner[name]) for name in ("norm", "post norm", "mlp norm", "post mlp norm")
        )
        self.low_norm, self.router_norm, self.input_norm = (
            part.norm(weights, inner[name]) for name in ("low norm", "stream norm", "input norm")
        )
        self.attention = Attention(part, weights, inner, index=index)
        self.mlp = SparseMlp(part, weights, inner, below=plan.sparse[index], width=plan.widths[index])
        self.low_in, self.low_out, self.gate, self.projection, self.router, self.predicts, self.corrects = (
            frozen(weights.pop(f"{inner[name]}.weight"))
            for name in ("low in", "low out", "input gate", "input out", "stream router", "predicts", "corrects")
        )
        factors = weights.pop(inner["stream factors"])
        self.factors = frozen(factors) if plan.corrected else None

    def forward(
        self,
        hidden: Tensor,
        place: CachePosition,
        cache: tuple[Tensor, Tensor],
        rotation: Rotation | None,
        own: Tensor,
        kept: KeysAndValues | None,
    ) -> tuple[Tensor, KeysAndValues]:
        """Run one layer on streams [b, T, S, H], as `Gemma4Layer`."""
        linear, real, count = self._kernels.linear, place.real, hidden.shape[-2]
        mixing = linear(self._routed(hidden[..., self._stream, :], real), self.predicts, real).unflatten(
            -1, (count, -1)
        )
        streams = hidden
        for other in range(count):
            streams = streams + mixing[..., other : other + 1] * hidden[..., other : other + 1, :]
        active = streams[..., self._stream, :]
        x = self.norm(active)
        low = x + self.low_norm(linear(linear(x, self.low_in, real), self.low_out, real))
        q, k, v = self.attention.heads(x, place, rotation)
        if kept is None:
            assert k is not None and v is not None, "the first layer of a cache has keys and values"
            kept = (k, v)
        between = active + self.post_norm(self.attention.attended(q, kept, place, cache=cache))
        between = (between + low) * 2.0**-0.5
        made = between + self.post_mlp_norm(self.mlp(self.mlp_norm(between), real))
        shares = linear(self._routed(made, real), self.corrects, real) + 1.0
        streams = streams + shares.unsqueeze(-1) * (made - active).unsqueeze(-2)
        first = streams[..., self._stream, :]
        first = first if self.factors is None else first * self.factors
        gate = self._kernels.activate(linear(first, self.gate, real), self._activation, gated=False)
        added = self.input_norm(linear(gate * own, self.projection, real))
        return torch.cat((streams[..., :1, :], streams[..., 1:, :] + added.unsqueeze(-2)), -2), kept

    def _routed(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Shares of the streams [b, T, S], between -1 and 1."""
        return torch.tanh(self._kernels.linear(self.router_norm(x) * (1 / self._size), self.router, real))


class SparseMlp(Mlp):
    """An MLP whose gates are 0 but for the largest: those ``below`` deviations above the mean; None: all count."""

    def __init__(
        self, part: Part, weights: Weights, inner: Mapping[str, str], *, below: float | None, width: int
    ) -> None:
        super().__init__(part, weights, inner)
        self._below, self._width = below, width

    def share(self, x: Tensor, real: Tensor | None) -> Tensor:
        if self._below is None:
            return super().share(x, real)
        gate, up = self._kernels.linear(x, self.up, real).chunk(2, -1)
        mean = self._group.reduce(gate.sum(-1, keepdim=True)) / self._width
        padding = self._group.degree * gate.shape[-1] - self._width  # gates of 0, each as far from the mean as that is
        squares = self._group.reduce((gate - mean).pow(2).sum(-1, keepdim=True)) - padding * mean.pow(2)
        gate = (gate - mean - self._below * (squares / self._width).sqrt()).clamp(min=0.0)
        inner = self._kernels.activate(torch.cat((gate, up), -1), self._activation, gated=True)
        return self._kernels.linear(inner, self.down, real)
