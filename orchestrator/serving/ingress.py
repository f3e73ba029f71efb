"""The HTTP side: routes, JSON in, JSON or server-sent events out. It knows no model; replicas answer."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.serving.errors import refusal
from paceline.serving.protocol import ChatRequest, CompletionRequest, Kind, RefusedError, read_request
from paceline.serving.responses import Accepted, Failed, ResponseBuilder, TextDelta, error_event

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_KINDS: dict[str, Kind] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
_MAX_BODY_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ModelRoute:
    """Where a model is served: a deployment's handle, and the target's label in it."""

    handle: Any
    label: str


class Ingress:
    """Sends requests to the routes of their model, in turns."""

    def __init__(self, routes: Mapping[str, Sequence[ModelRoute]]) -> None:
        self._routes = {model: itertools.cycle(list(of_model)) for model, of_model in routes.items()}
        self._created = int(time.time())

    async def __call__(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        try:
            return await self._dispatch(request)
        except Exception as error:  # also what Serve raises where a replica is gone
            refused = refusal(error)
            return JSONResponse(refused.body, refused.status)

    async def _dispatch(self, request: Request) -> Response:
        from starlette.responses import JSONResponse, PlainTextResponse

        # Below a route prefix, which a config file may give, servers differ in whether the path holds it.
        prefix = str(request.scope.get("root_path", "")).rstrip("/")
        path, method = request.url.path.removeprefix(prefix).rstrip("/"), request.method
        if path == "/health" and method == "GET":
            return PlainTextResponse("ok")
        if path == "/v1/models" and method == "GET":
            return JSONResponse({"object": "list", "data": [self._model(name) for name in self._routes]})
        if path.startswith("/v1/models/") and method == "GET":
            return JSONResponse(self._model(path.removeprefix("/v1/models/")))
        if path in _KINDS and method == "POST":
            return await self._generate(read_request(_KINDS[path], await _json(request)))
        known = path in _KINDS or path in ("/v1/models", "/health")
        raise RefusedError(405 if known else 404, f"{method} {path or '/'} is not served here")

    def _model(self, name: str) -> dict[str, object]:
        self._check_model(name)
        return {"id": name, "object": "model", "created": self._created, "owned_by": "paceline"}

    def _check_model(self, name: str) -> None:
        if name not in self._routes:
            models = ", ".join(self._routes)
            raise RefusedError(
                404, f"model {name!r} is not served; there are {models}", param="model", code="model_not_found"
            )

    async def _generate(self, request: CompletionRequest | ChatRequest) -> Response:
        from starlette.responses import JSONResponse, StreamingResponse

        self._check_model(request.model)
        route = next(self._routes[request.model])
        items = route.handle.options(stream=True).stream.remote(route.label, request)
        # The first item is waited for, so that a refusal gets an HTTP status.
        first = await anext(items)
        if not isinstance(first, Accepted):
            raise first.error()
        builder = ResponseBuilder(request, first.prompt_tokens)
        if request.stream:
            return StreamingResponse(_events(items, builder), media_type="text/event-stream")
        async for item in items:
            if isinstance(item, Failed):
                raise item.error()
            builder.add(item)
        return JSONResponse(builder.response())


async def _events(items: Any, builder: ResponseBuilder) -> AsyncIterator[bytes]:
    try:
        async for item in items:
            if isinstance(item, Failed):
                yield error_event(item.error())
                return
            if isinstance(item, TextDelta) and (item.text or item.finish_reason is not None):
                yield builder.event(item)
            elif isinstance(item, TextDelta):
                builder.add(item)  # tokens that are no text yet
    except Exception as error:  # the answer has begun, so it is an event
        yield error_event(refusal(error))
        return
    yield builder.last_event()


async def _json(request: Request) -> object:
    from starlette.requests import ClientDisconnect

    body = bytearray()
    try:
        async for part in request.stream():  # it may have no end
            body += part
            if len(body) > _MAX_BODY_BYTES:
                raise RefusedError(413, f"the body has more than {_MAX_BODY_BYTES} bytes")
    except ClientDisconnect as error:
        raise RefusedError(400, "the client disconnected before the end of the body") from error
    try:
        content: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the body is not JSON ({error})") from error
    return content
