"""The page at `/`, whose files are served as they are: nothing is built, or loaded from elsewhere."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response
from starlette.routing import Route

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_ASSETS = (
    *("page.css", "icon.svg"),
    *("api.js", "chat.js", "markdown.js", "page.js", "race.js", "tokens.js"),
)
PATHS = frozenset({"/", *(f"/page/{name}" for name in _ASSETS)})
"""Paths that need no API key."""

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add the routes of the page."""
    for name in ("page.html", *_ASSETS):
        content, kind = (files("paceline.serving.page") / name).read_bytes(), _TYPES[name.rpartition(".")[2]]
        file = Response(content, media_type=kind, headers=_HEADERS)
        path = "/" if name == "page.html" else f"/page/{name}"
        app.router.routes.append(Route(path, file, methods=["GET"], include_in_schema=False))
