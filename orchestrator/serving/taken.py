"""A stream ends when who reads it has taken all of it, and not before.

Ray sends the items of a stream to its caller, and where the stream ends, waits until the caller has confirmed them all.
It waits in the one thread that begins every call of the actor: while a caller is stopped or cannot be reached, nobody
else's call begins there, be it a request or Ray Serve's question whether the actor is well, for which it is replaced
(seen with Ray 2.60). So no stream of ours ends there. A replica of a model asks the process of HTTP that reads the
answer whether it is there; the process of HTTP waits for the proxy's word that the answer is complete. The client has
its answer by then. A caller that is gone confirms nothing, and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import ray
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_NAMESPACE
from starlette.types import ASGIApp, Message, Receive, Scope, Send

Ask = Callable[[str], Awaitable[bool]]


def own_name() -> str:
    """The name by which `Readers` asks this process, an actor of Ray Serve."""
    return str(ray.get_runtime_context().get_actor_name() or "")


@dataclass(slots=True)
class _Line:
    """Of streams that wait for one reader. ``asked_at``: when the last question to it began."""

    asked_at: float = float("-inf")
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Readers:
    """The processes that read the streams of this one. ``ask``: whether a reader answers; False: it is gone."""

    def __init__(self, ask: Ask | None = None) -> None:
        self._ask, self._lines = ask or _Actors().answer, dict[str, _Line]()

    async def taken(self, reader: str) -> None:
        """Return when a reader has what was sent to it until now. A question is that of all streams that came before.

        reader  its `own_name`; "": this process itself
        """
        if not reader:
            return
        came_at = monotonic()
        line = self._lines.setdefault(reader, _Line())
        async with line.asking:
            if line.asked_at <= came_at:
                line.asked_at = monotonic()
                if not await self._ask(reader):
                    self._lines.pop(reader, None)


class _Actors:
    """Asks readers. Each is looked up once."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    async def answer(self, reader: str) -> bool:
        """See `Readers`. A reader whose connection is gone counts as gone: Ray does not wait for it, either."""
        try:
            if reader not in self._known:
                self._known[reader] = await asyncio.to_thread(ray.get_actor, reader, namespace=SERVE_NAMESPACE)
            await self._known[reader].__ray_ready__.options(max_task_retries=0).remote()
        except (ValueError, RayError):
            self._known.pop(reader, None)
            return False
        return True


class UntilTaken:
    """ASGI: a call ends when the server says that the answer is complete, or that its client is gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False

        async def send_on(message: Message) -> None:
            nonlocal complete
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        await self._app(scope, receive, send_on)
        if complete:
            with suppress(Exception):  # of whatever passes its messages on: it is gone
                while (await receive())["type"] != "http.disconnect":
                    pass
