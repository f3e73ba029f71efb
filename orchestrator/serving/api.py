"""The HTTP edge: OpenAI's API over a `ModelRouter`, as a FastAPI application. It knows no model and no Ray.

Runs under any ASGI server, and under Ray Serve by `serve.ingress`. Bodies are read by hand, so that the limit of their
size holds before they are in memory and their JSON is parsed in C, off the event loop where it is long. Not here: what
requests are (`paceline.serving.openai`), and how answers are written (`paceline.serving.render`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.resources import files

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from paceline.serving.admin import ModelAction, PinAction, add_admin, kept
from paceline.serving.answering import answer
from paceline.serving.key_counts import KeyCounts
from paceline.serving.middleware import AccessLog, ApiKeys, BodyLimit, KeyLimit, api_key, refused_response
from paceline.serving.model_state import Lifecycle
from paceline.serving.openai.chat import ChatRequest
from paceline.serving.openai.completion import CompletionRequest
from paceline.serving.openai.responses import ResponsesRequest
from paceline.serving.openai.tokens import DetokenizeRequest, TokenizeRequest
from paceline.serving.reading import read
from paceline.serving.refused import RefusedError, model_not_found, refusal
from paceline.serving.router import Item, ModelRouter, RequestContext
from paceline.serving.schema import post_schema, with_components
from paceline.serving.settings import ApiSettings

Generates = type[CompletionRequest] | type[ChatRequest] | type[ResponsesRequest]

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    router: ModelRouter, settings: ApiSettings, lifecycle: Lifecycle | None = None, *, keys: KeyCounts | None = None
) -> FastAPI:
    """The application.

    lifecycle  of the router's models, for an operator; None: they are always there
    keys       counts the requests of API keys; None: nobody else wants to know
    """
    middleware = [
        Middleware(AccessLog, enabled=settings.access_log),
        Middleware(ApiKeys, keys=settings.api_keys),
        Middleware(KeyLimit, limit=settings.max_requests_per_key, counts=keys or KeyCounts()),
        Middleware(BodyLimit, limit=settings.max_body_bytes),
    ]
    app = FastAPI(
        title="Paceline",
        description="OpenAI's API over speculative decoding",
        docs_url=None,  # its page loads scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware,
        lifespan=None if lifecycle is None else lambda _: kept(lifecycle),
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
        add_admin(app, lifecycle, settings)
        bodies += [ModelAction, PinAction]
    with_components(app, bodies)
    return app


def _add_generation(app: FastAPI, router: ModelRouter, settings: ApiSettings) -> None:
    async def generate(request: Request, kind: Generates) -> Response:
        generation_request = await read(request, kind)
        context = RequestContext.new(
            api_key=api_key(request.scope),
            timeout_s=settings.request_timeout_s,
            spec_metrics=settings.spec_metrics,
            max_sequence=settings.max_sequence_tokens,
            interval_s=settings.stream_interval_ms / 1000,
        )
        items: AsyncIterator[Item] = router.stream(generation_request, context)
        return await answer(request, generation_request, items, ping_s=settings.ping_s, context=context)

    @app.post("/v1/completions", openapi_extra=post_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        """Continue prompts."""
        return await generate(request, CompletionRequest)

    @app.post("/v1/chat/completions", openapi_extra=post_schema(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await generate(request, ChatRequest)

    @app.post("/v1/responses", openapi_extra=post_schema(ResponsesRequest))
    async def responses(request: Request) -> Response:
        """Answer, by OpenAI's newer API. Nothing is kept."""
        return await generate(request, ResponsesRequest)


def _add_models(app: FastAPI, router: ModelRouter) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        """The models that can answer now."""
        return JSONResponse({"object": "list", "data": [card.to_dict() for card in await router.models()]})

    @app.get("/v1/models/{model:path}", responses={404: {"description": "There is no such model."}})
    async def one_model(model: str) -> Response:
        """One of them."""
        cards = {card.name: card for card in await router.models()}
        if model not in cards:
            raise model_not_found(model, list(cards))
        return JSONResponse(cards[model].to_dict())

    @app.post("/tokenize", openapi_extra=post_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """The ids of a text or a conversation."""
        tokens = await router.tokenize(await read(request, TokenizeRequest))
        return Response(tokens.model_dump_json(), media_type="application/json")

    @app.post("/detokenize", openapi_extra=post_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """The text of ids."""
        text = await router.detokenize(await read(request, DetokenizeRequest))
        return Response(text.model_dump_json(), media_type="application/json")


def _add_operation(app: FastAPI, router: ModelRouter, settings: ApiSettings) -> None:
    @app.get("/health/live")
    async def live() -> Response:
        """Whether this process answers."""
        return JSONResponse({"live": True})

    @app.get("/health/ready", responses={503: {"description": "A model cannot answer."}})
    @app.get("/health", responses={503: {"description": "A model cannot answer."}})
    async def ready() -> Response:
        """Whether every model can answer."""
        health = await router.health()
        return JSONResponse({"ready": health.ready, "models": dict(health.models)}, 200 if health.ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(await router.metrics(), media_type=_PROMETHEUS)

    if settings.page:
        page = (files("paceline.serving") / "page.html").read_text(encoding="utf-8")

        @app.get("/", include_in_schema=False)
        async def home() -> Response:
            return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})


_PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


async def _http_error(_: Request, error: Exception) -> Response:
    """What the framework refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    message = {404: "nothing is served at this path", 405: "this path is served, but not with this method"}
    refused = RefusedError(error.status_code, message.get(error.status_code, error.detail))
    response = refused_response(refused)
    response.headers.update(error.headers or {})
    return response


async def _error(_: Request, error: Exception) -> Response:
    return refused_response(refusal(error))
