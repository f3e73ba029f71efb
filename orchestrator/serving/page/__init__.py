"""The page at `/`, whose files are served as they are: nothing is built, or loaded from elsewhere. Also the page at
`/docs`: the OpenAPI description as HTML, without scripts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response
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


_DOCS_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_DOCS_HEAD = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 0.9em ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; margin: 0.5rem 0 1.5rem; }
th, td { text-align: left; vertical-align: top; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #8886; }
h2 { margin-top: 2.5rem; }
td:first-child, th:first-child { overflow-wrap: anywhere; }
"""


def add_docs(app: FastAPI) -> None:
    """Add the route of the page at /docs."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return HTMLResponse(_docs(app.openapi()), headers={"content-security-policy": _DOCS_POLICY})


def _docs(described: Mapping[str, Any]) -> str:
    """The page of an OpenAPI description: every route with its fields and responses, and every schema."""
    info, routes = described["info"], described["paths"]
    operations = [(path, method, one) for path, methods in routes.items() for method, one in methods.items()]
    links = "".join(f'<li><a href="#{_anchor(m, p)}">{_title(m, p)}</a></li>' for p, m, _ in operations)
    parts = [
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])}</p>",
        f'<p>For programs: <a href="openapi.json">openapi.json</a>.</p><nav aria-label="Routes"><ul>{links}</ul></nav>',
        *(_operation(path, method, one) for path, method, one in operations),
        *(_schema(name, one) for name, one in described.get("components", {}).get("schemas", {}).items()),
    ]
    head = f"{_DOCS_HEAD}<title>{escape(info['title'])}</title><style>{_STYLE}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _title(method: str, path: str) -> str:
    return f"<code>{method.upper()} {escape(path)}</code>"


def _anchor(method: str, path: str) -> str:
    return escape(f"{method}{path}")


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> str:
    lines = [f'<h2 id="{_anchor(method, path)}">{_title(method, path)}</h2>']
    lines.append(f"<p>{escape(operation.get('description', operation.get('summary', '')))}</p>")
    for content in operation.get("requestBody", {}).get("content", {}).values():
        lines.append(f"<p>Body: {_type(content['schema'])}</p>")
    rows = ((status, escape(one["description"])) for status, one in sorted(operation["responses"].items()))
    return "".join(lines) + _table(("status", "meaning"), rows)


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = (
        (
            f"<code>{escape(field)}</code>",
            _type(one),
            _default(one, field in needed),
            escape(one.get("description", "")),
        )
        for field, one in schema.get("properties", {}).items()
    )
    head = f'<h2 id="{escape(name)}">{escape(name)}</h2><p>{escape(schema.get("description", ""))}</p>'
    return head + _table(("field", "type", "default", "must be"), rows)


def _default(schema: Mapping[str, Any], is_needed: bool) -> str:
    if is_needed:
        return "needed"
    return f"<code>{escape(json.dumps(schema['default']))}</code>" if "default" in schema else ""


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in words, with links to the schemas that it names."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one) for one in schema["anyOf"] if one != {"type": "null"}))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in values)
    kind: str | list[str] = schema.get("type", "anything")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}{_bounds(schema, 'Items')}"
    names: dict[str, str] = {"string": "text", "integer": "whole number", "boolean": "true or false"}
    if isinstance(kind, list):
        return " or ".join(names.get(one, one) for one in kind)
    return names.get(kind, kind) + _bounds(schema, "imum") + _bounds(schema, "Length")


def _bounds(schema: Mapping[str, Any], what: str) -> str:
    words = {"min": "at least", "max": "at most"}
    found = [f"{word} {schema[side + what]}" for side, word in words.items() if side + what in schema]
    found += [
        f"{word} {schema[name]}"
        for name, word in (("exclusiveMinimum", "above"), ("exclusiveMaximum", "below"))
        if what == "imum" and name in schema
    ]
    return f" ({', '.join(found)})" if found else ""


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    titles = "".join(f'<th scope="col">{title}</th>' for title in head)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>" if body else ""
