"""Updates that wait for those of the next rounds and go with them: several rounds, one hand-over to the event loop.

A message to a client passes four processes, the client's included, and costs each of them as much whatever is in it; on
a quick engine that is more than a round. No timer: the engine's own thread looks at the clock after every step, so an
update waits no longer than its interval, a call of the rounds and a chunk of a prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from paceline.workers.calls import CallState, CallUpdate, Sink

CROWD = 8
"""Calls that hear every ``Call.interval_s``; where more are in slots, the interval grows with their number, so that
they all together get as many messages a second.
"""


@dataclass(slots=True)
class _Line:
    """Of one call: what waits, and when something was last handed over."""

    state: CallState
    sent_s: float = float("-inf")
    updates: list[CallUpdate] = field(default_factory=list)


class Holding:
    """Of one engine; used under its lock. ``clock``: seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._lines: dict[str, _Line] = {}  # by ticket
        self._urgent: set[str] = set()

    def add(self, state: CallState, update: CallUpdate, *, urgent: bool) -> None:
        """``urgent``: it goes, with all that waits of its call, with the next `due`."""
        line = self._lines.get(update.ticket)
        if line is None:
            line = self._lines[update.ticket] = _Line(state)
        line.updates.append(update)
        if urgent or not state.call.interval_s:
            self._urgent.add(update.ticket)

    def due(self) -> dict[Sink, list[CallUpdate]]:
        """What is to be handed over now. As soon as one call has waited for its interval all others go too: their
        reader is woken once for all of them.
        """
        now = self._clock()
        crowd = max(1.0, len(self._lines) / CROWD)
        waiting = {ticket: line for ticket, line in self._lines.items() if line.updates}
        urgent = {ticket: waiting.pop(ticket) for ticket in self._urgent}
        is_time = any(now - line.sent_s >= crowd * line.state.call.interval_s for line in waiting.values())
        chosen = [*urgent.values(), *(waiting.values() if is_time else ())]
        self._urgent.clear()
        told: dict[Sink, list[CallUpdate]] = {}
        for line in chosen:
            update = CallUpdate.joined(line.updates)
            line.updates, line.sent_s = [], now
            told.setdefault(line.state.sink, []).append(update)
            if update.ended:
                del self._lines[update.ticket]
        return told

    def end(self, ticket: str) -> list[CallUpdate]:
        """The call takes part in no further round. -> what waits of it"""
        line = self._lines.pop(ticket, None)
        self._urgent.discard(ticket)
        return [] if line is None else line.updates
