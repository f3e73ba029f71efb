"""Runs the cells of an experiment, one after the other or on a cluster, and stores finished ones.

Models, prompts, lengths and the folder are checked before the first cell. A failed cell is a row with the reason, and
the next one runs. `measure.py` runs a cell.
"""

from __future__ import annotations

import datetime
import json
import logging
import math
import os
import platform
import socket
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

import paceline
from paceline.core.errors import ContextError, PacelineError, PlacementError, StorageError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import LoadOptions
from paceline.decoder.weights.hub import checkpoint_path
from paceline.experiments.config import (
    Cell,
    ExperimentConfig,
    cell_key,
    cells,
    check_models,
    checkpoint_bytes,
    load_options,
    model_paths,
)
from paceline.experiments.prompts import Prompts, load_prompts
from paceline.experiments.store import CellResult, Store
from paceline.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from paceline.experiments.measure import Bench

log = logging.getLogger("paceline")

PartProgress = Callable[[str, int, int], None]
"""Receives the current action, the number of finished cells, and the total."""

_BYTES_PER_SECOND = 1e10
"""Bytes of weights that two cores read per second, for estimates before any measurement."""


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A planned cell: its key on disk, its prompts, and the program that has finished it; None: not finished."""

    cell: Cell
    key: str
    prompts: Prompts
    finished_by: str | None

    @property
    def finished(self) -> bool:
        return self.finished_by is not None


@dataclass(frozen=True, slots=True)
class ExperimentPlan:
    """Cells to run. ``warnings``: about prompts, each once."""

    config: ExperimentConfig
    cells: tuple[PlannedCell, ...]
    fingerprints: dict[str, str]

    @property
    def warnings(self) -> tuple[str, ...]:
        every = (f"{one.prompts.name}: {line}" for one in self.cells for line in one.prompts.warnings)
        return tuple(dict.fromkeys(every))

    def of_other_programs(self) -> str:
        """Return how many finished cells other versions or commits have made, per version; "" if none."""
        now = _program(provenance())
        others = Counter(one.finished_by for one in self.cells if one.finished_by not in (None, now))
        if not others:
            return ""
        listed = "; ".join(f"{count} by {name or 'an unknown program'}" for name, count in others.items())
        return f"finished cells were made by another version: {listed}; this is {now}"

    def estimated_seconds(self, store: Store | None) -> float:
        """A rough estimate of what is left: as the finished cells took, else from the size of the models."""
        seconds = 0.0
        measured = [
            result.totals["wall_seconds"] / max(1, result.totals["new_tokens"])
            for one in self.cells
            if store is not None and (result := store.load(one.key)) is not None
        ]
        for one in self.cells:
            if one.finished:
                continue
            tokens = len(one.prompts.rows) * self.config.max_new_tokens
            if measured:
                seconds += tokens * sum(measured) / len(measured)
                continue
            runs = self.config.repeats * (2 if self.config.baseline and not one.cell.drafter.plain else 1) + 1
            seconds += runs * tokens * checkpoint_bytes(one.cell.target.path) / _BYTES_PER_SECOND
        return seconds


def plan(config: ExperimentConfig, store: Store | None) -> ExperimentPlan:
    """Check everything, or raise CheckpointError, PromptError or ContextError (a prompt that is too long)."""
    fingerprints = check_models(config)
    prompts: dict[tuple[str, str], Prompts] = {}
    planned = []
    for cell in cells(config):
        which = (cell.target.path, cell.prompts.model_dump_json())
        if which not in prompts:
            prompts[which] = _fitting(cell, config)
        cell_prompts = prompts[which]
        models = tuple(fingerprints[path] for path in model_paths(cell))
        key = cell_key(cell, config, prompts=cell_prompts.content, models=models)
        kept = None if store is None else store.load(key)
        planned.append(PlannedCell(cell, key, cell_prompts, None if kept is None else _program(kept.provenance)))
    return ExperimentPlan(config, tuple(planned), fingerprints)


def _fitting(cell: Cell, config: ExperimentConfig) -> Prompts:
    """The prompts of a cell's set, all of which leave room for their texts."""
    model = ModelConfig.from_pretrained(checkpoint_path(cell.target.path))
    prompts = load_prompts(cell.prompts, load_tokenizer(Path(cell.target.path)), model.vocab_size)
    room = LoadOptions(**load_options(config, cell.target)).longest(model.max_position_embeddings)
    for row in prompts.rows:
        if len(row.ids) + config.max_new_tokens > room:
            raise ContextError(
                f"n_positions: expected at most {room} positions of {cell.target.label}, got {len(row.ids)} tokens "
                f"of prompt {row.key} in {cell.prompts.label} and {config.max_new_tokens} new ones; remove the "
                "prompt, lower max_new_tokens or raise n_positions"
            )
    return prompts


