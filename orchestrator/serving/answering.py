"""Sends an answer as it comes: events with pings between them, or one body; and stops when the client is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paceline.serving.middleware import CLIENT_CLOSED, refused_response
from paceline.serving.openai.responses import ResponsesRequest
from paceline.serving.openai.union import GenerationRequest
from paceline.serving.refused import RefusedError
from paceline.serving.render.pieces import DONE, event
from paceline.serving.router import Accepted, Chunk, Failed, Item, RequestContext

_HEAD_WAIT_S = 0.05  # that the head of an answer waits for its first events, with which it is one message
PING = b": ping\n\n"  # a comment, which clients pass over

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class _Gone(Exception):  # noqa: N818 - it is no error of ours
    """The client did not wait."""


class Items:
    """Items of an answer, while the client is there and the time allows."""

    def __init__(self, items: AsyncIterator[Item], request: Request, deadline: float | None) -> None:
        self._items, self._deadline = items, deadline
        self._next: asyncio.Task[Item | None] | None = None
        self._gone = asyncio.ensure_future(_disconnected(request))

    async def next(self, silence_s: float | None = None) -> Item | None:
        """The next one; None after ``silence_s`` seconds without one.

        Raises:
            RefusedError: the deadline is over, or the answer ended without being complete.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(_step(self._items))
        remaining_s = None if self._deadline is None else self._deadline - time.time()
        timeouts = [seconds for seconds in (silence_s, remaining_s) if seconds is not None]
        timeout = max(0.0, min(timeouts)) if timeouts else None
        await asyncio.wait((self._next, self._gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._next.done():
            task, self._next = self._next, None
            item = task.result()
            if item is None:
                raise RefusedError(500, "the answer ended before it was complete")
            return item
        if self._gone.done():
            raise _Gone
        if remaining_s is not None and (silence_s is None or remaining_s <= silence_s):
            raise RefusedError(504, "the answer was not complete in the time it may take", code="deadline_exceeded")
        return None

    async def close(self) -> None:
        """Give up what the answer holds."""
        tasks = [task for task in (self._next, self._gone) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        close = getattr(self._items, "aclose", None)
        if close is not None:
            with suppress(Exception):  # whatever it is, nobody waits for it
                await close()


async def answer(
    request: Request,
    generation: GenerationRequest,
    items: AsyncIterator[Item],
    *,
    ping_s: float,
    context: RequestContext,
) -> Response:
    """The HTTP answer to a request that a router was asked. A refusal before the first event has its own status."""
    source = Items(items, request, context.deadline)
    about: dict[str, Any] = request.scope["state"]["access"]
    about["model"] = generation.model
    try:
        first = await source.next()
        if isinstance(first, Failed):
            raise first.error()
        assert isinstance(first, Accepted)
        about["prompt_tokens"] = first.prompt_tokens
        if generation.stream:
            stream = EventStream(source, generation, ping_s=ping_s, about=about)
            source = None  # type: ignore[assignment]  # the stream closes it
            return stream
        return await _body(source, about)
    except _Gone:
        return Response(status_code=CLIENT_CLOSED)
    except RefusedError as error:
        about["error"] = error.code or error.message
        return refused_response(error)
    finally:
        if source is not None:
            await source.close()


async def _body(source: Items, about: dict[str, Any]) -> Response:
    while True:
        item = await source.next()
        if isinstance(item, Failed):
            raise item.error()
        if isinstance(item, Chunk):
            about["completion_tokens"] = sum(item.sent)
            if item.last:
                return Response(item.data, media_type="application/json")


class EventStream(Response):
    """Server-sent events."""

    def __init__(self, source: Items, generation: GenerationRequest, *, ping_s: float, about: dict[str, Any]) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(_HEADERS)
        self._source, self._generation, self._ping_s, self._about = source, generation, ping_s, about

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            item = await self._first()
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            if item is None:
                item = await self._source.next(self._ping_s)
            while True:
                if item is None:
                    await send(_part(PING))
                elif isinstance(item, Failed):
                    raise item.error()
                elif isinstance(item, Chunk):
                    self._about["completion_tokens"] = sum(item.sent)
                    if item.data or item.last:  # the end goes with the last piece: each is a message between processes
                        await send(_part(item.data, more=not item.last))
                    if item.last:
                        break
                item = await self._source.next(self._ping_s)
        except RefusedError as error:  # the answer has begun, so it is an event
            self._about["error"] = error.code or error.message
            await send(_part(_error_event(error, self._generation), more=False))
        except (_Gone, OSError):
            self._about["status"] = CLIENT_CLOSED
        finally:
            await self._source.close()

    async def _first(self) -> Item | None:
        """What comes soon enough to go with the head of the answer."""
        try:
            return await self._source.next(min(_HEAD_WAIT_S, self._ping_s))
        except RefusedError as error:
            return Failed.of(error)


def _part(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _error_event(error: RefusedError, generation: GenerationRequest) -> bytes:
    if isinstance(generation, ResponsesRequest):
        fields = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return event(fields, "error")
    return event(error.body) + DONE


async def _step(items: AsyncIterator[Item]) -> Item | None:
    return await anext(items, None)


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
