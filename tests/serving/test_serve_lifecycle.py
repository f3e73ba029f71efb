"""Calls of an HTTP process to the lifecycle actor, over an actor of this process; decisions are `test_lifecycle`'s."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayTaskError

from paceline.core.errors import WorkerError
from paceline.placement.cluster import core_allocator
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.serving import ray_guard, serve_lifecycle
from paceline.serving.errors import RefusedError, refusal
from paceline.serving.lifecycle import ModelState, ModelUsage
from paceline.serving.middleware import KeyCounts
from paceline.serving.serve_lifecycle import LifecycleActor, ServeLifecycle, ServeLoader, Service
from paceline.serving.serve_router import ServeRouter
from tests.decoder.tiny import Workshop
from tests.serving.test_lifecycle import planned
from tests.waiting import in_loop


def service(home: Path, *models: dict[str, object]) -> Service:
    return Service("paceline", {group.name: group for group in planned(home, *models)}, FaultPolicy())


class Found(ServeLifecycle):
    """Object of this process in place of an actor; None: there is none."""

    def __init__(self, made: Service, actor: object, keys: KeyCounts | None = None) -> None:
        super().__init__(made, needed=True, keys=keys)
        self.actor = actor

    async def _find(self) -> Any:
        if self.actor is None:
            return None
        return SimpleNamespace(
            **{name: SimpleNamespace(remote=getattr(self.actor, name, None)) for name in ("ask", "count")}
        )


@in_loop
async def test_requests_of_a_key_are_counted_across_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_lifecycle, "_PERIOD_S", 0.005)
    made = Service("paceline", {}, FaultPolicy())
    actor, counts = LifecycleActor(made), [KeyCounts(), KeyCounts()]
    watching = [asyncio.ensure_future(Found(made, actor, keys).watch()) for keys in counts]
    with counts[0].one_more("secret"), counts[1].one_more("secret"), counts[1].one_more("other"):
        while [one.total("secret") for one in counts] != [2, 2] or counts[0].total("other") != 1:
            await asyncio.sleep(0.005)
        assert "secret" not in str([one.own() for one in counts])
    while any(one.total(key) for one in counts for key in ("secret", "other")):
        await asyncio.sleep(0.005)
    for one in watching:
        one.cancel()


@in_loop
async def test_requests_of_a_dead_process_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_lifecycle, "_SILENT_S", 0.0)
    actor = LifecycleActor(Service("paceline", {}, FaultPolicy()))
    await actor.count("dead", {"key": 3})
    await asyncio.sleep(0.01)
    assert await actor.count("other", {}) == {}


class Decides:
    """An actor that knows one model."""

    answers = True

    async def ask(self, method: str, *arguments: str) -> object:
        return await getattr(self, method)(*arguments)

    async def states(self) -> list[ModelState]:
        if not self.answers:
            raise ValueError("it is gone")
        return [ModelState("a", "unloaded", "eager", False, False, 0, 0.0, None)]

    async def demand(self, name: str) -> None:
        error = RefusedError(503, f"{name} is unloaded", retry_after_s=30.0)
        raise RayTaskError("demand", "its traceback", error).as_instanceof_cause()

    load = demand


@in_loop
async def test_the_last_operator_decision_overrides_the_file(workshop: Workshop) -> None:
    made = service(workshop.checkpoint(), {"name": "a", "pinned": True}, {"name": "b", "load": "on_demand"})
    edge = Found(made, None)
    states = [(one.state, one.pinned, one.awaited) for one in await edge.states()]
    assert states == [("loaded", True, True), ("unloaded", False, False)]
    await edge.demand("a")  # nobody has to decide: it is there soon
    edge.actor = Decides()
    assert [one.state for one in await edge.states()] == ["unloaded"]
    Decides.answers = False
    assert [one.state for one in await edge.states()] == ["unloaded"], "what was told last"
    for asked in (edge.demand, edge.load):
        with pytest.raises(RefusedError, match="a is unloaded") as refused:
            await asked("a")
        assert refused.value.headers == {"retry-after": "30"}


class Replicas:
    """The handle of a model with several; what each says when it is asked."""

    def __init__(self, *says: object) -> None:
        self.says, self.asked = list(says), list[str]()

    def broadcast(self, method: str, *_: object) -> Any:
        self.asked.append(method)
        return self

    async def results_async(self, **_: object) -> list[object]:
        return self.says


@pytest.mark.parametrize(("says", "leaves"), [([True, True], True), ([True, False], False), ([], False)])
def test_a_model_is_evicted_if_all_replicas_are_idle(workshop: Workshop, says: list[object], leaves: bool) -> None:
    replicas = Replicas(*says)
    made = service(workshop.checkpoint(), {"name": "a"})
    loader = ServeLoader(made, ServeRouter({"a": replicas}))
    assert asyncio.run(loader.leave("a", unless_used=True)) is leaves
    assert replicas.asked == (["leave"] if leaves else ["leave", "stay"])
    assert asyncio.run(loader.leave("a", unless_used=False)), "an operator's word"


def test_model_usage_is_the_sum_over_replicas(workshop: Workshop) -> None:
    made = service(workshop.checkpoint(), {"name": "a"})

    def usage(*says: object) -> ModelUsage | None:
        return asyncio.run(ServeLoader(made, ServeRouter({"a": Replicas(*says)})).usage("a"))

    assert usage(ModelUsage(2, 0.0), ModelUsage(0, 7.0)) == ModelUsage(2, 0.0)
    assert usage(ModelUsage(0, 9.0), ModelUsage(0, 7.0)) == ModelUsage(0, 7.0)
    assert usage() is None, "nobody knows"


# ---- what clients read when a model cannot be loaded: no word of Ray's, which the log has

RAYS = "ray::ServeController.deploy() (pid=4711, ip=10.0.0.1)"


@pytest.fixture
def loader(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> ServeLoader:
    """Over a Ray that fails whatever it is asked."""

    def fails(*_: object, **__: object) -> None:
        raise ValueError(RAYS)

    for module, name in (
        (serve_lifecycle, "model_deployment"), (ray_guard, "scale_deployment"), (serve_lifecycle.serve, "delete")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, fails)
    made = service(workshop.checkpoint(), {"name": "eager"}, {"name": "late", "load": "on_demand"})
    return ServeLoader(made, ServeRouter({}))


@pytest.mark.parametrize("name", ["eager", "late"])
def test_a_failed_load_hides_rays_text(loader: ServeLoader, name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "paceline")
    logging.getLogger("paceline").propagate = True
    with pytest.raises(WorkerError, match=name) as told:
        asyncio.run(loader.load(name))
    assert "4711" not in str(told.value) and "log" in str(told.value)
    assert RAYS in caplog.text
    refused = refusal(told.value)
    assert (refused.status, refused.headers) == (503, {"retry-after": "5"})


def test_an_unresponsive_allocator_is_reported_without_rays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise GetTimeoutError(RAYS)

    monkeypatch.setattr(core_allocator, "allocator", fails)
    with pytest.raises(WorkerError, match=r"did not respond in 3 seconds \(GetTimeoutError\)") as told:
        core_allocator.call_allocator("taken", timeout=3)
    assert "4711" not in str(told.value)
