"""The largest numbers of a row as one operator, which every compiler of graphs replaces by what it has.

PyTorch's own top-k gives 64-bit places, and lowers to a sort, which the Neuron compiler refuses.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of every row, falling, and their places; of equals, whichever the backend takes.

    x [..., n] float32 -> [..., count] float32, [..., count] int32
    """
    largest: tuple[Tensor, Tensor] = operator()(x, count)
    return largest


@lru_cache(maxsize=1)
def operator() -> Any:
    """The operator ``paceline_graph::largest``, defined once per process."""
    library = _library()
    assert library is not None
    return torch.ops.paceline_graph.largest.default


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    """Kept for the life of the process: the operators go with it."""
    library = torch.library.Library("paceline_graph", "FRAGMENT")
    library.define("largest(Tensor x, int count) -> (Tensor, Tensor)")
    library.impl("largest", _topk, "CompositeExplicitAutograd")
    torch.library.register_fake("paceline_graph::largest", _shapes, lib=library)
    return library


def _topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, places = torch.topk(x, count, dim=-1)
    return values, places.to(torch.int32)


def _shapes(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)
