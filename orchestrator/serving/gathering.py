"""Events of a stream that wait for those of the next rounds and go with them, where many answers are under way.

A message passes four processes, the client's included, and costs each of them as much whatever is in it: with many
streams together more than the tokens themselves. Events stay as they are; several of them lie in one message.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

MANY = 8
"""Answers under way, from which on events wait."""
OFTEN_S = 0.05
"""Events wait where others were sent less than this ago, for the first round that ends later: so no reader sees it."""


class Gathering:
    """Of one stream. Its first events and its last do not wait."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._sent_s = clock, float("-inf")
        self._data = b""

    def add(self, data: bytes, *, answers: int, ended: bool) -> bytes:
        """What is to be sent now, which may be nothing.

        data     of the latest round
        answers  under way at this server, this one included
        ended    no further round follows
        """
        self._data += data
        now = self._clock()
        if not self._data:
            return b""
        if answers >= MANY and not ended and now - self._sent_s < OFTEN_S:
            return b""
        self._sent_s = now
        return self.rest()

    def rest(self) -> bytes:
        """What waits, which is now sent."""
        data, self._data = self._data, b""
        return data
