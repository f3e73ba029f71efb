"""A checkpoint's JSON files, read with errors that name the file and the key.

It knows JSON objects and the types of their values; it does not know what any key means.
A key whose value is ``null`` counts as absent, because Hugging Face writes unset options either way.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import CheckpointError


def read_json_object(path: Path) -> dict[str, object]:
    """Read the JSON object in ``path``; raise CheckpointError if the file is absent or holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: the file does not exist; give the folder of a Hugging Face checkpoint, downloaded in full"
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"{path}: the file cannot be read ({error}); check the path and its permissions"
        ) from error
    # Deep nesting exhausts the parser's stack; to a caller that is a syntax error.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, got {error}; download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got {type(value).__name__}; download the file again")
    return value


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object and its location for messages, e.g. ``/models/a/config.json``."""

    values: Mapping[str, object]
    where: str

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least ``minimum``; without a default the key is required."""
        value = self._required(key, default)
        # bool is an int in Python, and `"num_hidden_layers": true` is a mistake, not one layer.
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(key, value, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero; without a default the key is required."""
        value = self._required(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number above zero")
        try:
            number = float(value)
        except OverflowError as error:
            raise self._wrong(key, value, "a number above zero that a float can hold") from error
        if not (math.isfinite(number) and number > 0):
            raise self._wrong(key, value, "a finite number above zero")
        return number

    def optional_number(self, key: str) -> float | None:
        """Return a finite number above zero, or None if the key is absent."""
        return None if self.values.get(key) is None else self.number(key)

    def numbers(self, key: str, *, length: int) -> tuple[float, ...]:
        """Return a required list of ``length`` finite numbers above zero."""
        value = self._required(key, None)
        if not isinstance(value, list) or len(value) != length:
            raise self._wrong(key, value, f"a list of {length} numbers")
        items = Fields({f"{key}[{index}]": item for index, item in enumerate(value)}, self.where)
        return tuple(items.number(name) for name in items.values)

    def flag(self, key: str, default: bool) -> bool:
        """Return true or false."""
        value = self._required(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string; without a default the key is required."""
        value = self._required(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def child(self, key: str) -> "Fields | None":
        """Return the object under ``key``, or None if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return Fields(value, f"{self.where}: {key}")

    def ids(self, key: str) -> tuple[int, ...] | None:
        """Return one token id or a list, without repeats and negative ids (an old "none"); None if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        items = value if isinstance(value, list) else [value]
        ids: list[int] = []
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self._wrong(key, value, "a token id or a list of token ids")
            if item >= 0 and item not in ids:
                ids.append(item)
        return tuple(ids)

    def _required(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointError(f"{self.where}: the key {key!r} is missing; download the file again or add the key")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> CheckpointError:
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return CheckpointError(f"{self.where}: {key}: expected {expected}, got {shown}; correct the file")
