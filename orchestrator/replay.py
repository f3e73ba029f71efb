"""A drafter that knows the beginning: a text that was cut off by a fault is verified again and then goes on.

What was emitted is proposed as drafts, k at a time, and stands, for the target chooses it again (same seed, same
positions, same graph). So the cache becomes what it was, through the graph that made it. After that the drafter behind
is asked as usual.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Bounds, Commit, Proposal, SamplingBatch


class Replay:
    """``emitted``: for every request of the call, in order, the tokens that are known already."""

    def __init__(self, inner: Drafter, emitted: Sequence[Sequence[int]]) -> None:
        self._inner, self.outline, self.reach = inner, inner.outline, inner.reach
        self.reads, self._nodes = inner.reads, inner.outline.nodes
        self._emitted, self._admitted = [list(tokens) for tokens in emitted], 0
        self._known: dict[int, list[int]] = {}  # slot -> prompt and what was emitted
        self._prompts: dict[int, int] = {}

    def admit(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Requests are seated in the order of the call."""
        self._known[slot] = [*prompt, *self._emitted[self._admitted]]
        self._admitted += 1
        self._inner.admit(slot, prompt, features)

    def release(self, slot: int) -> None:
        self._known.pop(slot, None)
        self._inner.release(slot)

    def observe(self, commit: Commit) -> None:
        self._inner.observe(commit)

    def propose(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Proposal:
        """What is known to follow; for the other slots, what the drafter behind says."""
        rows = []
        ends = (commit.start + commit.count).tolist()
        for slot, end in enumerate(ends):
            known = self._known.get(slot, []) if commit.start[slot] > 0 else []
            rows.append(known[end : end + self._nodes])
        if not any(rows):
            return self._inner.propose(commit, sampling, bounds)
        if all(rows[slot] for slot in range(len(rows)) if commit.start[slot] > 0):
            made = torch.full((len(rows), self._nodes), PAD, dtype=torch.int32)
        else:
            made = self._inner.propose(commit, sampling, bounds).tokens.clone()
        for slot, row in enumerate(rows):
            if row:
                made[slot] = torch.tensor(row + [PAD] * (self._nodes - len(row)), dtype=torch.int32)
        return Proposal(made)
