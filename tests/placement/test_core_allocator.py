"""The core allocator, mostly without Ray: which requests are void, what a silent one means, and when it ends."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from benchmarks.scale import Cluster, run
from paceline.core.errors import PlanError, WorkerError
from paceline.placement import INSTANCES
from paceline.placement.cluster import core_allocator
from paceline.placement.cluster.core_allocator import CoreAllocator, CoreRequest, call_allocator, end_unused, give_back
from paceline.placement.planning.core_range import CoreRange
from tests.simulation import check_nothing_left

LARGE, SMALL = INSTANCES["inf2.48xlarge"], INSTANCES["inf2.xlarge"]
WHOLE = CoreRange(0, 23)


@pytest.fixture
def simulated() -> Cluster:
    made = Cluster(0)
    made.alive = {"node"}
    return made


def test_the_claim_of_a_caller_that_died_loading_is_released(simulated: Cluster) -> None:
    allocator = CoreAllocator(cluster=simulated)
    allocator.claim("node", LARGE, [CoreRequest("loads", CoreRange(0, 15), startup_timeout_s=60)])
    allocator.claim("node", LARGE, [CoreRequest("dies", CoreRange(16, 23), startup_timeout_s=-1)])
    assert allocator.claim("node", LARGE, [CoreRequest("next", CoreRange(16, 23))]) == [CoreRange(16, 23)]
    assert allocator.taken() == {"node": {"loads": CoreRange(0, 15), "next": CoreRange(16, 23)}}
    allocator.release(["loads", "next"])
    allocator.claim("node", LARGE, [CoreRequest("slow", WHOLE, startup_timeout_s=-1)])
    simulated.workers["slow"] = "node", WHOLE  # late, but there
    assert allocator.taken() == {"node": {"slow": WHOLE}}
    allocator.confirm(["slow"])
    with pytest.raises(PlanError):
        allocator.claim("node", LARGE, [CoreRequest("next", CoreRange(0, 7))])
    simulated.workers.clear()
    assert allocator.taken() == {}


def test_a_lost_node_is_not_reported(simulated: Cluster) -> None:
    """Workers of the node too, though Ray may still have their names: it would start them again, and has no node for
    them.
    """
    alive = simulated.alive = {"node", "other"}
    allocator = CoreAllocator(cluster=simulated)
    for node in sorted(alive):
        allocator.claim(node, LARGE, [CoreRequest(f"at {node}", CoreRange(0, 7))])
        simulated.workers[f"at {node}"] = node, CoreRange(0, 7)
    allocator.confirm(sorted(simulated.workers))
    assert set(allocator.report()) == set(allocator.taken()) == alive
    alive.remove("other")
    assert set(allocator.report()) == set(allocator.taken()) == {"node"}


def test_nodes_of_two_types_have_the_cores_of_their_type(simulated: Cluster) -> None:
    simulated.alive = {"large", "small"}
    allocator = CoreAllocator(cluster=simulated)
    allocator.claim("large", LARGE, [CoreRequest("a", CoreRange(0, 7))])
    allocator.claim("small", SMALL, [CoreRequest("b", CoreRange(0, 0))])
    assert {node: left.free for node, left in allocator.report().items()} == {"large": 16, "small": 1}
    with pytest.raises(PlanError, match="1 cores are free"):
        allocator.claim("small", SMALL, [CoreRequest("c", CoreRange(2, 3))])


def test_the_next_allocator_knows_the_cores_of_actors_with_any_name(simulated: Cluster) -> None:
    """A replica of Ray Serve has a name that Serve gave it, without its cores."""
    allocator = CoreAllocator(cluster=simulated)
    for name in ("SERVE_REPLICA::lives", "SERVE_REPLICA::dies"):
        allocator.claim("node", LARGE, [CoreRequest(name, CoreRange(0, 7))])
    simulated.workers["SERVE_REPLICA::lives"] = None
    following = CoreAllocator(cluster=simulated)
    assert following.taken() == {"node": {"SERVE_REPLICA::lives": CoreRange(0, 7)}}
    assert following.report()["node"].free == 16
    assert following.claim("node", LARGE, [CoreRequest("next", CoreRange(0, 7))]) == [CoreRange(8, 15)]


def test_the_allocator_is_outside_its_callers_placement_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica captures its children into its own group, and the allocator would die with it."""
    options = dict[str, Any]()

    def remote(_: object) -> SimpleNamespace:
        return SimpleNamespace(options=lambda **given: options.update(given) or SimpleNamespace(remote=print))

    monkeypatch.setattr(core_allocator.ray, "remote", remote)
    core_allocator.allocator()
    assert (options["scheduling_strategy"], options["lifetime"]) == ("DEFAULT", "detached")


