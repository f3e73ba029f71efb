"""YAML files: read, and checked against a declared type; every mistake becomes a PlanError."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pydantic

from paceline.core.errors import PlanError

T = TypeVar("T")

STRICT = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
"""Validation settings for the models of a file: unknown keys are errors, and no value is converted silently."""
FORBID_EXTRA = pydantic.ConfigDict(extra="forbid")
"""Validation settings for dataclasses, whose fields are strict one by one."""

_WEEK = 7 * 24 * 3600  # the clocks of sockets end at 24 days
Seconds = Annotated[float, pydantic.Field(strict=True, gt=0, le=_WEEK)]
Count = Annotated[int, pydantic.Field(strict=True, ge=0)]
Flag = pydantic.StrictBool

_REASONS = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "dataclass_type": "a mapping",
    "model_type": "a mapping",
    "dict_type": "a mapping",
}


def read_yaml(file: Path) -> object:
    """Return the content of a file as plain values. OSError, ValueError, YAMLError: it cannot be read."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
        """Rejects duplicate keys, of which PyYAML silently keeps the last."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            for place, (key, _) in enumerate(node.value):
                if isinstance(key, yaml.ScalarNode) and key.value in [other.value for other, _ in node.value[:place]]:
                    raise yaml.MarkedYAMLError(
                        problem=f"the key {key.value!r} occurs twice; remove one of them", problem_mark=key.start_mark
                    )
            made: dict[Any, Any] = super().construct_mapping(node, deep)
            return made

    return yaml.load(file.read_text(encoding="utf-8"), Loader)


def validate(kind: type[T], content: object, where: str, *others: type) -> T:
    """Validate ``content`` as a pydantic model or a dataclass. ``where`` is its location in error messages.
    ``others``: types whose keys may also be present, and are ignored.

    Raises:
        PlanError: a key is unknown, or a value has the wrong type or is out of range.
    """
    own = _keys(kind)
    keys = list(dict.fromkeys([*own, *(key for other in others for key in _keys(other))]))
    if not isinstance(content, dict):
        raise PlanError(f"{where}: expected a mapping with the keys {', '.join(keys)}, got {content!r:.80}; correct it")
    unknown = sorted(str(key) for key in content if key not in keys)
    if unknown:
        raise PlanError(f"{where}: {unknown[0]!r} is not a key; use one of {', '.join(keys)}")
    try:
        return pydantic.TypeAdapter(kind).validate_python({key: content[key] for key in content if key in own})
    except pydantic.ValidationError as error:
        raise PlanError(_message(error, where)) from error


def _message(error: pydantic.ValidationError, where: str) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join((where, *map(str, first["loc"])))
    if first["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{place} is not a key; remove it or correct its spelling"
    if first["type"] == "missing":
        return f"{place} is missing; add it"
    if first["type"] == "value_error":
        return f"{place}: {first['ctx']['error']}"
    reason = _REASONS.get(first["type"]) or first["msg"].removeprefix("Input should be ")
    return f"{place}: expected {reason}, got {first['input']!r:.80}; correct it"


def _keys(kind: type) -> list[str]:
    """Return the keys that a file may give. A dataclass excludes a field with ``metadata={"file": False}``."""
    if issubclass(kind, pydantic.BaseModel):
        return list(kind.model_fields)
    assert is_dataclass(kind)
    return [item.name for item in fields(kind) if item.metadata.get("file", True)]
