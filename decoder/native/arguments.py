"""Tensors and matrices as arguments of the native library."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from paceline.decoder.weights.quantize import MatrixLike, PackedMatrix

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The codes of types: `Format` in vectors.h."""


def stored(weight: MatrixLike) -> tuple[Tensor, Tensor | None, int]:
    """The numbers of a matrix, the scales of its rows if it has any, and the code of its format."""
    if isinstance(weight, PackedMatrix):
        return weight.data, weight.scales, weight.format.code
    return weight, None, DTYPES[weight.dtype]


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """To the first number; null for no tensor."""
    assert x is None or x.is_contiguous()
    return ctypes.c_void_p(None if x is None else x.data_ptr())
