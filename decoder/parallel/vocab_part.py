"""The part of a vocabulary whose logits a rank has, and the largest numbers of a row.

Top-k is one operator here, which every compiler of graphs replaces by what it has: PyTorch's own gives 64-bit places,
and lowers to a sort, which the Neuron compiler refuses.
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
    """The ids whose logits this rank has.

    ids    [n] int32, ascending; if the vocabulary is divided, those from ``size`` on fill up the last ranks' parts
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
        """All ids of logits [b, T, V]."""
        size = logits.shape[-1]
        return cls(torch.arange(size, dtype=torch.int32, device=logits.device), size, SingleRank())

    @property
    def divided(self) -> bool:
        return self.group.degree > 1


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of every row, falling, and their places; of equals, whichever the backend takes.

    x [..., n] float32 -> [..., count] float32, [..., count] int32
    """
    largest: tuple[Tensor, Tensor] = topk_operator()(x, count)
    return largest


@lru_cache(maxsize=1)
def topk_operator() -> Any:
    """The operator ``paceline_graph::largest``."""
    return graph_operator("largest", "(Tensor x, int count) -> (Tensor, Tensor)", plain=_topk, shapes=_shapes)


def graph_operator(name: str, schema: str, *, plain: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    """Define an operator that compilers of graphs replace by what they have; to be called once for each."""
    library = _library()
    library.define(name + schema)
    library.impl(name, plain, "CompositeExplicitAutograd")
    torch.library.register_fake(f"paceline_graph::{name}", shapes, lib=library)
    return getattr(torch.ops.paceline_graph, name).default


@lru_cache(maxsize=1)
def _library() -> torch.library.Library:
    """Kept for the life of the process: the operators go with it."""
    return torch.library.Library("paceline_graph", "FRAGMENT")


def _topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, places = torch.topk(x, count, dim=-1)
    return values, places.to(torch.int32)


def _shapes(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int32)
