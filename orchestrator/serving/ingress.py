"""The HTTP side: routes, JSON in, JSON or server-sent events out. Knows no model; asks the replicas."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.serving.errors import refusal
from paceline.serving.protocol import CompletionRequest, Kind, RefusedError, read
from paceline.serving.responses import Answer, Failed, Opening, TextPiece, failure_event

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_KINDS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
_MOST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """Where a model is served: a deployment's handle, and the target's label in it."""

    handle: Any
    label: str


class Ingress:
    """Routes requests to seats; the replicas of a model take turns."""

    def __init__(self, seats: Mapping[str, Sequence[ModelRoute]]) -> None:
        self._seats = {model: itertools.cycle(list(found)) for model, found in seats.items()}
        self._created = int(time.time())

    async def __call__(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        try:
            return await self._route(request)
        except Exception as error:  # whatever Serve raises where a replica is gone, too
            refused = refusal(error)
            return JSONResponse(refused.body, refused.status)

    async def _route(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, PlainTextResponse

        # Below a route prefix, which a config file may give, servers differ in whether the path holds it.
        prefix = str(request.scope.get("root_path", "")).rstrip("/")
        path, method = request.url.path.removeprefix(prefix).rstrip("/"), request.method
        if path == "/health" and method == "GET":
            return PlainTextResponse("ok")
        if path == "/v1/models" and method == "GET":
            return JSONResponse({"object": "list", "data": [self._model(name) for name in self._seats]})
        if path.startswith("/v1/models/") and method == "GET":
            return JSONResponse(self._model(path.removeprefix("/v1/models/")))
        if path in _KINDS and method == "POST":
            return await self._generate(read(_KINDS[path], await _json(request)))
        known = path in _KINDS or path in ("/v1/models", "/health")
        raise RefusedError(405 if known else 404, f"{method} {path or '/'} is not served here")

    def _model(self, name: str) -> dict[str, object]:
        self._known(name)
        return {"id": name, "object": "model", "created": self._created, "owned_by": "paceline"}

    def _known(self, name: str) -> None:
        if name not in self._seats:
            there = ", ".join(self._seats)
            raise RefusedError(
                404, f"model {name!r} is not served; there are {there}", param="model", code="model_not_found"
            )

    async def _generate(self, ask: CompletionRequest) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        self._known(ask.model)
        seat = next(self._seats[ask.model])
        items = seat.handle.options(stream=True).stream.remote(seat.label, ask)
        # The first item is waited for, so that a refusal gets an HTTP status.
        first = await anext(items)
        if not isinstance(first, Opening):
            raise first.error()
        answer = Answer(ask, first.prompt_tokens)
        if ask.stream:
            return StreamingResponse(_events(items, answer), media_type="text/event-stream")
        async for item in items:
            if isinstance(item, Failed):
                raise item.error()
            answer.add(item)
        return JSONResponse(answer.whole())


async def _events(items: Any, answer: Answer) -> AsyncIterator[bytes]:
    try:
        async for item in items:
            if isinstance(item, Failed):
                yield failure_event(item.error())
                return
            if isinstance(item, TextPiece) and (item.text or item.finish_reason is not None):
                yield answer.event(item)
            elif isinstance(item, TextPiece):
                answer.add(item)  # tokens that are no text yet
    except Exception as error:  # the answer has begun, so it is an event
        yield failure_event(refusal(error))
        return
    yield answer.last()


async def _json(request: Request) -> object:
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for part in request.stream():  # it may have no end
            body += part
            if len(body) > _MOST_BYTES:
                raise RefusedError(413, f"the body has more than {_MOST_BYTES} bytes")
    except ClientDisconnect as error:
        raise RefusedError(400, "the body was not sent to its end") from error
    try:
        found: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON ({error})") from error
    return found
