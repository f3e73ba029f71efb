"""Models that come and go: on demand, by an operator, when idle, and to make room. The planner says what fits; the
models are scripted, and loading one is making it.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from typer.testing import CliRunner

from paceline.cli.main import app as command_line
from paceline.core.errors import WorkerError
from paceline.engine.request import TargetLimits
from paceline.placement import INSTANCES
from paceline.placement.planning.groups import LoadedModel, ReplicaGroupPlan, plan_groups, to_unload
from paceline.placement.planning.model_specs import models_of
from paceline.placement.planning.planner import plan
from paceline.serving import replica, serve_router
from paceline.serving.api import create_app
from paceline.serving.lifecycle import Decisions, ModelLifecycle, ModelUsage
from paceline.serving.model_server import ModelServer
from paceline.serving.serve_router import ServeRouter
from paceline.serving.settings import ApiSettings
from tests.decoder.tiny import Workshop
from tests.serving.edge import POSITIONS, ScriptedEngine, card, chat_tokenizer, running
from tests.serving.replicas import BareReplica, LocalHandle

MACHINE = replace(INSTANCES["cpu"], devices=2)  # two models of one core


class PlannedLoader:
    """A `paceline.serving.lifecycle.ModelLoader` of this process."""

    def __init__(self, groups: Sequence[ReplicaGroupPlan]) -> None:
        self.groups = {group.name: group for group in groups}
        self.replicas: dict[str, BareReplica] = {}
        self.engines: dict[str, ScriptedEngine] = {}
        self.residents: dict[str, LoadedModel] = {}
        self.broken: set[str] = set()
        self.gate, self.loads = threading.Event(), list[str]()
        self.kept, self.keeps = Decisions(), True
        self.gate.set()
        for group in groups:
            if group.min_replicas:
                self._make(group.name)

    async def load(self, name: str) -> None:
        self.loads.append(name)
        await asyncio.to_thread(self.gate.wait, 20)
        if name in self.broken:
            raise WorkerError(f"{name} did not start")
        self._make(name)

    async def unload(self, name: str) -> None:
        del self.replicas[name], self.residents[name]

    async def loaded(self) -> Sequence[str]:
        return list(self.replicas)

    async def usage(self, name: str) -> ModelUsage | None:
        return await self.replicas[name].usage()

    async def leave(self, name: str, *, unless_used: bool) -> bool:
        return await self.replicas[name].leave(unless_used)

    async def to_unload(self, name: str, movable: Sequence[str]) -> Sequence[str]:
        stay = [one for other, one in self.residents.items() if other not in movable]
        leave = [replace(self.residents[other], movable=True) for other in movable]
        return to_unload(self.groups[name], [*leave, *stay], {"here": MACHINE})

    async def remember(self, decisions: Decisions) -> None:
        if not self.keeps:
            raise WorkerError("nobody keeps it")
        self.kept = decisions

    async def remembered(self) -> Decisions:
        return self.kept

    def _make(self, name: str) -> None:
        taken = [run for one in self.residents.values() for run in one.cores["here"]]
        placed = plan([item.model for item in self.groups[name].plan.placements], MACHINE, taken=taken)
        self.residents[name] = LoadedModel(name, {"here": [item.cores for item in placed.placements]})
        tokenizer = chat_tokenizer()
        engine = self.engines[name] = ScriptedEngine(tokenizer, lambda _: f"I am {name}")
        limits = TargetLimits(len(tokenizer), POSITIONS, (0,))
        server = ModelServer(tokenizer, engine, limits, card=replace(card(), name=name))  # type: ignore[arg-type]
        self.replicas[name] = BareReplica(server)


class Service:
    """A client of a service, and its loader."""

    def __init__(self, client: httpx.Client, loader: PlannedLoader, address: str) -> None:
        self.client, self.loader, self.address = client, loader, address

    def ask(self, name: str) -> httpx.Response:
        return self.client.post("/v1/completions", json={"model": name, "prompt": "x"})

    def say(self, action: str, name: str, **more: object) -> httpx.Response:
        return self.client.post(f"/admin/models/{action}", json={"model": name, **more})

    def states(self) -> dict[str, str]:
        return {one["name"]: one["state"] for one in self.client.get("/admin/models").json()["models"]}

    def command(self, *line: str) -> Any:
        done = CliRunner().invoke(command_line, ["models", *line, "--url", self.address])
        return done.exit_code, done.stdout + done.stderr


def planned(home: Path, *models: dict[str, object]) -> tuple[ReplicaGroupPlan, ...]:
    """Groups of models of one core each."""
    entries = [{"path": str(home), "n_positions": 64, "amp": "f32", "backend": "eager", **model} for model in models]
    return plan_groups(models_of(entries, folder=Path(), where="test"), MACHINE)


@contextmanager
def service(home: Path, *models: dict[str, object], key: str = "", **settings: Any) -> Iterator[Service]:
    with edge(PlannedLoader(planned(home, *models)), key, **settings) as made:
        yield made


@contextmanager
def edge(loader: PlannedLoader, key: str = "", **settings: Any) -> Iterator[Service]:
    """The process of HTTP, and what it knows; the models live on in the loader."""
    lifecycle = ModelLifecycle(loader, {name: group.residency for name, group in loader.groups.items()})
    routes = {name: LocalHandle(name, loader.replicas) for name in loader.groups}
    router = ServeRouter(routes, lifecycle=lifecycle)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with (
        running(create_app(router, ApiSettings(**settings), lifecycle)) as address,
        httpx.Client(base_url=address, timeout=30, headers=headers) as client,
    ):
        yield Service(client, loader, address)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks follow each other quickly, and a model without requests yet may be evicted."""
    monkeypatch.setattr(serve_router, "_FIRST_LOOK_S", 0.01)
    monkeypatch.setattr(serve_router, "_LOOK_S", 0.01)
    monkeypatch.setattr(replica, "_FIRST_REQUEST_S", 0.0)


