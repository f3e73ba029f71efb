"""Layers shared by the networks of models and of draft heads: a gated MLP, biases, and parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.decoder.kernels.protocol import Kernels, MlpWeights
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.weights.quantize import Stored

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
    """x + bias, if there is one."""
    return x if bias is None else x + bias


def scaled(x: Tensor, factor: float) -> Tensor:
    """x * factor, unless that is 1."""
    return x if factor == 1.0 else x * factor


def frozen(x: Stored) -> nn.Parameter:
    """A tensor that is never quantised, as a parameter that is not trained. For matrices: `matrix`."""
    assert isinstance(x, Tensor), "a matrix that may be quantised is wrapped by `matrix`"
    return nn.Parameter(x.contiguous(), requires_grad=False)


def joined_vectors(weights: Weights, names: list[str]) -> nn.Parameter:
    """Several biases as one. Takes them out of ``weights``."""
    return nn.Parameter(torch.cat([frozen(weights.pop(name)) for name in names]), requires_grad=False)
