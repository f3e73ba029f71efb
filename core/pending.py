"""Commits that a drafter has seen and not yet read.

A drafter with a cache reads the last commit when it proposes. While nothing is asked of it, commits gather here; when
it is asked again, they are read first, so that its cache has no gap.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.types import Commit


@dataclass(frozen=True, slots=True)
class MissedTokens:
    """What one slot committed while nothing was proposed.

    first_row  cache row of the first token
    tokens     in order
    features   [n, F], the states that predicted them, or None if commits carry none
    """

    slot: int
    first_row: int
    tokens: list[int]
    features: Tensor | None


class PendingCommits:
    """``commits``, in order, and with each the slots whose requests have finished since."""

    def __init__(self) -> None:
        self.commits: list[tuple[Commit, set[int]]] = []

    def __len__(self) -> int:
        """How many commits are kept."""
        return len(self.commits)

    def add(self, commit: Commit) -> None:
        """Keep the newest commit."""
        self.commits.append((commit, set()))

    def drop_newest(self) -> None:
        """The newest commit, if there is one, is read elsewhere."""
        del self.commits[-1:]

    def forget(self, slot: int) -> None:
        """The request in this slot is finished: its commits are of no use to the next one."""
        for commit, finished in self.commits:
            finished.update([slot], () if finished else _idle(commit))
        self.commits = [(commit, slots) for commit, slots in self.commits if len(slots) < len(commit.count)]

    def take(self) -> list[MissedTokens]:
        """Take all commits, joined for each slot. Afterwards nothing is pending."""
        missed, self.commits = self.commits, []
        slots: dict[int, tuple[int, list[int], list[Tensor]]] = {}
        for commit, finished in missed:
            rows, counts, first_rows = commit.tokens.tolist(), commit.count.tolist(), commit.first_row.tolist()
            states = commit.states
            for slot, first_row in enumerate(first_rows):
                if first_row and slot not in finished:  # see `_idle`
                    _, tokens, features = slots.setdefault(slot, (first_row, [], []))
                    tokens.extend(rows[slot][: counts[slot]])
                    if states is not None:
                        features.append(states[slot, : counts[slot]])
        return [
            MissedTokens(slot, first_row, tokens, torch.cat(features) if features else None)
            for slot, (first_row, tokens, features) in slots.items()
        ]


def _idle(commit: Commit) -> list[int]:
    """Slots that held no request: their commits start at row 0, no request's do."""
    return [slot for slot, start in enumerate(commit.first_row.tolist()) if start == 0]
