"""One lifecycle for several processes of HTTP: what one of them is told or uses, all know. Two of them over one loader,
in one event loop; the loader is that of `test_lifecycle`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from paceline.core.errors import WorkerError
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.planning.groups import plan_groups
from paceline.placement.planning.model_specs import models_of
from paceline.serving import lifecycle, serve_lifecycle
from paceline.serving.deployments import Service
from paceline.serving.lifecycle import ModelLifecycle, ModelState, Report, View
from paceline.serving.middleware import KeyCounts
from paceline.serving.refused import RefusedError
from paceline.serving.serve_lifecycle import RayOwner, SharedLifecycle
from tests.decoder.tiny import Workshop
from tests.serving.test_lifecycle import MACHINE, PlannedLoader


class Owner:
    """A `paceline.serving.serve_lifecycle.Owner` of this process. ``asked``: what has cost a request a call."""

    def __init__(self, loader: PlannedLoader) -> None:
        self.loader, self.asked, self.answers = loader, list[str](), True
        self.begin()

    def begin(self) -> None:
        """Another process has the lifecycle now."""
        groups = self.loader.groups.items()
        self.lifecycle = ModelLifecycle(self.loader, {name: one.residency for name, one in groups}, shared=True)

    async def exchange(self, process: str, report: Report) -> View | None:
        if not self.answers:
            raise WorkerError("it is gone")
        return self.lifecycle.reported(process, report)

    async def demand(self, name: str) -> None:
        self.asked.append(name)
        await self.lifecycle.demand(name)

    async def load(self, name: str) -> ModelState:
        return await self.lifecycle.load(name)

    async def unload(self, name: str) -> ModelState:
        return await self.lifecycle.unload(name)

    async def pin(self, name: str, pinned: bool) -> ModelState:
        return await self.lifecycle.pin(name, pinned=pinned)

    def edge(self, keys: KeyCounts | None = None) -> SharedLifecycle:
        """What a process of HTTP has."""
        return SharedLifecycle(self, {name: one.residency for name, one in self.loader.groups.items()}, keys=keys)


def owner_of(home: Path, *models: dict[str, object]) -> Owner:
    entries = [{"path": str(home), "n_positions": 64, "amp": "f32", "backend": "eager", **model} for model in models]
    return Owner(PlannedLoader(plan_groups(models_of(entries, folder=Path(), where="test"), MACHINE)))


@pytest.fixture
def home(workshop: Workshop) -> Path:
    return workshop.checkpoint()


@pytest.fixture(autouse=True)
def short_periods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "_SETTLE_S", 0.1)
    monkeypatch.setattr("paceline.serving.serve_lifecycle.PERIOD_S", 0.02)


@contextmanager
def reporting(*edges: SharedLifecycle) -> Iterator[None]:
    """While they say what they use, and hear what is decided."""
    with ExitStack() as tasks:
        for edge in edges:
            tasks.callback(asyncio.ensure_future(edge.watch()).cancel)
        yield


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(4000):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("it never came to be")


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await asyncio.wait_for(test(), 60)

    asyncio.run(whole())


async def use(edge: SharedLifecycle, name: str) -> None:
    async with edge.use(name):
        pass


def test_a_process_without_requests_does_not_unload_what_another_uses(home: Path) -> None:
    owner = owner_of(home, {"name": "a", "idle_ttl_s": 0.4}, {"name": "b", "idle_ttl_s": 0.4})

    async def both() -> None:
        busy, idle = owner.edge(), owner.edge()
        with reporting(busy, idle):
            watching = asyncio.ensure_future(owner.lifecycle.watch())
            await use(idle, "b")
            async with busy.use("a"):
                await until(lambda: "b" not in owner.loader.servers)
            for _ in range(20):
                await use(busy, "a")
                await asyncio.sleep(0.05)
                assert "a" in owner.loader.servers
            assert not owner.asked, "a request for a loaded model asks nobody"
            await until(lambda: "a" not in owner.loader.servers)
            watching.cancel()

    run(both)


def test_what_one_process_loads_pins_or_unloads_all_know(home: Path) -> None:
    owner = owner_of(home, {"name": "a"}, {"name": "c", "load": "on_demand"})

    async def both() -> None:
        first, second = owner.edge(), owner.edge()
        with reporting(first, second):
            await use(first, "c")
            await until(lambda: second.states()[1].state == "loaded")
            await use(second, "c")
            assert (owner.loader.loads, owner.asked) == (["c"], ["c"])
            await first.pin("a", pinned=True)
            with pytest.raises(RefusedError, match="a is pinned"):
                await second.unload("a")
            await second.pin("a", pinned=False)
            assert (await second.unload("a")).state == "unloaded" and first.states()[0].state != "loaded"
            with pytest.raises(RefusedError, match="an operator has to load it"):
                await use(first, "a")

    run(both)


def test_requests_that_begin_before_their_process_is_told_keep_the_model(home: Path) -> None:
    """Of a process that has not heard yet that the model is about to leave: nobody has heard of its request either."""
    owner = owner_of(home, {"name": "a", "idle_ttl_s": 0.05}, {"name": "b"}, {"name": "c", "load": "on_demand"})

    async def late() -> None:
        edge = owner.edge()
        await edge.restore()
        await asyncio.sleep(0.15)
        async with edge.use("b"):
            await edge.restore()
            unloading = asyncio.ensure_future(owner.lifecycle.unload_idle())
            await until(lambda: owner.lifecycle.states()[0].state == "unloading")
            async with edge.use("a"):
                assert not owner.asked and edge.states()[0].state == "loaded", "it is not told yet"
                for _ in range(2):  # the first tells it, the second tells of its request
                    assert not unloading.done()
                    await edge.restore()
                await unloading
                assert "a" in owner.loader.servers and owner.lifecycle.states()[0].state == "loaded"
                with reporting(edge), pytest.raises(RefusedError, match="no node has room"):
                    await owner.lifecycle.demand("c")

    run(late)


def test_a_process_that_is_gone_is_not_waited_for(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "SILENT_S", 0.2)
    owner = owner_of(home, {"name": "a"}, {"name": "c", "load": "on_demand"})

    async def gone() -> None:
        edge, dead = owner.edge(), owner.edge()
        with reporting(edge):
            async with dead.use("a"):
                await dead.restore()
                assert owner.lifecycle.states()[0].running == 1
                assert (await edge.unload("a")).running == 0

    run(gone)


def test_models_are_served_while_nobody_decides_and_its_successor_knows_who_uses_what(home: Path) -> None:
    owner = owner_of(home, {"name": "a", "idle_ttl_s": 0.05}, {"name": "b"})

    async def lost() -> None:
        edge = owner.edge()
        await edge.restore()
        with reporting(edge):
            owner.answers = False
            async with edge.use("a"):
                owner.begin()
                unloading = asyncio.ensure_future(owner.lifecycle.unload("b"))
                await asyncio.sleep(0.05)
                assert "b" in owner.loader.servers, "others may use it, who have not found it yet"
                owner.answers = True
                await unloading
                await asyncio.sleep(0.1)
                await owner.lifecycle.unload_idle()
                assert set(owner.loader.servers) == {"a"}
            with pytest.raises(RefusedError, match="an operator has to load it"):
                await use(edge, "b")

    run(lost)


def test_requests_of_a_key_count_wherever_they_came_in(home: Path) -> None:
    owner = owner_of(home, {"name": "a"})

    async def both() -> None:
        counts = [KeyCounts(), KeyCounts()]
        edges = [owner.edge(keys) for keys in counts]
        with counts[0].one_more("secret"), counts[1].one_more("secret"), counts[1].one_more("other"):
            for edge in (*edges, *edges):
                await edge.restore()
            assert [one.total("secret") for one in counts] == [2, 2] and counts[0].total("other") == 1
            assert "secret" not in str([one.own() for one in counts])
        for edge in (*edges, *edges):
            await edge.restore()
        assert [one.total(key) for one in counts for key in ("secret", "other")] == [0] * 4

    run(both)


def test_a_process_that_knows_nothing_yet_waits_until_the_owner_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new process of HTTP, beside much else: what the models file says is not what an operator decided."""
    monkeypatch.setattr(serve_lifecycle, "_ANSWER_S", 0.02)

    class Slow:
        """An actor of Ray, as far as a call goes."""

        async def remote(self, *_: object) -> View:
            await asyncio.sleep(0.2)
            return View(7, [])

    class Found(RayOwner):
        async def _find(self) -> object:
            return SimpleNamespace(exchange=Slow())

    async def ask() -> None:
        owner = Found(Service("a", {}, FaultPolicy()), needed=True)
        assert await owner.exchange("p", Report()) == View(7, [])
        with pytest.raises(WorkerError):  # what was told last holds, so nobody waits for it
            await owner.exchange("p", Report())

    asyncio.run(ask())
