"""Waiting for a message that comes at about the same interval every time, without being late for it.

A process that sleeps until its message arrives is woken late and cold: some tenths of a millisecond, which counts when
a round takes ten. So the wait is cut: sleep until shortly before the usual time, then look without sleeping, and after
that sleep again. It costs about a millisecond of a host CPU for each message, and nothing when messages are rare.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

_MARGIN = 0.0003  # seconds before and after the usual time
_RARE = 0.1  # messages further apart than this are not waited for in this way
_WEIGHT = 0.2  # of the newest wait in the usual one

Ready = Callable[[float], bool]
"""Sleeps up to so many seconds; whether the message is there."""


class Rhythm:
    """Learns how long it usually takes."""

    def __init__(self) -> None:
        self._usual: float | None = None

    def wait(self, ready: Ready, seconds: float) -> bool:
        """Whether ``ready`` within so many seconds."""
        begin = perf_counter()
        came = self._wait(ready, begin, begin + seconds)
        took = perf_counter() - begin
        if not came or took > _RARE:
            self._usual = None
        else:
            self._usual = took if self._usual is None else self._usual + _WEIGHT * (took - self._usual)
        return came

    def _wait(self, ready: Ready, begin: float, end: float) -> bool:
        if self._usual is not None:
            # Polls sleep whole milliseconds, rounded up; this one must not oversleep.
            early = int(1000 * (self._usual - _MARGIN)) / 1000
            if early > 0 and ready(min(early, max(0.0, end - begin))):
                return True
            spin = min(end, begin + self._usual + _MARGIN)
            while perf_counter() < spin:
                if ready(0.0):
                    return True
        return ready(max(0.0, end - perf_counter()))
