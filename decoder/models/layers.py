"""Layers shared by the networks of models and of draft heads: norms, MLPs, biases, and parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.decoder.kernels.plain import NormKind
from paceline.decoder.kernels.protocol import Kernels, MlpWeights
from paceline.decoder.models.blueprint import Blueprint, Names
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.quantize import Stored, joined, matrix

Weights = dict[str, Stored]
"""Tensors of a checkpoint by name, in the decoder's compute dtype, or quantised."""
Rotation = tuple[Tensor, Tensor]
"""cos and sin of the positions of a window, each [b, T, 1, D]."""


def gated_mlp(
    hidden: Tensor, weights: MlpWeights, real: Tensor | None = None, *, kernels: Kernels, group: Collectives
) -> Tensor:
    """hidden [b, T, H] + MLP(norm(hidden)), summed over the ranks of ``group``."""
    if kernels.layers is not None:
        return kernels.layers.mlp(hidden, weights, real)
    both = kernels.linear(kernels.norm(hidden, weights.norm, eps=weights.eps), weights.gate_up, real)
    inner = kernels.activate(biased(both, weights.gate_up_bias), "silu", gated=True)
    return hidden + biased(group.reduce(kernels.linear(inner, weights.down, real)), weights.down_bias)


def biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1.0 else x * factor


def frozen(x: Stored) -> nn.Parameter:
    """A tensor that is never quantised, as a parameter that is not trained; a parameter stays the same."""
    assert isinstance(x, Tensor), "a matrix that may be quantised is wrapped by `matrix`"
    return x if isinstance(x, nn.Parameter) else nn.Parameter(x.contiguous(), requires_grad=False)


def joined_vectors(weights: Weights, names: list[str]) -> nn.Parameter:
    """Several biases as one. Takes them out of ``weights``."""
    return nn.Parameter(torch.cat([frozen(weights.pop(name)) for name in names]), requires_grad=False)


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

    def of_layer(self, index: int) -> Part:
        """The same with the sizes of a layer for all."""
        return replace(self, shard=self.shard.of_layer(index))

    def matrix(self, weights: Weights, name: str) -> Stored:
        """A product's matrix as [out, in], which a quantised one is already. Takes it out of ``weights``."""
        weight = weights.pop(f"{name}.weight")
        return weight.t().contiguous() if self.names.transposed and isinstance(weight, Tensor) else weight

    def norm(self, weights: Weights, name: str) -> Normalise:
        """A norm over the width of the model."""
        weight = self.norm_weight(weights, name, self.config.hidden_size)
        return Normalise(self, weight, bias=weights.pop(f"{name}.bias", None))

    def norm_weight(self, weights: Weights, name: str, width: int) -> Tensor:
        """A norm's weight, ones where the family has none. Takes it out of ``weights``."""
        if not self.plan.norm_weight:
            return torch.ones(width)
        weight = frozen(weights.pop(f"{name}.weight"))
        return weight.float() + 1.0 if self.plan.norm == "layer plus one" else weight

    @property
    def norm_kind(self) -> NormKind:
        """Return the norm that kernels compute; one is added to the weights of "layer plus one" when they load."""
        return "layer" if self.plan.norm == "layer plus one" else self.plan.norm


class Normalise(nn.Module):
    """A norm over the last dimension, in float32."""

    def __init__(self, part: Part, weight: Stored, *, bias: Stored | None = None, eps: float = 0.0) -> None:
        super().__init__()
        self._kernels, self.kind, self.eps = part.kernels, part.norm_kind, eps or part.config.rms_norm_eps
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernels.norm(x, self.weight, eps=self.eps, bias=self.bias, kind=self.kind)


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
        curves = [inner[side] for side in ("alpha p", "alpha n")] if plan.activation == "xielu" else []
        alphas = [nn.functional.softplus(frozen(weights.pop(name)).double()).item() for name in curves]
        self._curves = (alphas[0], _STRAIGHT + alphas[1]) if curves else None

    def with_norm(self, norm: Normalise) -> MlpWeights:
        """For kernels that know the MLP as a whole, which is only what is ``plain``."""
        return MlpWeights(norm.weight, self.up, self.up_bias, self.down, self.down_bias, norm.eps)

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        """x [b, T, H] -> [b, T, H]; rows from ``real`` [b] on may hold anything finite."""
        return biased(self._group.reduce(self.share(x, real)), self.down_bias)

    def share(self, x: Tensor, real: Tensor | None) -> Tensor:
        """Return this rank's part of the sum, without the bias."""
        inner = biased(self._kernels.linear(x, self.up, real), self.up_bias)
        if self._curves is None:
            inner = self._kernels.activate(inner, self._activation, gated=self._gated)
        else:
            inner = xielu(inner, *self._curves)
        return self._kernels.linear(inner, self.down, real)


_STRAIGHT, _LEAST = 0.5, -1e-6
"""The slope of xIELU at 0, and the largest number of which it takes exp(x) - 1."""


def xielu(x: Tensor, above: float, below: float) -> Tensor:
    """xIELU (arXiv 2411.13010): a parabola above 0, an exponential below, and a straight line added to both."""
    curve = torch.where(x > 0, above * x * x, (torch.expm1(x.clamp(max=_LEAST)) - x) * below)
    return curve + _STRAIGHT * x
