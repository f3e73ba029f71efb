"""A drafter that knows the beginning: a text that was cut off by a fault is verified again and then goes on.

What was emitted is proposed as drafts, k at a time, and stands, for the target chooses it again (same seed, same
positions, same graph). So the cache becomes what it was, through the graph that made it. After that the drafter behind
is asked as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from paceline.core.drafter_health import DrafterHealth
from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Commit, Proposal, RoundLimits, SamplingTensors
from paceline.outputs import ReportsHealth


class Replay:
    """In front of another drafter; without emitted tokens it only passes on."""

    def __init__(self, inner: Drafter) -> None:
        self._inner, self.draft_shape, self.max_positions = inner, inner.draft_shape, inner.max_positions
        self.reads, self._nodes = inner.reads, inner.draft_shape.num_draft_tokens
        self._coming: list[int] = []
        self._known: dict[int, list[int]] = {}  # slot -> prompt and what was emitted, until all of it is verified

    @property
    def health(self) -> DrafterHealth | None:
        """Of the drafter behind, if that has any."""
        return self._inner.health if isinstance(self._inner, ReportsHealth) else None

    def expect(self, emitted: Sequence[int]) -> None:
        """The request that takes a slot next has these tokens already."""
        self._coming = list(emitted)

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        self._known.pop(slot, None)
        if self._coming:
            self._known[slot], self._coming = [*prompt, *self._coming], []
        self._inner.add_request(slot, prompt, features)

    def finish_request(self, slot: int) -> None:
        self._known.pop(slot, None)
        self._inner.finish_request(slot)

    def update(self, commit: Commit) -> None:
        self._inner.update(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        """What is known to follow; for the other slots, what the drafter behind says."""
        if not self._known:
            return self._inner.propose(commit, sampling, bounds)
        starts, ends = commit.first_row.tolist(), (commit.first_row + commit.count).tolist()
        self._known = {slot: text for slot, text in self._known.items() if ends[slot] < len(text)}
        rows = {slot: text[ends[slot] : ends[slot] + self._nodes] for slot, text in self._known.items()}
        if all(slot in rows for slot, start in enumerate(starts) if start > 0):
            made = torch.full((len(starts), self._nodes), PAD, dtype=torch.int32)
        else:
            said = self._inner.propose(commit, sampling, bounds).tokens
            made = nn.functional.pad(said, (0, self._nodes - said.shape[1]), value=PAD)
        for slot, row in rows.items():
            made[slot] = torch.tensor(row + [PAD] * (self._nodes - len(row)), dtype=torch.int32)
        return Proposal(made)
