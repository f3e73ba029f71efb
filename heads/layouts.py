"""How heads stand in files, as data: keys of a config.json, names of tensors. Checked without PyTorch.

A key that changes what a head computes and adds no tensor would be lost without a word, and the head would draft badly.
So every key of heads is in a table: it is read, says nothing about the computation, or must have the one value that
changes nothing. All others are refused by name. A key whose value is null counts as absent.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import CheckpointError, ConfigurationError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields, read_json_object
from paceline.decoder.weights.atomic_write import atomic_write

CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class MustBe:
    """A key that is understood with some of its values only; ``meaning`` says what another one asks for."""

    values: tuple[object, ...]
    meaning: str


@dataclass(frozen=True, slots=True)
class Keys:
    """What a config.json of heads may hold.

    of      whose settings they are, for people
    known   keys that are read, or have no meaning for drafting
    others  keys that must have one value
    begin   with what keys of heads begin, where the target's stand beside them
    """

    of: str
    known: Set[str]
    others: Mapping[str, MustBe] = field(default_factory=dict)
    begin: str = ""

    def check(self, fields: Fields) -> None:
        """Raise UnknownArchitectureError unless every key is understood."""
        for key, value in fields.values.items():
            if value is None or not key.startswith(self.begin):
                continue
            rule = self.others.get(key)
            if rule is None and key not in self.known:
                raise UnknownArchitectureError(
                    f"{fields.where}: {key!r} is not a setting of {self.of} known here, and passing over it could make "
                    "it draft badly; remove it if it has no effect"
                )
            if rule is not None and not any(type(value) is type(one) and value == one for one in rule.values):
                raise UnknownArchitectureError(
                    f"{fields.where}: {key} = {json.dumps(value)} is not supported: {rule.meaning}; use a head with "
                    f"{key} = {json.dumps(rule.values[0])}"
                )


def read_config(folder: Path) -> Fields:
    """The config.json of a folder.

    Raises:
        CheckpointError: there is none, or it is no JSON object.
    """
    return Fields(read_json_object(folder / CONFIG), str(folder / CONFIG))


def write_json(path: Path, values: object, *, indent: int | None = None) -> None:
    """A JSON file.

    Raises:
        StorageError: it cannot be written.
    """
    with atomic_write(path):
        path.write_text(json.dumps(values, indent=indent) + "\n", encoding="utf-8")


def check_layout(layout: str, layouts: Iterable[str]) -> None:
    """Raise ConfigurationError unless there is such a layout."""
    if layout not in layouts:
        raise ConfigurationError(f"layout={layout!r} is unknown; use one of {', '.join(layouts)}")


Prefixes = Sequence[tuple[str, str]]
"""What our names of tensors begin with, and what a layout has in its place."""


def foreign_name(name: str, prefixes: Prefixes) -> str:
    """The name that a layout has for one of our tensors."""
    return next((theirs + name.removeprefix(ours) for ours, theirs in prefixes if name.startswith(ours)), name)


def own_name(name: str, prefixes: Prefixes) -> str:
    """Our name of a tensor."""
    return foreign_name(name, [(theirs, ours) for ours, theirs in prefixes])


def sources(names: Mapping[str, str | None]) -> dict[str, str]:
    """From the names in a checkpoint to ours (None: it means nothing here) -> from ours to those.

    Raises:
        CheckpointError: two names mean the same tensor.
    """
    found: dict[str, str] = {}
    for name, own in names.items():
        if own in found:
            raise CheckpointError(f"{found[own]} and {name} are both {own}; keep one layout in one folder")
        if own is not None:
            found[own] = name
    return found
