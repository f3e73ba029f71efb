"""Products of 16-bit matrices with float32 sums as one operator, which compilers of graphs replace by what they have.

PyTorch's own products give sums in the type of what is multiplied, and widening a matrix first costs a pass over it in
every step. Here both sides have the matrix's type, and sums are float32, as matrix engines make them. Not here: int8.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.decoder.parallel.vocab_part import graph_operator

NARROW = frozenset({torch.bfloat16, torch.float16})
"""Types that are multiplied as they are."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., k] rounded to the type of weight [m, k] -> [..., m] float32."""
    if weight.dtype not in NARROW:
        return torch.nn.functional.linear(x, weight)
    rows = x.reshape(-1, x.shape[-1])
    product: Tensor = operator()(rows.to(weight.dtype), weight)
    return product.reshape(*x.shape[:-1], -1)


def matmul(x: Tensor, y: Tensor) -> Tensor:
    """x [..., n, k] rounded to the type of y [..., m, k] -> [..., n, m] float32: each row of x times each row of y."""
    if y.dtype not in NARROW:
        return torch.matmul(x, y.transpose(-2, -1))
    product: Tensor = operator()(x.to(y.dtype), y)
    return product


@lru_cache(maxsize=1)
def operator() -> Any:
    """The operator ``paceline_graph::product``."""
    return graph_operator("product", "(Tensor x, Tensor y) -> Tensor", plain=_product, shapes=_shape)


def xla_product(x: Tensor, y: Tensor) -> Tensor:
    """The operator as torch_xla's dot with a type of its sums; x and y are its tensors, with no dimension in common or
    all but the last two.
    """
    bridge = importlib.import_module("torch_xla")._XLAC
    batch = list(range(x.dim() - 2))
    product: Tensor = bridge._xla_dot_general(
        x, y, (([x.dim() - 1], [y.dim() - 1]), (batch, batch)), preferred_element_type=torch.float32
    )
    return product


def _product(x: Tensor, y: Tensor) -> Tensor:
    """Products of two 16-bit numbers are exact in float32, so that only the order of the sums is open."""
    return torch.matmul(x.float(), y.float().transpose(-2, -1))


def _shape(x: Tensor, y: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[-2]), dtype=torch.float32)
