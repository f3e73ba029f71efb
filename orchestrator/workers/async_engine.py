"""The asynchronous face of a `SharedEngine`: streams for an event loop, one hand-over a step for all of them.

The engine's thread calls `loop.call_soon_threadsafe` once a step, with the updates of all calls of this loop; a slow
consumer holds back nobody, for what it has not taken yet is kept for it. Not here: HTTP, and text.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress

from paceline.core.errors import EventLoopError
from paceline.workers.calls import Call, CallUpdate
from paceline.workers.shared_engine import SharedEngine


class AsyncEngine:
    """Calls of one event loop to a shared engine. Made in that loop, and used in it alone."""

    def __init__(self, engine: SharedEngine) -> None:
        self.engine, self._loop = engine, asyncio.get_running_loop()
        self._streams: dict[str, _Stream] = {}  # by ticket

    @property
    def is_over(self) -> bool:
        """Whether its loop is closed, so that nobody can use it any more."""
        return self._loop.is_closed()

    def check_loop(self) -> None:
        """Raise EventLoopError in any other loop than its own: updates would never arrive there."""
        if asyncio.get_running_loop() is not self._loop:
            raise EventLoopError(
                "this engine's streams are bound to another event loop that still runs; use one loop for all calls, "
                "or make another AsyncEngine (or ModelServer) in this one"
            )

    async def generate(self, call: Call) -> AsyncGenerator[CallUpdate, None]:
        """Updates of a call, at most one for every step of the engine, or several joined where the consumer is slow.

        To give up, close the generator or cancel the task: the call's slots are free after the step that runs then.

        Raises:
            EventLoopError: another loop than its own runs.
            QueueFullError: too many requests wait. At the first step of the generator, before anything is computed.
            DeadlineError, SamplingError, ...: the call could not be served to its end.
        """
        self.check_loop()
        stream = self._streams[call.ticket] = _Stream()
        try:
            self.engine.submit(call, self._from_engine)
            while True:
                update = await stream.take()
                if update.outputs:
                    yield update
                if update.error is not None:
                    raise update.error
                if update.ended:
                    return
        finally:
            self._streams.pop(call.ticket, None)
            self.engine.end(call.ticket)

    def leave(self, ticket: str, *indices: int) -> None:
        """See `SharedEngine.leave`."""
        if indices:
            self.engine.leave(ticket, indices)

    def _from_engine(self, updates: list[CallUpdate]) -> None:
        """The sink of all calls, in the engine's thread."""
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self._loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: list[CallUpdate]) -> None:
        for update in updates:
            stream = self._streams.get(update.ticket)
            if stream is not None:
                stream.put(update)


class _Stream:
    """Updates that one consumer has not taken yet."""

    def __init__(self) -> None:
        self._updates: deque[CallUpdate] = deque()
        self._came = asyncio.Event()

    def put(self, update: CallUpdate) -> None:
        self._updates.append(update)
        self._came.set()

    async def take(self) -> CallUpdate:
        """All that came since the last time, as one."""
        await self._came.wait()
        self._came.clear()
        taken, self._updates = self._updates, deque()
        return CallUpdate.joined(taken)
