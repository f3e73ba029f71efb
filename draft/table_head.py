"""`TableHead`: heads that share the target's embedding, output layer and rotations."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core import reduce
from paceline.core.types import SamplingTensors
from paceline.decoder.models.layers import Rotation, frozen
from paceline.decoder.models.rope import rotation_at
from paceline.decoder.parallel.collectives import Collectives, SingleRank
from paceline.decoder.parallel.vocab_parallel import SharedHead, embedded
from paceline.draft.heads import CachedHead


class TableHead(CachedHead):
    """A head with the target's tables: its embedding and its output layer, unless it has its own.

    embedding  [n, H], of a sharded one this rank's rows
    groups     ranks over which embedding and output layer are sharded
    """

    cos: Tensor
    sin: Tensor
    rows: Tensor
    places: Tensor

    def share(
        self,
        shared: SharedHead,
        rotations: tuple[Tensor, Tensor],
        *,
        embedding: Tensor | None = None,
        owns_output: bool = False,
        group: Collectives | None = None,
        drafted: tuple[Tensor, int] | None = None,
    ) -> None:
        """Take the tables; called once, when the head is made.

        rotations  cos and sin of every position
        embedding  the head's own
        group      ranks that share its own tables; None: each has them whole
        drafted    the target's id [U] of every id that can be drafted, and V; None: all can
        """
        own = group or SingleRank()
        self.embedding = shared.embedding if embedding is None else frozen(embedding)
        self.groups = (shared.group if embedding is None else own, own if owns_output else shared.group)
        places = torch.empty(0, dtype=torch.int32)  # of every id in what is drafted, U for ids that cannot be
        if drafted is not None and len(drafted[0]) < drafted[1]:
            places = torch.full(drafted[1:], len(drafted[0]), dtype=torch.int32)
            places[drafted[0].to(torch.int64)] = torch.arange(len(drafted[0]), dtype=torch.int32)
        # only a sharded table needs the ids of its rows
        rows = shared.ids if shared.group.degree > 1 else shared.ids[:0]
        for name, value in zip(("cos", "sin", "rows", "places"), (*rotations, rows, places), strict=True):
            self.register_buffer(name, value)

    @property
    def divided(self) -> bool:
        """Whether some of its work is shared among ranks."""
        return any(group.degree > 1 for group in self.groups)

    def real_rows(self, sampling: SamplingTensors, window: int) -> Tensor | None:
        return None if self.divided else self.seated_rows(sampling, window)  # as in the target's own windows

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [b, n] int32 -> [b, n, H]"""
        return embedded(tokens, self.embedding, self.rows, group=self.groups[0], kernels=self.kernels)

    def rotation(self, positions: Tensor) -> Rotation:
        """Return the rotations of positions [b, n] int32; those past the last count as the last."""
        at = positions.clamp(max=self.cos.shape[0] - 1)
        return rotation_at(at, self.cos, self.sin, kernels=self.kernels)

    def spread(self, scores: Tensor) -> Tensor:
        """Spread scores [b, n, U] over the vocabulary: [b, n, V], `reduce.NEGATIVE` for ids that are not drafted."""
        if not len(self.places):
            return scores.contiguous()
        nothing = torch.full_like(scores[..., :1], reduce.NEGATIVE)
        return torch.cat([scores, nothing], -1).index_select(-1, self.places)
