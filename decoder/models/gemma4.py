"""Gemma 4's network: layers that read the keys and values of others, and have inputs of their own for each token."""

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
        if plan.inputs:
            self.table = matrix(weights.pop(f"{outer['inputs']}.weight"))
            self.projection = matrix(weights.pop(f"{outer['input projection']}.weight"))
            self.input_norm = Normalise(part, weights.pop(f"{outer['input norm']}.weight"))

    def layer(self, part: Part, weights: Weights, index: int) -> nn.Module:
        """Return a layer, which reads its input of the tokens, too."""
        return Gemma4Layer(part, weights, index)

    def forward(
        self,
        tokens: Tensor,
        place: CachePosition,
        caches: list[tuple[Tensor, Tensor]],
        *,
        reads: FeatureSpec | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute what `DecoderModel` does; ``caches`` are those of the layers that have one."""
        at = place.positions(tokens.shape[1]).clamp(max=self._last)
        hidden = self._entered(embedded(tokens, self.embedding, self.ids, group=self._group, kernels=self._kernels), at)
        streams, inputs = [hidden], self._inputs_of(tokens, hidden, place)
        kept: dict[int, KeysAndValues] = {}
        own = dict(zip(self._cached, caches, strict=False))
        depth = len(self.layers) if len(own) == len(self._cached) else len(own)
        for index, rotation in enumerate(self._rotations(at)[:depth]):
            layer, source = self.layers[index], self._sources[index]
            hidden, kept[source] = layer(hidden, place, own[source], rotation, inputs[index], kept.get(source))
            streams.append(hidden)
        hidden = self.norm(hidden)
        if reads is None:
            return hidden, None
        return hidden, torch.cat([streams[i] for i in reads.layers], -1) if reads.layers else hidden

    def _inputs_of(self, tokens: Tensor, hidden: Tensor, place: CachePosition) -> list[Tensor | None]:
        """Embeddings of tokens for each layer [b, T, n], of a table and of the embeddings [b, T, H] that all read."""
        if not self._inputs:
            return [None] * len(self.layers)
        known = embedded(tokens, self.table, self.ids, group=self._group, kernels=self._kernels) * self._inputs**0.5
        made = self._kernels.linear(hidden, self.projection, place.real) * self._hidden**-0.5
        made = self.input_norm(made.unflatten(-1, (-1, self._inputs)))
        every = (made + known.unflatten(-1, (-1, self._inputs))) * 2.0**-0.5
        return [one.squeeze(-2) for one in every.split(1, -2)]


class Gemma4Layer(nn.Module):
    """Attention and MLP with norms around them, experts beside the MLP, the layer's own input, and a factor."""

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
    """Experts that read what the MLP's norm reads, by a router with a norm of its own."""

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
        """hidden and the MLP's output [b, T, H] -> the sum of that and of the experts' output, each behind a norm."""
        shares = self.mixture.shares(self._kernels.norm(hidden, self.scale, eps=self._eps), real)
        mixed = self.mixture.mixed(self.before(hidden), shares * self.weighting, real)
        summed: Tensor = self.mlp_after(mlp) + self.after(mixed)
        return summed
