"""What clients read when a model cannot be loaded: no word of Ray's, which the log has, and when to ask again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

pytest.importorskip("ray")

from ray.exceptions import GetTimeoutError

from paceline.core.errors import BackendError, WorkerError
from paceline.placement.cluster import core_allocator
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.planning.groups import plan_groups
from paceline.placement.planning.model_specs import models_of
from paceline.serving import ray_guard, serve_lifecycle
from paceline.serving.refused import refusal
from paceline.serving.serve_lifecycle import ServeLoader, Service
from paceline.serving.serve_router import ServeRouter
from tests.decoder.tiny import Workshop
from tests.serving.test_lifecycle import MACHINE

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
    shape = {"path": str(workshop.checkpoint()), "n_positions": 64, "amp": "f32", "backend": "eager"}
    entries = [{"name": "eager", **shape}, {"name": "late", "load": "on_demand", **shape}]
    groups = {group.name: group for group in plan_groups(models_of(entries, folder=Path(), where="test"), MACHINE)}
    return ServeLoader(Service("paceline", groups, FaultPolicy()), ServeRouter({}))


@pytest.mark.parametrize("name", ["eager", "late"])
def test_a_model_that_does_not_start_is_reported_without_rays_text(
    loader: ServeLoader, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "paceline")
    logging.getLogger("paceline").propagate = True
    with pytest.raises(WorkerError, match=name) as told:
        asyncio.run(loader.load(name))
    assert "4711" not in str(told.value) and "log" in str(told.value)
    assert RAYS in caplog.text
    refused = refusal(told.value)
    assert (refused.status, refused.headers) == (503, {"retry-after": "5"})


def test_neither_is_an_allocator_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise GetTimeoutError(RAYS)

    monkeypatch.setattr(core_allocator, "allocator", fails)
    with pytest.raises(WorkerError, match=r"did not respond in 3 seconds \(GetTimeoutError\)") as told:
        core_allocator.call_allocator("taken", timeout=3)
    assert "4711" not in str(told.value)


def test_whatever_is_lost_may_be_back() -> None:
    assert refusal(BackendError("a rank is lost")).retry_after_s
