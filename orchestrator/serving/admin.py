"""The routes of an operator: which models are in memory, and loading, unloading and pinning them.

They need an API key, as all routes but health do. Where the service has no keys they answer this machine alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Annotated, TypeVar

from fastapi import FastAPI
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.core.errors import PacelineError
from paceline.serving.model_state import Lifecycle, ModelState
from paceline.serving.openai.fields import ModelField, Strict
from paceline.serving.reading import read
from paceline.serving.refused import RefusedError
from paceline.serving.schema import post_schema
from paceline.serving.settings import ApiSettings, is_loopback

log = logging.getLogger("paceline")

MODELS = "/admin/models"

ActionT = TypeVar("ActionT", bound="ModelAction")


class ModelAction(Strict):
    """Which model an operator means."""

    model: ModelField


class PinAction(ModelAction):
    """Keep a model in memory, or let it leave again."""

    pinned: Annotated[bool, Field(description="true or false")] = True


def add_admin(app: FastAPI, lifecycle: Lifecycle, settings: ApiSettings) -> None:
    """Add the routes to an application."""
    is_open = not settings.api_keys

    async def act(request: Request, kind: type[ActionT], do: Callable[[ActionT], Awaitable[ModelState]]) -> Response:
        _check_caller(request, is_open=is_open)
        if "content-type" not in request.headers:  # a page elsewhere can leave it out
            raise RefusedError(415, "say what the body is: Content-Type: application/json")
        state = await do(await read(request, kind))
        return JSONResponse(state.to_dict())

    @app.get(MODELS)
    async def states(request: Request) -> Response:
        """The models of the service, also those that are not in memory."""
        _check_caller(request, is_open=is_open)
        return JSONResponse({"models": [state.to_dict() for state in lifecycle.states()]})

    @app.post(f"{MODELS}/load", openapi_extra=post_schema(ModelAction))
    async def load(request: Request) -> Response:
        """Load a model; answers when it can."""
        return await act(request, ModelAction, lambda action: lifecycle.load(action.model))

    @app.post(f"{MODELS}/unload", openapi_extra=post_schema(ModelAction))
    async def unload(request: Request) -> Response:
        """Unload a model, after the requests that it has."""
        return await act(request, ModelAction, lambda action: lifecycle.unload(action.model))

    @app.post(f"{MODELS}/pin", openapi_extra=post_schema(PinAction))
    async def pin(request: Request) -> Response:
        """Keep a model in memory, or let it leave again."""
        return await act(request, PinAction, lambda action: lifecycle.pin(action.model, pinned=action.pinned))


@asynccontextmanager
async def kept(lifecycle: Lifecycle) -> AsyncIterator[None]:
    """While the application runs: idle models are unloaded."""
    try:
        await lifecycle.restore()
    except PacelineError as error:  # it is as the models file says, most likely
        log.warning("what is loaded could not be found out (%s)", error)
    watching = asyncio.ensure_future(lifecycle.watch())
    try:
        yield
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching


def _check_caller(request: Request, *, is_open: bool) -> None:
    """Raise RefusedError (403) for another machine, or a page of another site, where no key is asked for."""
    if not is_open:
        return
    near = request.client is not None and is_loopback(request.client.host)
    if not near or not is_loopback(request.url.hostname or ""):
        raise RefusedError(403, "without an API key these routes answer this machine alone; give the server --api-key")
