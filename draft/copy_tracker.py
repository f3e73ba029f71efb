"""Follow a text along the source that it repeats, over the tokens that it changes.

A repetition does not end where one token differs: a file that is repeated with a name changed goes on as before, and
the name is changed wherever it comes. Not here: how a repetition is found (`suffix_index.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

_CHANGE_FACTOR = 8
"""A change divides the length of the repetition by this: most repetitions of a few tokens end where a token differs,
most of many go on. Chosen among 2, 4 and 8 by replaying texts of the demo target and copies with changed names.
"""


class CopyTracker:
    """Of one text. ``run``: tokens it has repeated so far, less what changes took away; 0 = it repeats nothing."""

    def __init__(self) -> None:
        self.run = 0
        self._source: Sequence[int] = ()
        self._next = 0  # index in the source of the token that should come next
        self._changes: dict[int, int] = {}  # token of the source -> the token that replaces it
        self._unconfirmed: tuple[int, int] | None = None  # a change after which nothing was repeated yet

    def begin(self, source: Sequence[int], start: int, run: int) -> None:
        """The last ``run`` tokens of the text occur in a source, where their continuation begins at ``start``."""
        self._source, self._next, self.run, self._unconfirmed = source, start, run, None

    def follow(self, tokens: Sequence[int]) -> None:
        """The text was extended. Two tokens in a row that are not the source's end the repetition."""
        for token in tokens:
            if not self.run or self._next >= len(self._source):
                self.run = 0
                return
            expected = self._source[self._next]
            self._next += 1
            if expected < 0:  # no token: the source ends here, and another one begins
                self.run = 0
                return
            if token not in (expected, self._changes.get(expected)):
                self.run = 0 if self._unconfirmed else max(1, self.run // _CHANGE_FACTOR)
                self._unconfirmed = (expected, token)
                continue
            if token == expected:
                self._changes.pop(expected, None)  # it is not changed everywhere
            if self._unconfirmed:
                self._changes[self._unconfirmed[0]], self._unconfirmed = self._unconfirmed[1], None
            self.run += 1

    def ahead(self, count: int) -> list[int]:
        """The next tokens if the repetition goes on, with the same changes."""
        return [self._changes.get(token, token) for token in self._source[self._next : self._next + count]]
