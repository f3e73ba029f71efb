"""Middleware of every HTTP request: the access log, API keys, limits of keys and bodies. Plain ASGI.

`JsonFormatter` writes the log as lines of JSON if Ray Serve does not (`paceline.serving.ray_guard`).
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from hashlib import sha256

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.serving.errors import QUEUE_FULL, RefusedError
from paceline.serving.page import PATHS

LOGGER = "paceline"
log = logging.getLogger(f"{LOGGER}.access")

REQUEST_ID = "x-request-id"
CLIENT_CLOSED = 499  # of a request whose client did not wait for the response; nginx's number

_GOOD_ID = re.compile(r"[\w.:\-]{1,128}", re.ASCII)
_OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", *PATHS})


def identify(scope: Scope) -> str:
    """Return the id of a request: the client's, or a new one, which is then added to its headers."""
    sent_id = Headers(scope=scope).get(REQUEST_ID, "")
    if _GOOD_ID.fullmatch(sent_id):
        return sent_id
    request_id = f"req-{secrets.token_hex(12)}"
    headers = MutableHeaders(raw=list(scope["headers"]))
    headers[REQUEST_ID] = request_id
    scope["headers"] = headers.raw
    return request_id


def refused_response(error: RefusedError) -> JSONResponse:
    return JSONResponse(error.body, error.status, error.headers)


class JsonFormatter(logging.Formatter):
    """A record as a line of JSON; of the access log, each field separately."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "access", {}), ensure_ascii=False)


class AccessLog:
    """Gives every request an id, returns it in the response, and logs a record at the end of the response.

    The record's ``access`` has its fields (`JsonFormatter` writes them as JSON), and what routes put into
    ``scope["state"]["access"]``. ``enabled``: whether it is logged.
    """

    def __init__(self, app: ASGIApp, *, enabled: bool) -> None:
        self._app, self._enabled = app, enabled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = identify(scope)
        about: dict[str, object] = {"request_id": request_id}
        scope.setdefault("state", {})["access"] = about
        begin, first, status = time.perf_counter(), 0.0, 500

        async def send_on(message: Message) -> None:
            nonlocal first, status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            elif not first:
                first = time.perf_counter() - begin
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        finally:
            if self._enabled:
                fields = {
                    "method": scope["method"],
                    "path": scope["path"],
                    "status": status,
                    "first_byte_s": round(first, 4),
                    "seconds": round(time.perf_counter() - begin, 4),
                    **about,
                }
                log.info("%(method)s %(path)s %(status)s", fields, extra={"access": fields})


class Cors:
    """Lets pages of ``origins`` use the API. Not its admin routes, which without keys trust this machine's programs."""

    def __init__(self, app: ASGIApp, *, origins: Sequence[str]) -> None:
        headers = (REQUEST_ID, "retry-after")
        methods = ("GET", "POST")
        self._app = app
        self._shared = CORSMiddleware(app, origins, methods, allow_headers=("*",), expose_headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_admin = scope["type"] == "http" and scope["path"].startswith("/admin/")
        await (self._app if is_admin else self._shared)(scope, receive, send)


class ApiKeys:
    """Accepts requests with one of the keys, compared in constant time; without keys, all requests. Rejects a request
    (429) whose key has ``limit`` requests running or waiting in any process of the service; None: no limit. Only
    generation counts: POST below /v1, until the end of the response.
    """

    def __init__(self, app: ASGIApp, *, keys: Sequence[str], limit: int | None, counts: KeyCounts) -> None:
        self._app, self._digests = app, [sha256(key.encode()).digest() for key in keys]
        self._limit, self._counts = limit, counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not (self._digests or self._limit is not None):
            await self._app(scope, receive, send)
            return
        key, path = api_key(scope), scope["path"]
        counted = self._limit is not None and scope["method"] == "POST" and path.startswith("/v1/")
        refused = None
        if self._digests and path not in _OPEN_PATHS and not self._is_known(key):
            refused = RefusedError(
                401,
                "Authorization: expected a valid API key, got none or another one; send Authorization: Bearer KEY",
                code="invalid_api_key",
            )
        elif self._limit is not None and counted and self._counts.total(key) >= self._limit:
            message = f"this key has {self._limit} requests running or waiting, the most allowed"
            refused = RefusedError(429, f"{message}; retry when one has finished", code=QUEUE_FULL, retry_after_s=1.0)
        if refused is not None:
            await refused_response(refused)(scope, receive, send)
            return
        with self._counts.one_more(key) if counted else nullcontext():
            await self._app(scope, receive, send)

    def _is_known(self, key: str) -> bool:
        hashed = sha256(key.encode()).digest()
        return bool(sum(hmac.compare_digest(hashed, digest) for digest in self._digests))  # all of them, always


def api_key(scope: Scope) -> str:
    kind, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key.strip() if kind.lower() == "bearer" else ""


class BodyLimit:
    """Rejects bodies that are encoded or whose declared length is too long, and stops reading those without one at the
    limit.
    """

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length, encoding = headers.get("content-length", "0"), headers.get("content-encoding", "identity").lower()
        if not length.isdecimal() or int(length) > self._limit:
            await refused_response(self._refused)(scope, receive, send)
            return
        if encoding != "identity":
            refused = RefusedError(415, f"the body is encoded as {encoding!r}; send it as it is")
            await refused_response(refused)(scope, receive, send)
            return
        num_bytes = 0

        async def receive_less() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._limit:
                raise self._refused
            return message

        await self._app(scope, receive_less, send)

    @property
    def _refused(self) -> RefusedError:
        return RefusedError(
            413, f"the body: expected at most {self._limit} bytes, got more; send less", code="request_too_large"
        )


class KeyCounts:
    """Requests that are running or waiting, by key. Keys are hashed because counts are shared between processes.

    elsewhere  counts of the other processes, as last reported: a limit lets in a few more while a report is on its way
    """

    def __init__(self) -> None:
        self.elsewhere: Mapping[str, int] = {}
        self._own: Counter[str] = Counter()

    def own(self) -> Mapping[str, int]:
        return dict(self._own)

    def total(self, key: str) -> int:
        hashed = _hash(key)
        return self._own[hashed] + self.elsewhere.get(hashed, 0)

    @contextmanager
    def one_more(self, key: str) -> Iterator[None]:
        hashed = _hash(key)
        self._own[hashed] += 1
        try:
            yield
        finally:
            self._own[hashed] -= 1
            if not self._own[hashed]:
                del self._own[hashed]


def _hash(key: str) -> str:
    return sha256(key.encode()).hexdigest()
