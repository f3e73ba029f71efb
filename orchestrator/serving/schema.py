"""The OpenAPI description of bodies that routes read by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

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


def post_schema(model: type[BaseModel]) -> dict[str, Any]:
    """What a POST route says about its body and its answers."""
    schema = {"$ref": _COMPONENTS + model.__name__}
    error = {"application/json": {"schema": {"$ref": _COMPONENTS + "Error"}}}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {str(status): {"description": text, "content": error} for status, text in _ERRORS.items()},
    }


def with_components(app: FastAPI, models: Sequence[type[BaseModel]]) -> None:
    """Let the application's description hold these models, which its routes name."""
    plain = app.openapi
    _, top = models_json_schema([(model, "validation") for model in models], ref_template=_COMPONENTS + "{model}")

    def describe() -> dict[str, Any]:
        if app.openapi_schema is None:
            described = plain()
            components = described.setdefault("components", {}).setdefault("schemas", {})
            components.update(top["$defs"])
            components["Error"] = _ERROR
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
