"""When the other side of a channel is expected to speak again.

After a pause of some milliseconds code and data are cold: the first Python and the first tensors take eight to ten
times as long. What has to be done between two messages is therefore done shortly before the next one is due, and what
that will go through is gone through with the last one: so it finds warm caches. This saves a third of what a round
through another process costs (docs/results.md).
"""

from __future__ import annotations

from collections import deque

_SEEN = 8  # pauses; the shortest of them counts, so that nothing is done when a message is there already
_LEAD = 0.0009  # seconds it is done before; with 0.0004 it often came into the message's way
_LEAST = 1  # milliseconds: by then the other process has taken up what was sent to it, if it is on the same CPU too


class Due:
    """Learns from the pauses before earlier messages."""

    def __init__(self) -> None:
        self._pauses: deque[float] = deque(maxlen=_SEEN)

    def came_after(self, seconds: float) -> None:
        """A message came so long after the last one went the other way."""
        self._pauses.append(seconds)

    def milliseconds(self, gone: float = 0.0) -> int:
        """To wait until there is just time for what is to be done before the next message. ``gone``: seconds since the
        last one went the other way.
        """
        return max(_LEAST, int(1000 * (min(self._pauses, default=0.0) - _LEAD - gone)))
