"""Reads the body of a request by hand: its type is checked, and long JSON is parsed beside the event loop."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from paceline.serving.middleware import CLIENT_CLOSED
from paceline.serving.openai.fields import read_body
from paceline.serving.refused import RefusedError

ModelT = TypeVar("ModelT", bound=BaseModel)

_LONG_BODY = 32 << 10  # bytes from which JSON is parsed beside the event loop: below, it takes less than a millisecond


async def read(request: Request, model: type[ModelT]) -> ModelT:
    """The request's body, checked.

    Raises:
        RefusedError: it is no JSON, or not what the endpoint takes.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":  # what a page elsewhere could send without being asked
        raise RefusedError(415, f"the body is {kind}; send JSON, and say so: Content-Type: application/json")
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise RefusedError(CLIENT_CLOSED, "the client disconnected before the end of the body") from error
    if len(body) < _LONG_BODY:
        return read_body(model, body)
    return await asyncio.to_thread(read_body, model, body)
