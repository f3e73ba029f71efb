"""The simulated cluster of `benchmarks.scale`, small: no core is given twice, and what was lost comes back."""

from __future__ import annotations

from itertools import chain

import pytest

pytest.importorskip("ray")

from benchmarks.scale import Cluster, Scheduler, models, run
from paceline.placement import INSTANCES
from paceline.placement.planning.groups import plan_groups

LARGE = INSTANCES["inf2.48xlarge"]


def test_a_group_is_a_target_with_its_own_drafts() -> None:
    groups = {group.name: group for group in plan_groups(models(), LARGE)}
    assert {name: group.num_cores for name, group in groups.items()} == {"pair": (8, 2), "alone": (8,), "small": (2,)}
    assert [item.drafts_for for item in groups["pair"].plan.placements] == [(), (("pair", 0),)]


def test_no_core_is_assigned_twice_and_lost_replicas_move() -> None:
    scheduler = Scheduler(LARGE, Cluster(3))
    pair = plan_groups(models(), LARGE)[0]
    assert [scheduler.start(pair) for _ in range(8)] == [True] * 6 + [False] * 2, "two pairs fit a machine"
    for ranges in scheduler.allocator.taken().values():
        cores = list(chain.from_iterable(taken.cores for taken in ranges.values()))
        assert len(cores) == len(set(cores)) and all(taken.first % len(taken) == 0 for taken in ranges.values())
    (node, _), *_ = scheduler.placed.values()
    lost = scheduler.lose([node])
    assert len(lost) == 2 and not any(map(scheduler.start, lost))
    scheduler.cluster.alive.add("new")
    assert all(map(scheduler.start, lost)) and len(scheduler.placed) == 6


def test_the_scale_simulation_runs() -> None:
    report = run(LARGE, 4)
    full, replaced = report["place"], report["replace"]
    assert isinstance(full, dict) and isinstance(replaced, dict)
    assert full["used_share"] > 0.9 and replaced["nodes"] == 4
