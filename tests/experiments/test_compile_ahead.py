"""Graphs are compiled before cells are measured: by two processes where that pays, and by one where it does not."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.decoder import environment
from paceline.experiments import compile_ahead as ahead
from paceline.experiments import runner
from paceline.experiments.config import ExperimentConfig
from paceline.experiments.measure import Bench
from tests.experiments.grids import grid, save_models, save_prompts


class FakeBench:
    """Compiles so many graphs for every cell; ``made``: which, by their depths."""

    def __init__(self, graphs: int, failing: int = -1) -> None:
        self.compiled, self.made = 0, list[Any]()
        self._graphs, self._failing = graphs, failing

    def generator(self, cell: Any, prompts: Any) -> None:
        if cell.k == self._failing:
            raise RuntimeError("it does not fit")
        self.compiled += self._graphs
        self.made.append(cell.k)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    save_models(tmp_path)
    save_prompts(tmp_path / "prompts.jsonl")
    return tmp_path


def work_of(home: Path, **changes: Any) -> tuple[ExperimentConfig, list[ahead.Work]]:
    """Four cells: plain decoding, and a draft model of three depths."""
    drafters = ["none", {"name": "model", "draft": str(home / "draft"), "k": [1, 2, 3]}]
    config = ExperimentConfig(**grid(home, drafters=drafters, backend="inductor", **changes))
    return config, [(one.cell, one.prompts) for one in runner.plan(config, None).cells]


def test_the_last_cells_are_compiled_by_another_process(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, usual = tmp_path / "cache", environment.cache_root()
    fresh.mkdir()
    (usual / "native").mkdir(parents=True, exist_ok=True)
    (fresh / "native").symlink_to(usual / "native")  # kernels take longer than all graphs here
    monkeypatch.setenv("PACELINE_CACHE", str(fresh))
    monkeypatch.setattr(environment, "cores", lambda: 2)
    config, work = work_of(home)
    with Bench(config) as bench:
        ahead.compile_ahead(bench, config, work, report=lambda _: None, deadline=math.inf)
        here = bench.compiled
        again = Bench(config)
        for cell, prompts in work:
            again.generator(cell, prompts)
        assert again.compiled == 0
        again.__exit__()
    assert 0 < here < len(list((fresh / "inductor").glob("*/manifest.json")))


def test_where_the_other_process_dies_this_one_compiles_on(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    monkeypatch.setattr(environment, "cores", lambda: 2)
    config, work = work_of(home)
    bench: Any = FakeBench(1, failing=1)
    ahead.compile_ahead(bench, config, work, report=lambda _: None, deadline=math.inf)
    assert bench.made[0] is None and {2, 3} >= set(bench.made[1:])  # what the other one had taken, its cell compiles


@pytest.mark.parametrize(
    ("graphs", "changes", "cores", "share"),
    [(0, {}, 2, 1.0), (1, {"backend": "eager"}, 2, 1.0), (1, {}, 1, 1.0), (1, {}, 2, 0.0)],
    ids=["full cache", "nothing to compile", "one core", "memory is short"],
)
def test_no_other_process_where_it_would_not_pay(
    home: Path, monkeypatch: pytest.MonkeyPatch, graphs: int, changes: dict[str, str], cores: int, share: float
) -> None:
    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    config, work = work_of(home)
    monkeypatch.setattr(subprocess, "Popen", started)
    monkeypatch.setattr(environment, "cores", lambda: cores)
    monkeypatch.setattr(ahead, "_SHARE", share)
    bench: Any = FakeBench(graphs)
    ahead.compile_ahead(bench, config.model_copy(update=changes), work, report=lambda _: None, deadline=math.inf)
    assert bench.made == [None, 1, 2, 3]


def test_no_graph_is_begun_behind_the_deadline(home: Path) -> None:
    config, work = work_of(home)
    bench: Any = FakeBench(1)
    ahead.compile_ahead(bench, config, work, report=lambda _: None, deadline=-math.inf)
    assert not bench.made