class Asked:
    """Stands for an actor's handle; what a method answers is what `ray.get` makes of it."""

    def __getattr__(self, method: str) -> object:
        return SimpleNamespace(remote=lambda *_: method)


def test_an_unresponsive_allocator_raises_a_named_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(reference: object, timeout: float) -> object:
        raise ray.exceptions.GetTimeoutError("nothing yet")

    monkeypatch.setattr(ray, "get", silent)
    monkeypatch.setattr(core_allocator, "allocator", Asked)
    with pytest.raises(WorkerError, match=r"did not respond in 0\.5 seconds"):
        call_allocator("report", timeout=0.5)


@pytest.mark.parametrize("deaths", [1, 2])
def test_an_allocator_that_has_just_ended_is_created_again_once(monkeypatch: pytest.MonkeyPatch, deaths: int) -> None:
    """The last user ends it, perhaps while another process claims cores."""
    made = []

    def answer(reference: object, timeout: float) -> object:
        if len(made) <= deaths:
            raise ray.exceptions.ActorDiedError
        return reference

    monkeypatch.setattr(ray, "get", answer)
    monkeypatch.setattr(core_allocator, "allocator", lambda: made.append(Asked()) or made[-1])
    if deaths == 1:
        assert call_allocator("report", timeout=1) == "report"
    else:
        with pytest.raises(WorkerError):
            call_allocator("report", timeout=1)
    assert len(made) == 2


def test_an_allocator_in_use_does_not_end(simulated: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(current_actor="me"))
    monkeypatch.setattr(ray, "kill", ended.append)
    monkeypatch.setattr(core_allocator, "sleep", lambda _: None)
    allocator = CoreAllocator(cluster=simulated)
    allocator.claim("node", LARGE, [CoreRequest("loads", CoreRange(0, 15), startup_timeout_s=60)])
    allocator.end_unused()
    assert not ended
    allocator.release(["loads"])
    allocator.end_unused()
    assert ended == ["me"]


def test_releasing_cores_does_not_create_an_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> object:
        raise ValueError

    monkeypatch.setattr(ray, "get_actor", missing)
    monkeypatch.setattr(core_allocator, "allocator", lambda: pytest.fail("made only to hear that it holds nothing"))
    give_back(["gone"], 1)
    end_unused(1)


def test_the_scale_simulation_runs() -> None:
    report = run(LARGE, 4)
    full, replaced = report["place"], report["replace"]
    assert isinstance(full, dict) and isinstance(replaced, dict)
    assert full["used_share"] > 0.9 and replaced["nodes"] == 4


@pytest.mark.ray
def test_an_allocator_whose_users_were_killed_ends(cluster: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """No user is left to end it. A claim is kept for as long as its worker may still come."""
    monkeypatch.setattr(core_allocator, "_IDLE_S", 0.1)
    allocator, node = core_allocator.allocator(), ray.nodes()[0]["NodeID"]
    ray.get(allocator.claim.remote(node, LARGE, [CoreRequest("dies", CoreRange(0, 7), startup_timeout_s=5)]))
    time.sleep(1)
    assert ray.get(allocator.taken.remote()) == {node: {"dies": CoreRange(0, 7)}}
    check_nothing_left()
