"""The drafter that proposes nothing: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.core.types import Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors

if TYPE_CHECKING:
    from torch import Tensor


class NoDrafter:
    """Proposes nothing, ever."""

    draft_shape = DraftShape.chain(0)
    reads: FeatureSpec | None = None
    max_positions: int | None = None
    movable = True

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Nothing to read."""

    def finish_request(self, slot: int) -> None:
        """Nothing to forget."""

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Nothing to move."""

    def update(self, commit: Commit) -> None:
        """Nothing to see."""

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        import torch

        return Proposal(torch.empty(len(commit.tokens), 0, dtype=torch.int32))
