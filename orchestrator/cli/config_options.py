"""Options of commands from the fields of configuration types, so that a key is declared once.

A command takes a dataclass or a pydantic model as one parameter; on the command line each of its fields is an option:
its name with dashes, its type, default and description (pydantic's ``description``, a dataclass field's metadata
``help``). A field annotated with ``typer.Option`` keeps that. Tuples are repeatable options; what typer has no type for
is taken as text, which the configuration type parses.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from typer.models import ParameterInfo

from paceline.cli import console

Result = TypeVar("Result")

_SIMPLE = (str, int, float, bool, Path)
_REQUIRED = inspect.Parameter.empty


def command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Add a command to ``app``, as ``app.command(name)`` does, with options for its configuration types."""

    def add(function: Callable[..., Result]) -> Callable[..., Result]:
        app.command(name=name)(expand(function))
        return function

    return add


def expand(function: Callable[..., Result]) -> Callable[..., Result]:
    """The same command with every field of its configuration types as a parameter.

    Values that a configuration type refuses are shown as an error of the command line.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind = hints[parameter.name]
        if not _is_config(kind):
            parameters.append(parameter.replace(annotation=kind, kind=parameter.KEYWORD_ONLY))
            continue
        fields = _fields(kind)
        groups[parameter.name] = (kind, [field.name for field in fields])
        parameters += fields

    @wraps(function)
    def run(**values: Any) -> Result:
        with console.refusals():
            for name, (kind, fields) in groups.items():
                options = {field: values.pop(field) for field in fields}
                values[name] = kind(**{field: _value(value) for field, value in options.items() if value is not None})
        return function(**values)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _is_config(kind: object) -> bool:
    return isinstance(kind, type) and (dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel))


def _fields(kind: Any) -> list[inspect.Parameter]:
    if issubclass(kind, BaseModel):
        return [
            _parameter(name, field.annotation, default=field.get_default(), description=field.description)
            for name, field in kind.model_fields.items()
        ]
    hints = get_type_hints(kind, include_extras=True)
    fields = []
    for field in dataclasses.fields(kind):
        default: Any = _REQUIRED if field.default is dataclasses.MISSING else field.default
        fields.append(
            _parameter(field.name, hints[field.name], default=default, description=field.metadata.get("help"))
        )
    return fields


def _parameter(name: str, annotation: Any, *, default: Any, description: str | None) -> inspect.Parameter:
    """The keyword that typer makes an option of."""
    kind, *extra = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    option = next((part for part in extra if isinstance(part, ParameterInfo)), typer.Option(help=description))
    kind, default = _typer_type(kind, default)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _typer_type(kind: Any, default: Any) -> tuple[Any, Any]:
    """A type that typer knows, and a default of that type."""
    variants = [one for one in (get_args(kind) if _is_union(kind) else (kind,)) if one is not type(None)]
    if len(variants) == 1 and get_origin(variants[0]) is tuple:
        element = get_args(variants[0])[0]
        return list[element if element in _SIMPLE else str] | None, list(default) or None if default else None  # type: ignore[misc]
    text: Any = variants[0] if len(variants) == 1 and variants[0] in _SIMPLE else str
    if default is None:
        return text | None, None
    return text, default if text is not str or default is _REQUIRED else str(default)


def _is_union(kind: Any) -> bool:
    return get_origin(kind) is Union or type(kind).__name__ == "UnionType"


def _value(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
