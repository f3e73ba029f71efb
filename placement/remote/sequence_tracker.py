"""What the requests of a target have said, and how much of it the drafter's process has read.

A commit is only noted when it comes, and becomes part of the texts while the drafter is at work: a round would wait for
it otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.core.types import Commit

Lists = tuple[list[list[int]], list[int], list[int]]


def lists(commit: Commit) -> Lists:
    """Tokens [B][W], counts [B] and starts [B] of a commit."""
    return commit.tokens.tolist(), commit.count.tolist(), commit.first_row.tolist()


class Texts:
    """The texts of a target's slots. ``reach``: the drafter does not follow longer ones; None = it follows all."""

    def __init__(self, reach: int | None) -> None:
        self._reach = reach
        self._texts: dict[int, list[int]] = {}
        self._read: dict[int, int] = {}  # how much of a slot's text the process has read
        self._noted: Commit | None = None  # not yet part of the texts
        self._asked: dict[int, int] = {}  # what it has read when it has answered
        self._answered = self._level = False  # so it has; and all texts are read then

    def admit(self, slot: int, prompt: Sequence[int]) -> None:
        """A request took a slot."""
        self._settle()
        self._texts[slot] = list(prompt)
        self._read.pop(slot, None)

    def told(self, slot: int) -> None:
        """The process reads the text of that slot, as it is now."""
        self._read[slot] = len(self._texts[slot])

    def release(self, slot: int) -> None:
        """A request left; what the process keeps of it is overwritten by the next one in that slot."""
        self._settle()
        self._texts.pop(slot, None)
        self._read.pop(slot, None)

    def forget(self) -> None:
        """The process may have read anything, or be another one."""
        self._settle()
        self._read.clear()

    def note(self, commit: Commit) -> None:
        """The texts go on."""
        if self._noted is not None and self._noted is not commit:
            self._settle()  # the process was not asked behind that one
        self._noted = commit

    def unread(self, commit: Commit, now: Lists) -> list[tuple[int, tuple[int, ...]]]:
        """What the process has to read before it can go on behind a commit: slots and texts. ``now``: it as lists."""
        if self._answered and self._level and self._noted is commit:
            return []
        self._settle(now if self._noted is commit else None)
        starts = now[2]
        behind = [slot for slot in self._live(now) if self._read.get(slot) != starts[slot]]
        return [(slot, tuple(self._texts[slot][: starts[slot]])) for slot in behind]

    def asked(self, now: Lists) -> None:
        """The process is at work behind this commit; there is time to follow the texts."""
        self._settle(now)
        self._asked = {slot: len(self._texts[slot]) for slot in self._live(now)}
        self._level = len(self._asked) == len(self._texts)

    def answered(self) -> None:
        """It has read what it was asked about."""
        self._answered = True

    def _live(self, now: Lists) -> list[int]:
        """The slots whose text ends with this commit, if the drafter can follow it."""
        _, counts, starts = now
        return [
            slot
            for slot, text in self._texts.items()
            if len(text) == starts[slot] + counts[slot] and (self._reach is None or len(text) <= self._reach)
        ]

    def _settle(self, noted: Lists | None = None) -> None:
        """Take in what was noted and answered. ``noted``: the commit as lists, if they are at hand."""
        if self._answered:
            self._read |= self._asked
            self._answered = False
        commit, self._noted = self._noted, None
        if commit is None:
            return
        rows, counts, starts = noted or lists(commit)
        for slot, text in self._texts.items():
            if starts[slot] == len(text):
                text += rows[slot][: counts[slot]]
