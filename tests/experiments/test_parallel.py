"""Cells on a cluster: each on separate cores; one that fails or loses its worker or node fails without the others, and
is found again.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group, remove_placement_group

from paceline.core.errors import PlanError
from paceline.experiments import runner
from paceline.experiments.config import ExperimentConfig
from paceline.experiments.store import Store
from paceline.placement.cluster.core_allocator import call_allocator
from paceline.placement.cluster.jobs import JobResult, JobWorkers
from tests.experiments.grids import grid, save_models, save_prompts
from tests.experiments.node_jobs import BEGAN, DOOMED, make
from tests.simulation import CORES, STORE
from tests.waiting import until

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("nothing_left")]


@pytest.mark.full
def test_a_lost_node_or_worker_fails_only_its_job(cluster: Cluster, tmp_path: Path) -> None:
    """Two cores on one node and one on another, which is lost: its cells run elsewhere, and the others continue."""
    ours = ray.get_runtime_context().get_node_id()
    others = placement_group([{"neuron_cores": float(CORES - 2)}])
    assert others.wait(30)
    small = cluster.add_node(num_cpus=0, resources={"neuron_cores": 1}, object_store_memory=STORE)
    (tmp_path / DOOMED).write_text(small.node_id)
    jobs = ["a", "raise", "b", "c", "d", "die"]
    found: dict[str, JobResult] = {}
    try:
        with JobWorkers(partial(make, tmp_path), address="auto", degree=1, count=3) as workers:
            assert len(workers) == 3
            taken = call_allocator("taken", timeout=30)
            assert len(set(taken[ours].values())) == 2, "the allocator gave each a core of its own"
            assert len(taken[small.node_id]) == 1
            for outcome in workers.run(jobs):
                if not found:
                    until((tmp_path / BEGAN).exists, 60, what="nothing runs on the small node")
                    cluster.remove_node(small, allow_graceful=False)
                assert jobs[outcome.index] not in found
                found[jobs[outcome.index]] = outcome
        with pytest.raises(PlanError, match="no node"), JobWorkers(make, address="auto", degree=1000, count=1):  # type: ignore[arg-type]
            pass
    finally:
        remove_placement_group(others)
        if small in cluster.worker_nodes:
            cluster.remove_node(small, allow_graceful=False)
    assert found.keys() == set(jobs)
    assert found["raise"].error == "ValueError: no such cell"
    assert str(found["die"].error).startswith("its worker was lost 2 times: ")
    good = [found[name] for name in ("a", "b", "c", "d")]
    assert all(one.error is None for one in good)
    assert {one.result for one in good} <= {(ours, "0", 1), (ours, "1", 1)} or os.cpu_count() == 1


def test_a_grid_on_a_cluster_has_the_tokens_of_one_process(cluster: Cluster, tmp_path: Path) -> None:
    save_models(tmp_path)
    save_prompts(tmp_path / "prompts.jsonl")
    drafters = ["none", {"draft": str(tmp_path / "draft"), "k": [3, 500]}]
    values = grid(tmp_path, drafters=drafters, prompt_sets={"path": str(tmp_path / "prompts.jsonl"), "count": 2})
    here, there = (
        runner.run(runner.plan(config, store), store, lambda *_: None)
        for config, store in (
            (ExperimentConfig(**values), Store(tmp_path / "a")),
            (ExperimentConfig(**values, ray="auto", cells_at_once=2), Store(tmp_path / "b")),
        )
    )
    assert [one.key for one in here] == [one.key for one in there], "a cell is the same, wherever it runs"
    assert [one.error is None for one in there] == [True, True, False]
    assert "verified tokens (k + 1), got 501" in str(there[2].error)
    assert [[row["tokens"] for row in one.rows] for one in here] == [
        [row["tokens"] for row in one.rows] for one in there
    ]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "b" / "cells").iterdir()}
    store = Store(tmp_path / "b")
    again = runner.run(runner.plan(ExperimentConfig(**values), store), store, lambda *_: None)
    changed = {path.stem for path, when in before.items() if path.stat().st_mtime_ns != when}
    assert changed == {again[2].key}, "what a cluster finished is found by one process"
