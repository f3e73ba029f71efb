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

    first_row     cache row of the first token
    tokens    in order
    features  [n, F], the states that predicted them, or None if commits carry none
    """

    slot: int
    first_row: int
    tokens: list[int]
    features: Tensor | None


class PendingCommits:
    """Commits in order, and which slots have changed hands since."""

    def __init__(self) -> None:
        self._commits: list[tuple[Commit, set[int]]] = []

    def __len__(self) -> int:
        """Commits that are kept."""
        return len(self._commits)

    def add(self, commit: Commit) -> None:
        """The newest commit."""
        self._commits.append((commit, set()))

    def forget(self, slot: int) -> None:
        """The request in this slot is done: what was committed there does not concern the next one."""
        for commit, gone in self._commits:
            gone.update([slot], () if gone else _idle(commit))
        self._commits = [(commit, gone) for commit, gone in self._commits if len(gone) < len(commit.count)]

    def take(self) -> list[MissedTokens]:
        """All but the newest commit, no slot twice. Afterwards the backlog is empty."""
        missed, self._commits = self._commits[:-1], []
        if not missed:
            return []
        found: dict[int, tuple[int, list[int], list[Tensor]]] = {}
        for commit, gone in missed:
            rows, counts, starts = commit.tokens.tolist(), commit.count.tolist(), commit.first_row.tolist()
            states = commit.states
            for slot, start in enumerate(starts):
                if start and slot not in gone:  # see `_idle`
                    _, tokens, features = found.setdefault(slot, (start, [], []))
                    tokens.extend(rows[slot][: counts[slot]])
                    if states is not None:
                        features.append(states[slot, : counts[slot]])
        return [
            MissedTokens(slot, start, tokens, torch.cat(features) if features else None)
            for slot, (start, tokens, features) in found.items()
        ]


def _idle(commit: Commit) -> list[int]:
    """Slots that held no request: their commits start at row 0, no request's do."""
    return [slot for slot, start in enumerate(commit.first_row.tolist()) if start == 0]
