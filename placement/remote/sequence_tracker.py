"""What the drafter's process has read: the only place where that is known, on either side of the socket.

The target keeps the sequence of every slot here, and how much of it the process has read, so that each request carries
exactly what is missing. The process itself keeps no record: it reads what a message holds.

A commit is only recorded when it comes, and appended to the sequences while the process drafts: a round would wait for
it otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from paceline.core.types import PAD, Commit

_ALL = 1 << 20


class CommitRows(NamedTuple):
    """A commit as lists: tokens [B][W], counts [B] and first rows [B]."""

    tokens: list[list[int]]
    counts: list[int]
    first_rows: list[int]

    @classmethod
    def of(cls, commit: Commit) -> CommitRows:
        """The lists of a commit."""
        return cls(commit.tokens.tolist(), commit.count.tolist(), commit.first_row.tolist())

    def without(self, slots: Collection[int]) -> CommitRows:
        """The same with these slots as if they were idle."""
        if not slots:
            return self
        tokens, counts, first_rows = list(self.tokens), list(self.counts), list(self.first_rows)
        for slot in slots:
            tokens[slot] = [0, *[PAD] * (len(tokens[slot]) - 1)]
            counts[slot], first_rows[slot] = 1, 0
        return CommitRows(tokens, counts, first_rows)


class _Budget:
    """How many sequences one request carries.

    most      fewer after late replies, so that a reply is in time again
    taken     of the last request
    left_out  slots that were left for later ones
    """

    def __init__(self) -> None:
        self.most, self.taken, self.left_out = _ALL, 0, frozenset[int]()

    def take(self, slots: list[int]) -> list[int]:
        """Those of the slots that the next request is for."""
        taken, later = slots[: self.most], slots[self.most :]
        self.taken, self.left_out = len(taken), frozenset(later)
        return taken


class SequenceTracker:
    """The sequences of a target's slots and what the drafter's process has read of them.

    max_positions   the drafter does not follow longer sequences; None = it follows all
    sampling_known  the process knows how the requests of now sample
    prompt_pending  a prompt was sent that it may still be reading
    """

    def __init__(self, max_positions: int | None) -> None:
        self._max_positions = max_positions
        self._sequences: dict[int, list[int]] = {}
        self._read: dict[int, int] = {}  # slot -> tokens the process has read
        self._recorded: Commit | None = None  # not yet part of the sequences
        self._in_flight: dict[int, int] = {}  # slot -> tokens it has read once it has replied
        self._acked = False  # it has replied
        self._all_in_flight = False  # every sequence was part of that request
        self._budget = _Budget()
        self.sampling_known = self.prompt_pending = False

    @property
    def left_out(self) -> frozenset[int]:
        """Slots whose sequence it lacks, and which `missing` left for later requests."""
        return self._budget.left_out

    def add_request(self, slot: int, prompt: Sequence[int]) -> None:
        """A request took a slot."""
        self._settle()
        self._sequences[slot] = list(prompt)
        self._read.pop(slot, None)
        self._in_flight.pop(slot, None)
        self.sampling_known = False

    def mark_read(self, slot: int) -> None:
        """The process was sent the sequence of that slot, as it is now."""
        self._read[slot] = len(self._sequences[slot])
        self.prompt_pending = True

    def finish_request(self, slot: int) -> None:
        """A request left; what the process keeps of it is overwritten by the next one in that slot."""
        self._settle()
        self._sequences.pop(slot, None)
        self._read.pop(slot, None)
        self._in_flight.pop(slot, None)
        self.sampling_known = False

    def reset(self) -> None:
        """The process may have read anything, or it is another one."""
        self._settle()
        self._read.clear()
        self._in_flight = {}
        self.sampling_known = False

    def overdue(self) -> None:
        """The reply to the last request did not come in time. The next one carries fewer sequences: if all were sent
        again each time, a process that cannot read them within one deadline would never catch up.
        """
        self._budget.most = max(1, min(self._budget.most, self._budget.taken) // 2)

    def acked_late(self) -> None:
        """The overdue reply is there: what it was asked about is read, though the sequences have gone on since."""
        self._settle()
        self._read |= self._in_flight
        self._in_flight = {}

    def record(self, commit: Commit) -> None:
        """The sequences go on with this commit."""
        if self._recorded is not None and self._recorded is not commit:
            self._settle()  # nothing was asked after that one
        self._recorded = commit

    def missing(self, commit: Commit, rows: CommitRows) -> list[tuple[int, tuple[int, ...]]]:
        """What the process has to read before it can continue after a commit: (slot, sequence). ``rows``: the commit
        as lists. Where that is too much for one request, the shortest come first, and ``left_out`` has the others.
        """
        if self._acked and self._all_in_flight and self._recorded is commit:
            self._budget.take([])
            return []
        self._settle(rows if self._recorded is commit else None)
        first_rows = rows.first_rows
        behind = [slot for slot in self._followed(rows) if self._read.get(slot) != first_rows[slot]]
        behind.sort(key=lambda slot: first_rows[slot])
        taken = self._budget.take(behind)
        return [(slot, tuple(self._sequences[slot][: first_rows[slot]])) for slot in taken]

    def sent(self, rows: CommitRows) -> None:
        """The process was asked to continue after this commit; while it does, the sequences are brought up to date."""
        self._settle(rows)
        self._in_flight = {slot: len(self._sequences[slot]) for slot in self._followed(rows)}
        self._all_in_flight = len(self._in_flight) == len(self._sequences)
        self.sampling_known, self.prompt_pending = True, False

    def acked(self) -> None:
        """It has replied, and so has read what it was asked about."""
        self._acked = True
        if not self.left_out:
            self._budget.most = _ALL

    def _followed(self, rows: CommitRows) -> list[int]:
        """The slots whose sequence ends with this commit, if the drafter can follow it."""
        return [
            slot
            for slot, sequence in self._sequences.items()
            if len(sequence) == rows.first_rows[slot] + rows.counts[slot]
            and (self._max_positions is None or len(sequence) <= self._max_positions)
        ]

    def _settle(self, recorded: CommitRows | None = None) -> None:
        """Take in what was recorded and acknowledged. ``recorded``: the commit as lists, where they exist."""
        if self._acked:
            self._read |= self._in_flight
            self._acked = False
        commit, self._recorded = self._recorded, None
        if commit is None:
            return
        rows = recorded or CommitRows.of(commit)
        for slot, sequence in self._sequences.items():
            if rows.first_rows[slot] == len(sequence):
                sequence += rows.tokens[slot][: rows.counts[slot]]
