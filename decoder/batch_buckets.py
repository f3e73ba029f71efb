"""Rounds over the first slots alone: what a graph of fewer lines than there are slots is given, and what it gives.

Requests take the lowest free slots, so that those in use come first. A graph for R of them works on the first R slots
of the one cache. Not here: which graph a round takes (`CompiledDecoder.lines_for`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.types import PAD


def first_slots(x: Tensor, lines: int) -> Tensor:
    """The first lines of x [B, ...]; 0: all. What is whole already stays as it is, in a graph too."""
    return x[:lines] if 0 < lines < len(x) else x


def for_all_slots(x: Tensor, slots: int, fill: Sequence[int] | Sequence[Sequence[int]] | int = 0) -> Tensor:
    """x [R, ...] with a line for every slot: those behind are ``fill``, a number or a whole line. -> [slots, ...]"""
    missing = slots - len(x)
    if not missing:
        return x
    return torch.cat((x, x.new_tensor(fill).expand(missing, *x.shape[1:])))


def idle_tokens(width: int) -> list[int]:
    """A commit's line of a slot without a request."""
    return [0, *[PAD] * (width - 1)]
