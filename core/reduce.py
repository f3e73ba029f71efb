"""Reductions with one tie rule (the lowest id wins) in operations that every backend has.

No sort, no variadic reduce, no integer products: see `docs/architecture.md`, section "Graphs". An id that passes
through float32 stays exact below 2**24, which no vocabulary reaches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

NEGATIVE = -1.0e30
"""Substitute for minus infinity in masked scores: finite, so that no device turns it into NaN."""


def argmax(scores: Tensor) -> Tensor:
    """Return the index of the largest score, the lowest one of equals. [..., V] -> [...] int32."""
    size = scores.shape[-1]
    ids = torch.arange(size, dtype=torch.float32, device=scores.device)
    return clamp_ids(max_with_index(scores, ids, size)[1], size)


def clamp_ids(ids: Tensor, size: int) -> Tensor:
    """Convert float32 ids to int32: a row of NaN has no largest score, and gets some id of the vocabulary. -> int32"""
    return ids.clamp(max=size - 1).to(torch.int32)


def max_with_index(scores: Tensor, ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the largest score of every row and the lowest id that has it, or ``size``, above every id, if none has it.

    scores [..., n] float32, ids [..., n] float32, the number of each score -> [...], [...] float32
    """
    high = scores.amax(dim=-1, keepdim=True)
    return high.squeeze(-1), torch.where(scores == high, ids, float(size)).amin(dim=-1)


def top(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest values, descending, and their ids; the lowest id first among equals.

    values [..., V] float32 -> [..., count] float32, [..., count] int32
    """
    left, largest, ids = values, [], []
    places = torch.arange(values.shape[-1], dtype=torch.int32, device=values.device)
    for _ in range(count):
        highest = argmax(left).unsqueeze(-1)
        largest.append(values.gather(-1, highest.to(torch.int64)))
        ids.append(highest)
        left = torch.where(places == highest, 2 * NEGATIVE, left)
    return torch.cat(largest, -1), torch.cat(ids, -1)


def topk_mask(scores: Tensor, keep: Tensor) -> Tensor:
    """Mask of the ``keep`` largest scores of every row, and of all that equal the smallest of these.

    scores [..., V] float32, keep [...] float32 (a count, at least 1) -> [..., V] bool
    """
    ordered = _ordered(scores)
    target = keep.unsqueeze(-1)
    return ordered >= _search(ordered, lambda above: above.to(torch.float32).sum(-1, keepdim=True) >= target)


def topp_mask(weights: Tensor, mass: Tensor) -> Tensor:
    """Mask of the largest weights whose sum reaches ``mass``, and of all that equal the smallest of these.

    weights [..., V] float32, not negative; mass [...] float32 -> [..., V] bool, never empty
    """
    ordered = _ordered(weights)
    target = mass.unsqueeze(-1)
    zero = torch.zeros((), dtype=weights.dtype, device=weights.device)
    return ordered >= _search(ordered, lambda above: torch.where(above, weights, zero).sum(-1, keepdim=True) >= target)


def first_of_largest(values: Tensor, border: Tensor, count: int) -> Tensor:
    """Mask of exactly ``count`` of the largest values, the first of equals.

    values [..., n] float32, border [..., 1] the smallest of the ``count`` largest -> [..., n] bool
    """
    over, tied = values > border, values == border
    before = over.to(torch.float32).sum(-1, keepdim=True)
    return over | (tied & (before + tied.to(torch.float32).cumsum(-1) <= float(count)))


def _ordered(x: Tensor) -> Tensor:
    """Map float32 to int32 values that compare in the same order."""
    word = (x + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which must be its equal
    return torch.where(word < 0, word ^ 0x7FFFFFFF, word)


def _search(ordered: Tensor, enough: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the largest integer edge for which ``enough(ordered >= edge)`` holds, bit by bit. [..., 1] int32."""
    edge = torch.full_like(ordered[..., :1], -(1 << 31))
    half = torch.zeros_like(edge)
    edge = torch.where(enough(ordered >= half), half, edge)
    for bit in range(30, -1, -1):
        trial = edge + (1 << bit)
        edge = torch.where(enough(ordered >= trial), trial, edge)
    return edge
