"""The drafter that proposes nothing: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.core.types import Bounds, Commit, Proposal, SamplingBatch


class NoDrafter:
    """Proposes nothing, ever."""

    nodes = 0
    reach: int | None = None

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        """Nothing to read."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    def observe(self, commit: Commit) -> None:
        """Nothing to see."""

    def propose(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Proposal:
        return Proposal(torch.empty(len(commit.tokens), 0, dtype=torch.int32))
