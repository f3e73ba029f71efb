"""Whether work fits into the time in which a drafter waits for its target.

A unit of work that was begun is finished: if the target calls meanwhile, its reply is delayed. Begun too late, a unit
costs more than it saves.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

_KEPT = 15  # of the last times, whose median is expected


class IdleBudget:
    """Predicts the seconds until the target's next call from the last ones."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since = clock, 0.0
        self._pauses: deque[float] = deque(maxlen=_KEPT)
        self._units: dict[str, deque[float]] = {}

    def begin(self) -> None:
        """The target has its reply: the idle time begins."""
        self._since = self._clock()

    def paused(self, seconds: float) -> None:
        """The target took so long from a reply to its next call."""
        self._pauses.append(seconds)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Time a unit of work of that kind."""
        begin = self._clock()
        yield
        self._units.setdefault(kind, deque(maxlen=_KEPT)).append(self._clock() - begin)

    def saves(self, kind: str, odds: float, *, after: str | None = None) -> float:
        """Expected seconds saved, less those lost, by a unit of a kind whose result is used with probability ``odds``.

        If it is used, the part that is done before the call is saved. If not, the part that is left then is waited for
        in vain. ``after``: a unit of that kind comes first. Before the first calls, when nothing is known, a unit is
        assumed to take a second, and to fit.
        """
        takes, left = 1.0, math.inf
        if self._pauses and kind in self._units:
            takes = median(self._units[kind])
            left = median(self._pauses) - (self._clock() - self._since)
            if after in self._units:
                left -= median(self._units[after])
        before = min(takes, left)
        return odds * before - (1 - odds) * (takes - before) if before > 0 else 0.0