@pytest.fixture
def home(workshop: Workshop) -> Path:
    return workshop.checkpoint()


def test_a_first_request_loads_a_model_and_evicts_others(home: Path) -> None:
    with service(home, {"name": "a"}, {"name": "b"}, {"name": "c", "load": "on_demand"}) as served:
        assert served.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
        ready = {"ready": True, "models": {"a": "ready", "b": "ready", "c": "unloaded"}}
        assert served.client.get("/health/ready").json() == ready
        served.ask("a")
        answer = served.ask("c")
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "I am c")
        assert served.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}, "b was used least recently"
        assert [model["id"] for model in served.client.get("/v1/models").json()["data"]] == ["a", "c"]
        assert served.ask("b").status_code == 200, "what left to make room comes back"
        assert served.loader.loads == ["c", "b"] and served.states()["a"] == "unloaded"


def test_requests_during_a_load_wait_for_it(home: Path) -> None:
    with service(home, {"name": "a"}, {"name": "c", "load": "on_demand"}) as served, ThreadPoolExecutor(3) as pool:
        served.loader.gate.clear()
        answers = [pool.submit(served.ask, "c") for _ in range(3)]
        while served.states()["c"] != "loading":
            pass
        served.loader.gate.set()
        assert [answer.result().status_code for answer in answers] == [200] * 3
        assert served.loader.loads == ["c"]


def test_pinned_and_busy_models_stay_and_requests_get_retry_after(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(home, {"name": "a", "pinned": True}, {"name": "b"}, {"name": "c", "load": "on_demand"}) as served:
        assert served.say("pin", "b").json()["pinned"] is True
        answer = served.ask("c")
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "model_unavailable") and answer.headers["retry-after"]
        assert "unpin or unload a model, or add a node" in error["message"] and served.states()["b"] == "loaded"
        refused = served.say("unload", "a")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "model_pinned")
        served.say("pin", "b", pinned=False)
        served.loader.engines["b"].pause_s = 0.2
        asked = {"model": "b", "prompt": "x", "stream": True}
        with served.client.stream("POST", "/v1/completions", json=asked) as busy:
            parts = busy.iter_bytes()
            next(parts)
            assert served.ask("c").status_code == 503, "b serves somebody"
            told, late = served.loader.usage, iter([True])

            async def stale(name: str) -> ModelUsage | None:
                found = await told(name)
                return replace(found, running=0) if found and name == "b" and next(late, False) else found

            monkeypatch.setattr(served.loader, "usage", stale)
            assert served.ask("c").status_code == 503, "nor does it leave when the request came in between"
        while any(one["running"] for one in served.client.get("/admin/models").json()["models"]):
            pass
        assert served.ask("c").status_code == 200 and served.states()["b"] == "unloaded"


