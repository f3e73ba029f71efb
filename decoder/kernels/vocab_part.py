"""The part of a vocabulary that a rank has logits of: maxima, sums and the largest numbers over all ranks' parts.

Between ranks go the best of a row, never a row. Not here: what is chosen of them
(`paceline.decoder.kernels.graph_sampling`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import reduce
from paceline.decoder.kernels.graph_topk import topk
from paceline.decoder.parallel.collectives import Collectives, SingleRank

NOWHERE = 2 * reduce.NEGATIVE
"""A score below everything that is cut."""


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

    def real(self, logits: Tensor) -> Tensor:
        """Logits [b, T, n] in which the ids that fill up are never chosen."""
        filled_up = self.divided and (self.gaps or len(self.ids) * self.group.degree > self.size)
        return torch.where(self.ids < self.size, logits, NOWHERE) if filled_up else logits

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks of numbers [b, T, 1]."""
        return self.group.reduce(x) if self.divided else x

    def largest(self, x: Tensor) -> Tensor:
        """The largest number of a row [b, T, n] on any rank. -> [b, T, 1]"""
        high = x.amax(-1, keepdim=True)
        return self.group.gather(high).amax(0) if self.divided else high

    def best(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The ``count`` largest numbers of this rank's part of a row [b, T, n], falling, and their ids.

        -> [b, T, count] float32 and int32, or as many as there are
        """
        values, places = topk(x, min(count, x.shape[-1]))
        if self.gaps:
            return values, self.ids.index_select(0, places.flatten()).reshape(places.shape)
        return values, places + self.ids[0] if self.divided else places

    def falling(self, values: Tensor, count: int) -> Tensor:
        """The ``count`` largest of all ranks' numbers, of which this one has [b, T, K], falling.

        -> [b, T, count], or as many as there are; of a vocabulary that is not divided, ``values`` as they are
        """
        return self.largest_of_all(values, count) if self.divided else values

    def largest_of_all(self, values: Tensor, count: int) -> Tensor:
        """As `falling`, of numbers in any order."""
        every = self._joined(values)
        return topk(every, min(count, every.shape[-1]))[0]

    def merged(self, keys: Tensor, values: Tensor, ids: Tensor, *, count: int) -> tuple[Tensor, Tensor]:
        """The first ``count`` of all ranks' values and ids by the largest keys, where each rank has the first of its
        own. [b, T, K] each -> [b, T, count] twice
        """
        if not self.divided:
            return values, ids
        places = topk(self._joined(keys), count)[1].to(torch.int64)
        gathered = self._joined(ids.to(torch.float32)).gather(-1, places)  # float32 is exact for ids
        return self._joined(values).gather(-1, places), gathered.to(torch.int32)

    def _joined(self, x: Tensor) -> Tensor:
        """x [b, T, K] of every rank, one behind the other."""
        return self.group.gather(x).movedim(0, -2).flatten(-2) if self.divided else x
