"""Where an engine gets its requests from."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Protocol

from paceline.engine.request import Request


class RequestQueue(Protocol):
    """Waiting requests. Asked between rounds, in the thread that runs them."""

    @property
    def paced(self) -> bool:
        """Whether somebody waits for every token, and may give up. Then a prompt is read in chunks, one between two
        rounds.
        """

    def pop(self) -> Request | None:
        """The next request that waits for a slot, or None. Its index is like no other's in this run."""

    def take_aborted(self) -> Collection[int]:
        """Indices of the requests that were aborted since this was last asked; of paced queues alone."""


class ListQueue:
    """A queue of requests that are all there from the beginning."""

    paced = False

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting = deque(requests)

    def pop(self) -> Request | None:
        """In their order."""
        return self._waiting.popleft() if self._waiting else None

    def take_aborted(self) -> Collection[int]:
        """None of them."""
        return ()
