"""Models that fit together in memory, and the keys that say when a model is loaded. Nothing is started."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from paceline.core.errors import PlanError, RoomError
from paceline.placement import INSTANCES
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.groups import LoadedModel, ReplicaGroupPlan, fit_together, plan_groups, to_unload
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.model_specs import models_of
from tests.decoder.tiny import Workshop

SMALL = INSTANCES["inf2.xlarge"]  # two cores


@pytest.fixture
def home(workshop: Workshop) -> Path:
    return workshop.checkpoint()


def groups(home: Path, *models: dict[str, object], on: Instance = SMALL) -> tuple[ReplicaGroupPlan, ...]:
    shape = {"path": str(home), "n_positions": 64, "amp": "f32", "backend": "eager"}
    return plan_groups(models_of([{**shape, **one} for one in models], folder=Path(), where="test"), on)


def with_draft(name: str, **more: object) -> list[dict[str, object]]:
    return [{"name": name, **more}, {"name": f"{name}-draft", "draft_of": name, "tp_degree": 1}]


def test_the_draft_is_dropped_before_the_context_shrinks(home: Path) -> None:
    (group,) = groups(home, *with_draft("a", tp_degree=2))
    assert group.num_cores == (2,) and "a-draft wants 1 cores" in group.undrafted
    (placed,) = group.plan.placements
    assert placed.model.n_positions == 64
    (group,) = groups(home, *with_draft("a", tp_degree=1))
    assert group.num_cores == (1, 1) and not group.undrafted


def test_an_invalid_draft_is_reported_and_not_dropped(home: Path) -> None:
    with pytest.raises(PlanError, match="got 3"):
        groups(home, {"name": "a"}, {"name": "b", "draft_of": "a", "tp_degree": 3})


def test_an_in_process_draft_is_dropped_too(home: Path) -> None:
    (full,) = groups(home, {"name": "a", "draft": str(home), "tp_degree": 1})
    need = full.plan.placements[0].footprint
    (bare,) = groups(home, {"name": "a", "draft": str(home), "tp_degree": 1}, on=replace(SMALL, memory=need.total - 1))
    assert not bare.plan.placements[0].model.speculative.draft
    assert "a: at tp_degree=1 each core needs 1 bytes more than" in bare.undrafted
    with pytest.raises(RoomError):
        groups(home, {"name": "a", "tp_degree": 1}, on=replace(SMALL, memory=1 << 20))


def test_models_loaded_together_must_fit_together(home: Path) -> None:
    one = groups(home, {"name": "a"}, *with_draft("b"))
    settled = fit_together(one, SMALL)
    assert [group.num_cores for group in settled] == [(1,), (1,)] and "does not fit" in settled[1].undrafted
    on_demand = groups(home, {"name": "a"}, *with_draft("b", load="on_demand"))
    assert fit_together(on_demand, SMALL) == on_demand
    with pytest.raises(RoomError, match="a, b: 3 cores are needed together, and b does not fit"):
        fit_together(groups(home, {"name": "a", "tp_degree": 2}, {"name": "b"}), SMALL)


def test_as_few_models_as_possible_are_evicted(home: Path) -> None:
    large = INSTANCES["inf2.48xlarge"]
    (wanted,) = groups(home, {"name": "w", "tp_degree": 2}, on=large)
    taken = LoadedModel("pinned", {"n": [CoreRange(4, 23)]})
    a, b, c = (
        LoadedModel(name, {"n": [cores]}, movable=True)
        for name, cores in (("a", CoreRange(0, 0)), ("b", CoreRange(1, 1)), ("c", CoreRange(2, 3)))
    )
    assert to_unload(wanted, [taken], {"n": large}) == ()
    assert to_unload(wanted, [a, c, b, taken], {"n": large}) == ("c",), "a alone would leave for nothing"
    assert to_unload(wanted, [a, b, c, taken], {"n": large}) == ("a", "b")
    assert to_unload(wanted, [a, b, c, taken], {"n": large, "other": large}) == (), "there is another node"
    with pytest.raises(RoomError, match="pinned or busy: b, c, pinned"):
        to_unload(wanted, [a, replace(b, movable=False), replace(c, movable=False), taken], {"n": large})


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"pinned": True, "load": "on_demand"}, "never unloaded"),
        ({"pinned": True, "idle_ttl_s": 3}, "never unloaded"),
        ({"load": "later"}, "load: expected 'eager' or 'on_demand'"),
        ({"idle_ttl_s": 0}, "idle_ttl_s: expected greater than 0"),
        ({"autoscaling": {"max_replicas": 2}, "replicas": 2}, r"replicas \(a fixed number\) or autoscaling, got both"),
        ({"autoscaling": {"max_replicas": 2}, "load": "on_demand"}, "min_replicas to 1 or to 0"),
        ({"autoscaling": {"max_replicas": 2}, "idle_ttl_s": 3}, "expected autoscaling.min_replicas: 0"),
        ({"autoscaling": {"max_replicas": 2, "min_replicas": 3}}, "min_replicas: expected at most max_replicas="),
        ({"autoscaling": {"max_replica": 2}}, "autoscaling.max_replica"),
    ],
)
def test_contradictory_keys_are_rejected(home: Path, keys: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        groups(home, {"name": "a", **keys})


def test_a_draft_is_loaded_with_its_target(home: Path) -> None:
    with pytest.raises(PlanError, match="load is a key of targets"):
        groups(home, {"name": "a"}, {"name": "b", "draft_of": "a", "load": "on_demand"})
