"""Matmul of 16-bit matrices with float32 sums as one operator, which graph compilers replace by their own.

PyTorch's own matmuls return the type of their operands, and converting a matrix to float32 first costs a pass over it
in every step. In this operator both operands have the matrix's type, and sums are float32, as in matrix engines. int8
is not supported.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.decoder.parallel.vocab_part import graph_operator

NARROW = frozenset({torch.bfloat16, torch.float16})
"""Types that are multiplied without conversion."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [..., k], rounded to the type of weight [m, k], by weight.T -> [..., m] float32."""
    if weight.dtype not in NARROW:
        return torch.nn.functional.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    product: Tensor = operator()(rows.to(weight.dtype), weight)
    return product.reshape(*x.shape[:-1], -1)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x [..., n, k], rounded to the type of y [..., m, k], by y.T -> [..., n, m] float32."""
    if y.dtype not in NARROW:
        return torch.matmul(x, y.transpose(-2, -1))
    product: Tensor = operator()(x.to(y.dtype), y)
    return product


@lru_cache(maxsize=1)
def operator() -> Any:
    """Return the operator ``paceline_graph::product``."""
    return graph_operator("product", "(Tensor x, Tensor y) -> Tensor", plain=_product, shapes=_shape)


def xla_product(x: Tensor, y: Tensor) -> Tensor:
    """Compute the operator by torch_xla's dot with a given type of sums; x and y are torch_xla tensors, with no batch
    dimensions in common or all but the last two.
    """
    bridge = importlib.import_module("torch_xla")._XLAC
    batch = list(range(x.dim() - 2))
    product: Tensor = bridge._xla_dot_general(
        x, y, (([x.dim() - 1], [y.dim() - 1]), (batch, batch)), preferred_element_type=torch.float32
    )
    return product


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Compute the operator in PyTorch. 16-bit products are exact in float32: only the sums' order may differ."""
    return torch.matmul(x.float(), y.float().transpose(-2, -1))


def _shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[-2]), dtype=torch.float32)
