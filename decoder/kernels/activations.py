"""The activations of MLPs and experts by name. Their order is their number in native kernels (`Activation` there)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "relu": nn.functional.relu,
}


def code(name: str) -> int:
    """As `Activation` of decoder/native/experts.h."""
    return list(ACTIVATIONS).index(name)