def run(planned: ExperimentPlan, store: Store, report: PartProgress, *, deadline: float = math.inf) -> list[CellResult]:
    """Run unfinished cells. -> all cells, failed ones with their error

    deadline  of `time.monotonic`, after which no cell begins in this process; the rest are then not returned. Without
              ``runs`` none begins

    Raises:
        StorageError: a result cannot be written; finished cells stay. PlanError, WorkerError: as `_run_parallel`
    """
    if not planned.config.runs:
        planned = replace(planned, cells=())
    listing = {
        "config": json.loads(planned.config.model_dump_json()),
        "cells": [one.key for one in planned.cells],
        "fingerprints": planned.fingerprints,
    }
    store.write("experiment.json", json.dumps(listing, indent=1))
    found = {one.key: kept for one in planned.cells if one.finished and (kept := store.load(one.key)) is not None}
    left = [one for one in planned.cells if one.key not in found]
    done, total = len(planned.cells) - len(left), len(planned.cells)
    results = _in_turn(planned.config, left, report, done=done, deadline=deadline)
    if planned.config.ray is not None and left:
        results = _run_parallel(planned.config, left, address=planned.config.ray)
    for index, result in results:
        store.save(result)
        found[result.key] = result
        done += 1
        report(left[index].cell.title(), done, total)
    report("done", total, total)
    return [found[one.key] for one in planned.cells if one.key in found]


def _in_turn(
    config: ExperimentConfig, cells: Sequence[PlannedCell], report: PartProgress, *, done: int, deadline: float
) -> Iterator[tuple[int, CellResult]]:
    """In this process. ``done``: cells that were finished before."""
    from paceline.experiments.measure import Bench

    with Bench(config) as bench:
        for index, one in enumerate(cells):
            if monotonic() > deadline:
                return
            report(one.cell.title(), done + index, done + len(cells))
            yield index, _run_cell(one, bench)


def _run_cell(planned: PlannedCell, bench: Bench) -> CellResult:
    """Run one cell; an error in it is part of its result, but for those that would affect every other cell too."""
    names, source = planned.cell.names(), provenance()
    try:
        rows, totals = bench.measure(planned.cell, planned.prompts)
    except (StorageError, MemoryError, PlacementError):
        raise
    except (PacelineError, RuntimeError, ValueError, ArithmeticError, LookupError) as error:
        log.warning("cell %s failed: %s", planned.cell.title(), error)
        return CellResult(planned.key, names, provenance=source, error=f"{type(error).__name__}: {error}")
    return CellResult(planned.key, names, rows, totals, source, warnings=planned.prompts.warnings)


def failed(results: Sequence[CellResult]) -> list[CellResult]:
    return [result for result in results if result.error is not None]


def _worker(config: ExperimentConfig, folder: str) -> Callable[[PlannedCell], CellResult]:
    """Make what runs cells in a worker. ``folder``: to which the paths of the experiment are relative."""
    from paceline.experiments.measure import Bench

    os.chdir(folder)
    return partial(_run_cell, bench=Bench(config))


def _run_parallel(
    config: ExperimentConfig, cells: Sequence[PlannedCell], *, address: str
) -> Iterator[tuple[int, CellResult]]:
    """Run cells on a Ray cluster: each worker has separate cores and keeps its decoders from cell to cell. The calling
    process writes results as they arrive. -> (index in ``cells``, result), as they finish

    address  as in `paceline.placement.cluster.jobs.JobWorkers`, whose PlanError and WorkerError it raises
    """
    from paceline.placement.cluster.jobs import JobWorkers

    make = partial(_worker, config, str(Path.cwd()))
    count = min(len(cells), config.cells_at_once or len(cells))
    with JobWorkers(make, address=address, degree=config.cores_per_cell, count=count) as workers:
        for outcome in workers.run(cells):
            one = cells[outcome.index]
            lost = CellResult(one.key, one.cell.names(), provenance=provenance(), error=outcome.error)
            yield outcome.index, lost if outcome.error is not None else outcome.result


_PROGRAM = {"paceline_version": "paceline", "git_commit": "commit", "torch": "torch", "transformers": "transformers"}


def provenance() -> dict[str, object]:
    import torch

    return {
        "paceline_version": paceline.__version__,
        "git_commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
        "machine": socket.gethostname(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _program(source: Mapping[str, object]) -> str:
    """Return the part of a provenance that names the program: results of two programs may differ."""
    return ", ".join(f"{name} {source[key]}" for key, name in _PROGRAM.items() if source.get(key))


@cache
def commit() -> str:
    """The commit of the sources, marked where they were changed since; "" for an installed package."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=10
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    head = git("rev-parse", "--short=12", "HEAD")
    if not head:
        return ""
    return head + ("-dirty" if git("status", "--porcelain", "--untracked-files=no") else "")


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
