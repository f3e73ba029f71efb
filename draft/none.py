"""The drafter that proposes nothing: plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.types import Bounds, Commit, Outline, Proposal, Reads, SamplingBatch


class NoDrafter:
    """Proposes nothing, ever."""

    outline = Outline.chain(0)
    reads: Reads | None = None
    reach: int | None = None

    def admit(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Nothing to read."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    def observe(self, commit: Commit) -> None:
        """Nothing to see."""

    def propose(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Proposal:
        return Proposal(torch.empty(len(commit.tokens), 0, dtype=torch.int32))
