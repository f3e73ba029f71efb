"""Whose request is next: keys take turns, and so do the calls of a key, one request a turn.

So a call of a thousand prompts does not keep others waiting, nor does a key with many calls. Not here: slots, rounds.
"""

from __future__ import annotations

from collections import deque

from paceline.workers.calls import CallState


class Turns:
    """Calls with waiting requests, in the order of their turns."""

    def __init__(self) -> None:
        self._keys: deque[str] = deque()
        self._calls: dict[str, deque[CallState]] = {}  # of every key in `_keys`

    def add(self, state: CallState) -> None:
        """A call has arrived: its turn is after those of its key, and a new key's after the other keys'."""
        key = state.call.key
        if key not in self._calls:
            self._calls[key] = deque()
            self._keys.append(key)
        self._calls[key].append(state)

    def first(self) -> CallState | None:
        """The call whose turn it is."""
        return self._calls[self._keys[0]][0] if self._keys else None

    def took(self) -> None:
        """The first call took its turn, and goes behind the others if it has more requests that wait."""
        key = self._keys.popleft()
        calls = self._calls[key]
        state = calls.popleft()
        if state.waiting:
            calls.append(state)
        if calls:
            self._keys.append(key)
        else:
            del self._calls[key]

    def remove(self, state: CallState) -> None:
        """The call is over."""
        calls = self._calls.get(state.call.key)
        if calls is None or state not in calls:
            return
        calls.remove(state)
        if not calls:
            del self._calls[state.call.key]
            self._keys.remove(state.call.key)
