"""Where in a source a text stands that repeats it, and which tokens it changes.

A repetition does not end where one token differs: a file that is repeated with a name changed goes on as before, and
the name is changed wherever it comes. Not here: how a repetition is found (`automaton.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

_CHANGED = 8
"""A change leaves this part of what was repeated so far: most repetitions of a few tokens end where a token differs,
most of many go on. By replay of texts of the demo target and of copies with changed names, among 2, 4 and 8.
"""


class CopyTracker:
    """Of one text. ``run``: tokens it has repeated so far, less what changes took away; 0 = it repeats nothing."""

    def __init__(self) -> None:
        self.run = 0
        self._source: Sequence[int] = ()
        self._at = 0
        self._changes: dict[int, int] = {}  # token of a source -> what stands in its place
        self._doubt: tuple[int, int] | None = None  # a change behind which nothing was repeated yet

    def begin(self, source: Sequence[int], at: int, run: int) -> None:
        """The last ``run`` tokens of the text stand in a source too, where what follows them begins at ``at``."""
        self._source, self._at, self.run, self._doubt = source, at, run, None

    def follow(self, tokens: Sequence[int]) -> None:
        """The text goes on. Two tokens in a row that are not the source's end the repetition."""
        for token in tokens:
            if not self.run or self._at >= len(self._source):
                self.run = 0
                return
            known = self._source[self._at]
            self._at += 1
            if known < 0:  # no token: the source ends here, and another one begins
                self.run = 0
                return
            if token not in (known, self._changes.get(known)):
                self.run = 0 if self._doubt else max(1, self.run // _CHANGED)
                self._doubt = (known, token)
                continue
            if token == known:
                self._changes.pop(known, None)  # it is not changed everywhere
            if self._doubt:
                self._changes[self._doubt[0]], self._doubt = self._doubt[1], None
            self.run += 1

    def ahead(self, count: int) -> list[int]:
        """What comes next if the repetition goes on, with the same changes."""
        return [self._changes.get(token, token) for token in self._source[self._at : self._at + count]]
