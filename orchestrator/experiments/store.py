"""The folder of an experiment: a file for every finished cell, each written atomically.

    DIR/experiment.json     the configuration
    DIR/cells/KEY.json      a finished cell: its names, its rows, or why it failed
    DIR/traces/             recorded traces
    DIR/results.jsonl, results.parquet, report.md, report.html     made of the cells

A killed process loses only its current cell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigurationError, StorageError
from paceline.decoder.weights.atomic_write import atomic_write, save_bytes
from paceline.experiments.config import ExperimentConfig, parse_config

VERSION = 1
"""Version of the layout of cell files."""

Row = dict[str, Any]

_LISTING = "experiment.json"


@dataclass(frozen=True, slots=True)
class CellResult:
    """A cell that has run.

    key     name of its file
    rows    one for every prompt
    totals  figures of the whole cell
    error   reason why it has no rows; None: it has
    """

    key: str
    names: Mapping[str, object]
    rows: Sequence[Row] = ()
    totals: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)
    error: str | None = None
    warnings: Sequence[str] = ()


class Store:
    """Cell files in a folder, which is created and tested at once; StorageError: it is not writable."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.cells, self.traces = folder, folder / "cells", folder / "traces"
        probe = self.cells / ".probe"
        with atomic_write(probe):
            probe.parent.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"\0" * 4096)
            probe.unlink()

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        save_bytes(path, [text.encode()])
        return path

    def save(self, result: CellResult) -> None:
        text = json.dumps({"version": VERSION, **asdict(result)}, default=str)
        save_bytes(self.cells / f"{result.key}.json", [text.encode()])

    def load(self, key: str) -> CellResult | None:
        """A finished cell; None if there is none, or if it failed and should be tried again; errors as `peek`."""
        result = self.peek(key)
        return None if result is None or result.error is not None else result

    def peek(self, key: str) -> CellResult | None:
        """The same, failed cells included; StorageError: its file is damaged or of another version."""
        path = self.cells / f"{key}.json"
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StorageError(f"{path}: the file cannot be read ({error}); remove it to run the cell again") from error
        if not isinstance(values, dict) or values.pop("version", None) != VERSION:
            raise StorageError(
                f"{path}: expected a file of this version, got another; give another folder, or remove the file"
            )
        try:
            return CellResult(**values)
        except TypeError as error:
            raise StorageError(f"{path}: expected a cell, got {error}; remove it to run the cell again") from error


def read_results(folder: Path) -> list[CellResult]:
    """All finished cells of an experiment's folder, in order; errors as `_listing`."""
    keys = _listing(folder)["cells"]
    store = Store(folder)
    return [result for key in keys if (result := store.peek(key)) is not None]


def read_config(folder: Path) -> ExperimentConfig:
    """Configuration of an experiment's folder; errors as `_listing`."""
    return parse_config(_listing(folder)["config"], str(folder / _LISTING))


def _listing(folder: Path) -> Mapping[str, Any]:
    """Configuration and cells of a folder; ConfigurationError: it holds no experiment."""
    listed = folder / _LISTING
    if not listed.is_file():
        raise ConfigurationError(
            f"{folder}: expected an experiment, got none; give the --out folder of `paceline experiment run`"
        )
    try:
        values = json.loads(listed.read_text(encoding="utf-8"))
        return {"config": values["config"], "cells": values["cells"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{listed}: the file cannot be read ({error!r}); run `paceline experiment run` again, which writes it "
            "and keeps finished cells"
        ) from error


def flat_rows(results: Sequence[CellResult]) -> Iterator[Row]:
    """One flat row for every prompt of every cell, with the cell's names and provenance; failed cells have one row."""
    for result in results:
        shared = {"cell": result.key, **result.names}
        source = dict(result.provenance)
        if result.error is not None:
            yield {**shared, "error": result.error, **source}
        for row in result.rows:
            yield {**shared, **row, "error": None, **source}
