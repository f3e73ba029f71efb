"""Responses of a replica to health checks: Serve replaces one that raises. No Ray runs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from paceline.core.errors import BackendError, RankError, WorkerError
from paceline.serving import replica as module
from paceline.serving.replica import ModelReplica


class Bare(ModelReplica):
    """Without workers. ``engine``: what stands for the target's."""

    def __init__(self, *, failure: Exception | None = None, running: int = 0, timeout_s: float = 0.0) -> None:
        figures = SimpleNamespace(running=running, waiting=0)
        self.engine = SimpleNamespace(failure=failure, figures=lambda: figures, heartbeat=0)
        self._engine = self.engine  # type: ignore[assignment]
        self._beat = module._Heartbeat(timeout_s)


def ask(replica: ModelReplica) -> None:
    asyncio.run(replica.check_health())


def test_a_device_that_fails_every_round_is_reported() -> None:
    with pytest.raises(WorkerError, match="the model's rounds fail repeatedly"):
        ask(Bare(failure=BackendError("the device is gone")))


def test_a_lost_rank_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(module.os, "_exit", end)
    with pytest.raises(SystemExit):
        ask(Bare(failure=RankError("rank 1 is gone")))


def test_a_stalled_engine_with_requests_is_reported_and_an_idle_one_is_not() -> None:
    busy, idle = Bare(running=1), Bare()
    for replica in (busy, idle):
        ask(replica)
    ask(idle)
    with pytest.raises(WorkerError, match="has done nothing"):
        ask(busy)
    busy.engine.heartbeat += 1
    ask(busy)
