"""Operations between the matmuls of a layer, in plain PyTorch: norms, rotations, activations, rows of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from paceline.decoder.weights.quantize import MatrixLike, PackedMatrix

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu squared": lambda x: nn.functional.relu(x).pow(2),
    "clamped swish": lambda x: nn.functional.silu(x.clamp(max=7.0) * 1.702) / 1.702,
}


def gate_with(both: Tensor, activation: str) -> Tensor:
    """activation(first half) * second half; for "clamped swish" 1 more than that half between -7 and 7."""
    gate, up = both.chunk(2, dim=-1)
    up = up.clamp(-7.0, 7.0) + 1.0 if activation == "clamped swish" else up
    return ACTIVATIONS[activation](gate) * up


def code(name: str) -> int:
    """Return the value of `Activation` in decoder/native/experts.h."""
    return list(ACTIVATIONS).index(name)


NormKind = Literal["rms", "rms plus one", "layer"]
NORMS: tuple[NormKind, ...] = ("rms", "rms plus one", "layer")
"""Norms in the order of their numbers in native kernels (`Norm` in C++)."""


class PlainOperations:
    """Operations of `Kernels` whose speed is not critical for a backend, or that it compiles."""

    def norm(
        self, x: Tensor, weight: Tensor, *, eps: float, bias: Tensor | None = None, kind: NormKind = "rms"
    ) -> Tensor:
        if kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
        x = (weight.float() + 1.0 if kind == "rms plus one" else weight) * x
        return x if bias is None else x + bias

    def rotate(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        count = rotation[0].shape[-1]
        if count == x.shape[-1]:
            return apply_rope(x, *rotation)
        return torch.cat((apply_rope(x[..., :count], *rotation), x[..., count:]), -1)

    def activate(self, x: Tensor, activation: str, *, gated: bool) -> Tensor:
        if not gated:
            return ACTIVATIONS[activation](x)
        return gate_with(x, activation)

    def embed(self, table: MatrixLike, ids: Tensor) -> Tensor:
        return table.gather(ids) if isinstance(table, PackedMatrix) else nn.functional.embedding(ids, table).float()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [..., H, D] by cos and sin [..., 1, D], the tables' rows of each token; keeps x's dtype.

    Computed in float32 and rounded once, at the end. Hugging Face rounds cos and sin to x's dtype and
    multiplies there, so in bf16 the two differ in the last bit; in float32 they agree exactly.
    """
    wide = x.to(torch.float32)
    first, second = wide.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (wide * cos.to(torch.float32) + turned * sin.to(torch.float32)).to(x.dtype)
