"""Cells on a cluster: each on cores of its own, one that fails or loses its worker alone, and found again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from paceline.core.errors import PlanError
from paceline.experiments import runner
from paceline.experiments.config import ExperimentConfig
from paceline.experiments.store import Store
from tests.experiments.grids import grid, save_models, save_prompts

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("nothing_left")]


def job(folder: Path, name: str) -> object:
    """What a worker is asked for: its cores, an error, or its own end the first time."""
    if name == "raise":
        raise ValueError("no such cell")
    first = folder / f"{name}.seen"
    if name == "dies once" and not first.exists():
        first.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2)  # so that no worker does all
    return os.environ["PACELINE_CORES"], len(os.sched_getaffinity(0))


def make(folder: Path) -> Callable[[str], object]:
    return partial(job, folder)


def test_jobs_have_cores_of_their_own_and_fall_alone(cluster: object, tmp_path: Path) -> None:
    from paceline.placement.cluster.core_allocator import call_allocator
    from paceline.placement.cluster.jobs import JobWorkers

    jobs = ["a", "raise", "b", "dies once", "c", "d"]
    with JobWorkers(partial(make, tmp_path), address="auto", degree=1, count=2) as workers:
        assert len(workers) == 2
        (ranges,) = call_allocator("taken", timeout=30).values()
        assert len(set(ranges.values())) == 2, "the allocator gave each a core of its own"
        found = {jobs[one.index]: one for one in workers.run(jobs)}
    assert len(found) == len(jobs)
    assert found["raise"].error == "ValueError: no such cell"
    good = [found[name] for name in ("a", "b", "c", "d", "dies once")]
    assert all(one.error is None for one in good)
    assert {one.result for one in good} >= {("0", 1), ("1", 1)} or os.cpu_count() == 1
    with pytest.raises(PlanError, match="no node"), JobWorkers(make, address="auto", degree=1000, count=1):  # type: ignore[arg-type]
        pass


def test_a_grid_on_a_cluster_has_the_tokens_of_one_process(cluster: object, tmp_path: Path) -> None:
    save_models(tmp_path)
    save_prompts(tmp_path / "prompts.jsonl")
    drafters = ["none", "suffix", {"draft": str(tmp_path / "draft"), "k": [3, 500]}]
    values = grid(tmp_path, drafters=drafters, prompt_sets={"path": str(tmp_path / "prompts.jsonl"), "count": 2})
    here, there = (
        runner.run(runner.plan(config, store), store, lambda *_: None)
        for config, store in (
            (ExperimentConfig(**values), Store(tmp_path / "a")),
            (ExperimentConfig(**values, ray="auto", cells_at_once=2), Store(tmp_path / "b")),
        )
    )
    assert [one.key for one in here] == [one.key for one in there], "a cell is the same, wherever it runs"
    assert [one.error is None for one in there] == [True, True, True, False]
    assert "501 rows" in str(there[3].error)
    assert [[row["tokens"] for row in one.rows] for one in here] == [
        [row["tokens"] for row in one.rows] for one in there
    ]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "b" / "cells").iterdir()}
    store = Store(tmp_path / "b")
    again = runner.run(runner.plan(ExperimentConfig(**values), store), store, lambda *_: None)
    changed = {path.stem for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert changed == {again[3].key}, "what a cluster finished is found by one process"
