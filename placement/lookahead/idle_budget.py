"""Whether work fits into the time in which a drafter waits for its target.

Work that is begun is ended: what is still under way when the target calls delays the answer. Begun too late it costs
more than it brings.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

_KEPT = 15  # of the last times, whose median is expected


class IdleBudget:
    """Seconds until the next call, as the last ones let expect."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since = clock, 0.0
        self._pauses: deque[float] = deque(maxlen=_KEPT)
        self._units: dict[str, deque[float]] = {}

    def begin(self) -> None:
        """The target has its answer."""
        self._since = self._clock()

    def paused(self, seconds: float) -> None:
        """So long a target took from an answer to its next call."""
        self._pauses.append(seconds)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Remember how long a unit of work of a kind takes."""
        begin = self._clock()
        yield
        self._units.setdefault(kind, deque(maxlen=_KEPT)).append(self._clock() - begin)

    def saves(self, kind: str, odds: float, *, after: str | None = None) -> float:
        """Seconds that a unit of a kind, of use with these odds, is expected to save less those it costs.

        If it is of use, what is done before the call is saved. If not, what is left to do then is waited for in vain.
        ``after``: a unit of that kind comes first. Before the first calls, when nothing is known, it takes a second and
        there is time for it.
        """
        takes, left = 1.0, math.inf
        if self._pauses and kind in self._units:
            takes = median(self._units[kind])
            left = median(self._pauses) - (self._clock() - self._since)
            if after in self._units:
                left -= median(self._units[after])
        before = min(takes, left)
        return odds * before - (1 - odds) * (takes - before) if before > 0 else 0.0
