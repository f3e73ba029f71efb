"""Operators that the SDK has custom calls for."""

from __future__ import annotations

import torch
from torch import Tensor


class TopK:
    """Top k of rows only, of a width that is a multiple of 8; the last of equals comes first, so that no caller relies
    on more.
    """

    @staticmethod
    def apply(tensor: Tensor, k: int, dim: int = -1) -> tuple[Tensor, Tensor]:
        if tensor.dim() != 2 or dim not in (1, -1):
            raise RuntimeError("TopK takes rows, and their last dimension")
        if tensor.shape[1] % 8 or not tensor.is_floating_point():
            raise RuntimeError(f"TopK of rows of {tensor.shape[1]} {tensor.dtype}")
        if k > tensor.shape[1] or k > 16384:
            raise RuntimeError(f"EVRF014: TopK of {k}")
        values, places = torch.sort(tensor.flip(1), dim=1, descending=True, stable=True)
        return values[:, :k], tensor.shape[1] - 1 - places[:, :k]


def nki_jit(**_options):
    """Make kernels that neuronx_distributed 0.17 defines at import and our steps do not call."""
    return lambda function: function
