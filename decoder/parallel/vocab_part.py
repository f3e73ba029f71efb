"""The part of a vocabulary for which a rank has logits, and the largest numbers of a row.

Top-k is one operator, which every graph compiler replaces by its own: PyTorch's returns 64-bit indices, and lowers to a
sort, which the Neuron compiler rejects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.decoder.parallel.collectives import Collectives, SingleRank


@dataclass(frozen=True, slots=True)
class VocabPart:
    """The ids for which this rank has logits.

    ids    [n] int32, ascending; if the vocabulary is sharded, those from ``size`` on are padding of the last ranks'
           parts
    size   above every real id
    group  the ranks
    gaps   whether the ids have gaps
    """

    ids: Tensor
    size: int
    group: Collectives
    gaps: bool = False

    @classmethod
    def whole(cls, logits: Tensor) -> VocabPart:
        """Return the part with all ids of logits [b, T, V]."""
        size = logits.shape[-1]
        return cls(torch.arange(size, dtype=torch.int32, device=logits.device), size, SingleRank())

    @property
    def divided(self) -> bool:
        return self.group.degree > 1


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest of every row, descending, and their indices; among equals, the backend's choice.

    x [..., n] float32 -> [..., count] float32, [..., count] int32
    """
    largest: tuple[Tensor, Tensor] = topk_operator()(x, count)
    return largest


@lru_cache(maxsize=1)
def topk_operator() -> Any:
    """Return the operator ``paceline_graph::largest``."""
    return graph_operator("largest", "(Tensor x, int count) -> (Tensor, Tensor)", plain=_topk, shapes=_shapes)


def graph_operator(name: str, schema: str, *, plain: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Define an operator that graph compilers replace by their own; called once for each."""
    library = _library()
    library.define(name + schema)
    library.impl(name, plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"paceline_graph::{name}", shapes, lib=library)
    return getattr(torch.ops.paceline_graph, name).default


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    return torch.library.Library("paceline_graph", "FRAGMENT")


def _topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, places = torch.topk(x, count, dim=-1)
    return values, places.to(torch.int32)


def _shapes(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)