def test_an_operators_unload_persists(home: Path) -> None:
    with service(home, {"name": "a"}, {"name": "c", "load": "on_demand"}) as served:
        assert served.say("unload", "a").json()["state"] == "unloaded"
        answer = served.ask("a")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "30")
        assert "an operator has to load it" in answer.json()["error"]["message"]
        assert served.client.post("/tokenize", json={"model": "a", "prompt": "x"}).status_code == 503
        assert served.client.get("/health/ready").json()["ready"], "it is as it should be"
        assert served.say("load", "a").json()["state"] == "loaded" and served.ask("a").status_code == 200
        assert served.say("load", "nobody").status_code == 404


def test_operator_decisions_survive_a_restart(home: Path) -> None:
    with service(home, {"name": "a"}, {"name": "b", "pinned": True}) as first:
        assert first.say("unload", "a").status_code == first.say("pin", "b", pinned=False).status_code == 200
        loader = first.loader
    with edge(loader) as second:
        assert second.ask("a").status_code == 503 and second.states() == {"a": "unloaded", "b": "loaded"}
        states = second.client.get("/admin/models").json()["models"]
        assert [one["pinned"] for one in states] == [False, False], "b is pinned by its file alone"
        assert second.say("load", "a").status_code == second.say("pin", "a").status_code == 200
    with edge(loader) as third:
        assert third.say("unload", "a").json()["error"]["code"] == "model_pinned" and third.ask("a").status_code == 200
        loader.keeps = False
        refused = third.say("pin", "a", pinned=False)
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "nobody keeps it")
        assert third.say("unload", "a").json()["error"]["code"] == "model_pinned", "what cannot be kept does not count"


def test_a_failed_load_is_retried_by_the_next_request(home: Path) -> None:
    with service(home, {"name": "c", "load": "on_demand"}) as served:
        served.loader.broken.add("c")
        answer = served.ask("c")
        assert (answer.status_code, answer.json()["error"]["message"]) == (503, "c did not start")
        assert served.states() == {"c": "unloaded"}
        served.loader.broken.clear()
        assert served.ask("c").status_code == 200


def test_a_model_without_requests_is_unloaded(home: Path) -> None:
    with service(home, {"name": "a", "idle_ttl_s": 0.2}, {"name": "b"}) as served:
        while served.states()["a"] != "unloaded":
            pass
        assert served.states()["b"] == "loaded" and served.ask("a").status_code == 200


def test_lifecycle_routes_require_an_operator(home: Path) -> None:
    with service(home, {"name": "a"}, api_keys=("secret",), key="secret") as served:
        wrong = {"authorization": "Bearer other"}
        assert served.client.get("/admin/models", headers=wrong).status_code == 401
        assert served.client.post("/admin/models/unload", json={"model": "a"}, headers=wrong).status_code == 401
        assert served.states() == {"a": "loaded"}
    with service(home, {"name": "a"}) as served:
        rebound = served.client.get("/admin/models", headers={"host": "elsewhere.example"})
        assert rebound.status_code == 403 and "--api-key" in rebound.json()["error"]["message"]
        body = json.dumps({"model": "a"}).encode()
        assert served.client.post("/admin/models/unload", content=body).status_code == 415, "as a page elsewhere can"
        assert served.client.post("/admin/models/load", json={"model": "a", "fast": True}).status_code == 400


def test_the_command_shows_and_changes_them(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    with service(home, {"name": "a"}, {"name": "c", "load": "on_demand"}, api_keys=("secret",)) as served:
        code, text = served.command("list")
        assert code == 0 and "on_demand" in text and "unloaded" in text
        assert served.command("load", "c")[0] == 0 and set(served.loader.replicas) == {"a", "c"}
        assert served.command("pin", "c")[0] == 0
        code, text = served.command("unload", "c")
        assert code == 2 and "c is pinned" in text
        assert served.command("unpin", "c")[0] == 0 and served.command("unload", "c")[0] == 0
        assert set(served.loader.replicas) == {"a"}
        code, text = served.command("list", "--json")
        assert {one["name"]: one["state"] for one in json.loads(text)} == {"a": "loaded", "c": "unloaded"}
    code, text = served.command("list")
    assert code == 2 and "no service responds" in text
