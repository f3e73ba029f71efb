"""Tensors made before the message that fills them: while the other side computes, nobody waits for them.

After a pause the first calls into a tensor library find cold caches and take some tenths of a millisecond, which is
most of what a round through another process costs. Numbers go into memory that is there already for a tenth of that.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.types import Commit, RoundLimits


def flat(rows: Sequence[Sequence[int]]) -> list[int]:
    """Rows behind each other."""
    return [number for row in rows for number in row]


class Blank:
    """An int32 tensor of that shape whose numbers are still to come."""

    def __init__(self, *shape: int) -> None:
        self.tensor = torch.empty(shape, dtype=torch.int32)
        self._memory = self.tensor.view(-1).numpy().data

    def fill(self, words: list[int] | memoryview) -> None:
        """Write all numbers, row by row, as they were read from a frame. Once: who has the tensor may keep it."""
        assert isinstance(words, memoryview), "these are still to be written"
        self._memory[:] = words


class BlankRound:
    """A commit [B, W] and its limits [B] whose numbers are still to come."""

    def __init__(self, slots: int, width: int) -> None:
        self.shape = slots, width
        size = slots * width
        self._blank = Blank(slots * (width + 3))
        whole = self._blank.tensor
        count, start, self._limit = whole[size:].view(3, slots).unbind()
        self._commit = Commit(whole[:size].view(slots, width), count, start)

    def fill(self, words: list[int] | memoryview, rows: int) -> tuple[Commit, RoundLimits]:
        """``words``: tokens row by row, counts, starts, limits."""
        self._blank.fill(words)
        return self._commit, RoundLimits(self._limit, rows)
