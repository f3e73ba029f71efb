"""A drafter that proposes known text first: after a fault, what was emitted is verified again before anything new.

The emitted tokens are proposed as drafts, k at a time. The target accepts them all, because it chooses them again (same
seed, same positions, same graph), so its cache becomes bitwise what it was. Then the wrapped drafter takes over.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.core.drafter_statistics import DrafterCounts, DrafterHealth
from paceline.core.protocols import Drafter, finish
from paceline.core.types import PAD, Commit, Proposal, RoundLimits, SamplingTensors


class Replay(Drafter):
    """Wraps a drafter; for requests without emitted tokens it only passes calls on."""

    def __init__(self, inner: Drafter) -> None:
        self._inner, self.draft_shape, self.max_positions = inner, inner.draft_shape, inner.max_positions
        self.reads, self._num_draft_tokens = inner.reads, inner.draft_shape.num_draft_tokens
        self._next_emitted: list[int] = []
        self._texts: dict[int, list[int]] = {}  # slot -> prompt and emitted tokens, until all of them are verified

    @property
    def health(self) -> DrafterHealth | None:
        """That of the wrapped drafter, if it reports any."""
        return self._inner.health

    @property
    def choice_counts(self) -> Mapping[str, DrafterCounts]:
        """Those of the wrapped drafter, if it chooses."""
        return self._inner.choice_counts

    def expect(self, emitted: Sequence[int]) -> None:
        """The next request to be added has emitted these tokens already."""
        self._next_emitted = list(emitted)

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        finish(self.read_request(slot, prompt, features))

    def read_request(
        self, slot: int, prompt: Sequence[int], features: Tensor | None = None
    ) -> Generator[None, None, None]:
        self._texts.pop(slot, None)
        if self._next_emitted:
            self._texts[slot], self._next_emitted = [*prompt, *self._next_emitted], []
        yield from self._inner.read_request(slot, prompt, features)

    def finish_request(self, slot: int) -> None:
        self._texts.pop(slot, None)
        self._inner.finish_request(slot)

    def update(self, commit: Commit) -> None:
        self._inner.update(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        """Known tokens for the slots that have any left, the wrapped drafter's proposals for the others."""
        if not self._texts:
            return self._inner.propose(commit, sampling, limits)
        starts, ends = commit.first_row.tolist(), (commit.first_row + commit.count).tolist()
        self._texts = {slot: text for slot, text in self._texts.items() if ends[slot] < len(text)}
        known = {slot: text[ends[slot] : ends[slot] + self._num_draft_tokens] for slot, text in self._texts.items()}
        if all(slot in known for slot, start in enumerate(starts) if start > 0):
            proposal = torch.full((len(starts), self._num_draft_tokens), PAD, dtype=torch.int32)
        else:
            drafted = self._inner.propose(commit, sampling, limits).tokens
            proposal = nn.functional.pad(drafted, (0, self._num_draft_tokens - drafted.shape[1]), value=PAD)
        for slot, row in known.items():
            padding = [PAD] * (self._num_draft_tokens - len(row))
            proposal[slot] = torch.tensor(row + padding, dtype=torch.int32)
        return Proposal(proposal)
