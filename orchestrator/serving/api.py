"""HTTP application: OpenAI's API over a `ModelRouter`, with FastAPI. It knows no model and no Ray.

Runs under any ASGI server, and under Ray Serve by `serve.ingress`. Bodies are read directly, so that the size limit
applies before they are in memory and their JSON is parsed in C, off the event loop if it is long.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar

from fastapi import FastAPI
from pydantic import BaseModel, Field
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from paceline.core.errors import PacelineError
from paceline.serving.answer import DONE, event
from paceline.serving.errors import RefusedError, model_not_found, refusal
from paceline.serving.lifecycle import Lifecycle, ModelState
from paceline.serving.middleware import (
    CLIENT_CLOSED,
    AccessLog,
    ApiKeys,
    BodyLimit,
    Cors,
    KeyCounts,
    api_key,
    refused_response,
)
from paceline.serving.openai.fields import ModelField, Strict, read_body
from paceline.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from paceline.serving.page import add_page
from paceline.serving.router import (
    Failed,
    GenerationRequest,
    Item,
    ModelRouter,
    RequestContext,
    StreamChunk,
    StreamStart,
    TextRequest,
)
from paceline.serving.settings import ApiSettings, is_loopback

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    router: ModelRouter, settings: ApiSettings, lifecycle: Lifecycle | None = None, *, keys: KeyCounts | None = None
) -> FastAPI:
    """Create the application.

    lifecycle  of the router's models, for an operator; None: they are always loaded
    keys       counts the requests of API keys; None: the counts are not shared with other processes
    """
    middleware = [
        Middleware(AccessLog, enabled=settings.access_log),
        *([Middleware(Cors, origins=settings.cors_origins)] if settings.cors_origins else []),
        Middleware(ApiKeys, keys=settings.api_keys, limit=settings.max_requests_per_key, counts=keys or KeyCounts()),
        Middleware(BodyLimit, limit=settings.max_body_bytes),
    ]
    app = FastAPI(
        title="Paceline",
        description="OpenAI's API over speculative decoding. A null is a missing field.",
        docs_url=None,  # its page loads external scripts
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
        lifespan=None if lifecycle is None else lambda _: _kept(lifecycle),
    )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RefusedError, _error)
    app.add_exception_handler(Exception, _error)
    _add_generation(app, router, settings)
    _add_models(app, router)
    _add_operation(app, router, settings)
    bodies: list[type[BaseModel]] = [
        CompletionRequest,
        ChatRequest,
        ResponsesRequest,
        TokenizeRequest,
        DetokenizeRequest,
    ]
    if lifecycle is not None:
        _add_admin(app, lifecycle, settings)
        bodies += [ModelAction, PinAction]
    _with_components(app, bodies, keys=bool(settings.api_keys))
    return app


def _add_generation(app: FastAPI, router: ModelRouter, settings: ApiSettings) -> None:
    def add(name: str, path: str, kind: type[TextRequest], *, text: str) -> None:
        @app.post(path, name=name, description=text, openapi_extra=_post_schema(kind))
        async def generate(request: Request) -> Response:
            generation_request = await _read(request, kind)
            context = RequestContext.new(api_key(request.scope), settings)
            items: AsyncIterator[Item] = router.stream(generation_request, context)
            return await answer(request, generation_request, items, ping_s=settings.ping_s, context=context)

    add("completions", "/v1/completions", CompletionRequest, text="Continue prompts.")
    add("chat_completions", "/v1/chat/completions", ChatRequest, text="Answer a conversation.")
    add("responses", "/v1/responses", ResponsesRequest, text="Answer, by OpenAI's newer API. Nothing is kept.")


def _add_models(app: FastAPI, router: ModelRouter) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """List the models that can respond now."""
        return JSONResponse({"object": "list", "data": [card.to_dict() for card in await router.models()]})

    @app.get("/v1/models/{model:path}", responses={404: {"description": "There is no such model."}})
    async def one_model(model: str) -> Response:
        """Describe one model."""
        cards = {card.name: card for card in await router.models()}
        if model not in cards:
            raise model_not_found(model, list(cards))
        return JSONResponse(cards[model].to_dict())

    @app.post("/tokenize", openapi_extra=_post_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Tokenize a text or a conversation."""
        tokens = await router.tokenize(await _read(request, TokenizeRequest))
        return Response(tokens.model_dump_json(), media_type="application/json")

    @app.post("/detokenize", openapi_extra=_post_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Decode token ids to text."""
        text = await router.detokenize(await _read(request, DetokenizeRequest))
        return Response(text.model_dump_json(), media_type="application/json")


def _add_operation(app: FastAPI, router: ModelRouter, settings: ApiSettings) -> None:
    @app.get("/health/live")
    async def live() -> Response:
        """Report that this process responds."""
        return JSONResponse({"live": True})

    @app.get("/health/ready", responses={503: {"description": "A model cannot answer."}})
    @app.get("/health", responses={503: {"description": "A model cannot answer."}})
    async def ready() -> Response:
        """Report whether every model can respond."""
        health = await router.health()
        return JSONResponse({"ready": health.ready, "models": dict(health.models)}, 200 if health.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return metrics in Prometheus' text format."""
        return Response(await router.metrics(), media_type=_PROMETHEUS)

    if settings.page:
        add_page(app)


async def _http_error(_: Request, error: Exception) -> Response:
    """The response to unknown paths and methods, which the framework rejects."""
    assert isinstance(error, HTTPException)
    message = {
        404: "this path does not exist; see docs/openai-api.md for the paths",
        405: "this path does not support this method; use another one",
    }
    refused = RefusedError(error.status_code, message.get(error.status_code, error.detail))
    response = refused_response(refused)
    response.headers.update(error.headers or {})
    return response


async def _error(_: Request, error: Exception) -> Response:
    return refused_response(refusal(error))


log = logging.getLogger("paceline")

_MODELS = "/admin/models"

ActionT = TypeVar("ActionT", bound="ModelAction")


class ModelAction(Strict):
    """Operator action on a model."""

    model: ModelField


class PinAction(ModelAction):
    """Pin a model in memory, or unpin it."""

    pinned: Annotated[bool, Field(description="true or false")] = True


def _add_admin(app: FastAPI, lifecycle: Lifecycle, settings: ApiSettings) -> None:
    """Add the routes of an operator. They need an API key, as all routes except health do. If the service has no keys,
    they respond only to this machine.
    """
    is_open = not settings.api_keys

    async def act(request: Request, kind: type[ActionT], do: Callable[[ActionT], Awaitable[ModelState]]) -> Response:
        _check_caller(request, is_open=is_open)
        if "content-type" not in request.headers:  # a page of another site can leave it out
            raise RefusedError(415, "Content-Type: expected application/json, got none; send that header")
        state = await do(await _read(request, kind))
        return JSONResponse(state.to_dict())

    @app.get(_MODELS)
    async def states(request: Request) -> Response:
        """List the models of the service, including those that are not in memory."""
        _check_caller(request, is_open=is_open)
        return JSONResponse({"models": [state.to_dict() for state in await lifecycle.states()]})

    @app.post(f"{_MODELS}/load", openapi_extra=_post_schema(ModelAction))
    async def load(request: Request) -> Response:
        """Load a model; respond when it is ready."""
        return await act(request, ModelAction, lambda action: lifecycle.load(action.model))

    @app.post(f"{_MODELS}/unload", openapi_extra=_post_schema(ModelAction))
    async def unload(request: Request) -> Response:
        """Unload a model, after its current requests."""
        return await act(request, ModelAction, lambda action: lifecycle.unload(action.model))

    @app.post(f"{_MODELS}/pin", openapi_extra=_post_schema(PinAction))
    async def pin(request: Request) -> Response:
        """Pin a model in memory, or unpin it."""
        return await act(request, PinAction, lambda action: lifecycle.pin(action.model, action.pinned))


@asynccontextmanager
async def _kept(lifecycle: Lifecycle) -> AsyncIterator[None]:
    """Unload idle models while the application runs."""
    try:
        await lifecycle.restore()
    except PacelineError as error:  # most likely the state is that of the models file
        log.warning("reading the list of loaded models failed (%s)", error)
    watching = asyncio.ensure_future(lifecycle.watch())
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def _check_caller(request: Request, *, is_open: bool) -> None:
    """Reject another machine, or a page of another site, if no key is required."""
    if not is_open:
        return
    near = request.client is not None and is_loopback(request.client.host)
    if not near or not is_loopback(request.url.hostname or ""):
        raise RefusedError(
            403,
            "Authorization: expected an API key for these routes, unless the client runs on this machine, got none; "
            "start the server with --api-key",
        )


_HEAD_WAIT_S = 0.05  # for which the head of a response waits for its first events, so that both are one message
PING = b": ping\n\n"  # a comment, which clients ignore

_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class _Gone(Exception):  # noqa: N818 - it is no error of ours
    """The client disconnected."""


class Items:
    """Items of a response, until the client disconnects or the deadline passes."""

    def __init__(self, items: AsyncIterator[Item], request: Request, deadline: float | None) -> None:
        self._items, self._deadline = items, deadline
        self._next: asyncio.Task[Item | None] | None = None
        self._gone = asyncio.ensure_future(_disconnected(request))

    async def next(self, silence_s: float | None = None) -> Item | None:
        """Return the next item; None after ``silence_s`` seconds without one. RefusedError: the deadline has passed, or
        the response ended without being complete.
        """
        if self._next is None:
            self._next = asyncio.ensure_future(anext(self._items, None))
        remaining_s = None if self._deadline is None else self._deadline - time.time()
        timeouts = [seconds for seconds in (silence_s, remaining_s) if seconds is not None]
        timeout = max(0.0, min(timeouts)) if timeouts else None
        await asyncio.wait((self._next, self._gone), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if self._next.done():
            task, self._next = self._next, None
            item = task.result()
            if item is None:
                raise RefusedError(500, "the response ended before it was complete; send the request again")
            return item
        if self._gone.done():
            raise _Gone
        if remaining_s is not None and (silence_s is None or remaining_s <= silence_s):
            raise RefusedError(
                504,
                "the response was not complete before the deadline; ask for fewer tokens or raise the timeout",
                code="deadline_exceeded",
            )
        return None

    async def close(self) -> None:
        tasks = [task for task in (self._next, self._gone) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        close = getattr(self._items, "aclose", None)
        if close is not None:
            with suppress(Exception):  # any error; no caller waits for it
                await close()


async def answer(
    request: Request,
    generation: GenerationRequest,
    items: AsyncIterator[Item],
    *,
    ping_s: float,
    context: RequestContext,
) -> Response:
    """Return the HTTP response to a request sent to a router. A rejection before the first event has its own status."""
    source = Items(items, request, context.deadline)
    about: dict[str, Any] = request.scope["state"]["access"]
    about["model"] = generation.model
    try:
        first = await source.next()
        if isinstance(first, Failed):
            raise first.error
        assert isinstance(first, StreamStart)
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
            raise item.error
        if isinstance(item, StreamChunk):
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
        silence_s, begun, last = min(_HEAD_WAIT_S, self._ping_s), False, False
        try:
            while not last:
                try:
                    item = await self._source.next(silence_s)
                except RefusedError as error:
                    item = Failed(error)
                last = item is not None and item.last
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    begun, silence_s = True, self._ping_s
                elif item is None:
                    await send(_part(PING))
                if isinstance(item, Failed):  # the response has begun, so it is sent as an event
                    self._about["error"] = item.error.code or item.error.message
                    await send(_part(_error_event(item.error, self._generation), more=False))
                elif isinstance(item, StreamChunk):
                    self._about["completion_tokens"] = sum(item.sent)
                    if item.data or last:  # the end goes with the last piece: each is a message between processes
                        await send(_part(item.data, more=not last))
        except (_Gone, OSError):
            self._about["status"] = CLIENT_CLOSED
        finally:
            await self._source.close()


def _part(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _error_event(error: RefusedError, generation: GenerationRequest) -> bytes:
    if isinstance(generation, ResponsesRequest):
        fields = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return event(fields, "error")
    return event(error.body) + DONE


async def _disconnected(request: Request) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return


ModelT = TypeVar("ModelT", bound=BaseModel)

_LONG_BODY = 32 << 10  # bytes from which JSON is parsed off the event loop: below, it takes less than a millisecond


async def _read(request: Request, model: type[ModelT]) -> ModelT:
    """Return the request's body, checked."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":  # a page of another site could send it without a preflight request
        raise RefusedError(415, f"Content-Type: expected application/json, got {kind}; send JSON with that header")
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise RefusedError(
            CLIENT_CLOSED, "the client disconnected before the end of the request body; send it again"
        ) from error
    if len(body) < _LONG_BODY:
        return read_body(model, body)
    return await asyncio.to_thread(read_body, model, body)


_COMPONENTS = "#/components/schemas/"
_ERRORS = {
    400: "The request is wrong; the error names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "Too many requests wait; Retry-After says when to ask again.",
    503: "The model cannot answer now.",
    504: "The answer took longer than it may.",
}


def _post_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The OpenAPI description of a POST route's body and responses."""
    schema = {"$ref": _COMPONENTS + model.__name__}
    error = {"application/json": {"schema": {"$ref": _COMPONENTS + "Error"}}}
    responses = {str(status): {"description": text, "content": error} for status, text in _ERRORS.items()}
    if "stream" in model.model_fields:
        content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {}}
        responses["200"] = {"description": "The answer; with stream: true server-sent events.", "content": content}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": responses,
    }


def _with_components(app: FastAPI, models: Sequence[type[BaseModel]], *, keys: bool) -> None:
    """Add these models to the application's OpenAPI description, whose routes refer to them. ``keys``: whether requests
    need one.
    """
    plain = app.openapi
    _, top = models_json_schema([(model, "validation") for model in models], ref_template=_COMPONENTS + "{model}")

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = plain()
            for operation in (one for methods in described["paths"].values() for one in methods.values()):
                operation["responses"].pop("422", None)  # the framework's own, which is never sent
            described["components"] = {"schemas": {**top["$defs"], "Error": _ERROR}}
            if keys:
                described["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                described["security"] = [{"key": []}]
        return plain()

    app.openapi = describe  # type: ignore[method-assign]


_TEXT = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
        }
    },
}
