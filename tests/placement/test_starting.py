"""A target and its drafts start in parallel: the first failure is reported first."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import ray

from paceline.core.errors import CheckpointError, WorkerError
from paceline.placement.cluster.replica_group import load_beside

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=0)
def loaded(seconds: float, failure: str = "") -> None:
    import time

    time.sleep(seconds)
    if failure:
        raise ValueError(failure)


@pytest.fixture
def gate(cluster: object) -> Iterator[threading.Event]:
    """Event that the target waits for while it loads."""
    made = threading.Event()
    yield made
    made.set()


def test_a_failed_draft_is_reported_while_the_target_loads(gate: threading.Event) -> None:
    ended = []

    def load() -> None:
        gate.wait(20)
        ended.append("target")

    pending = {"good": loaded.remote(0), "bad": loaded.remote(0, "no such checkpoint"), "late": loaded.remote(600)}
    with pytest.raises(WorkerError, match=r"bad did not start.*(.|\n)*no such checkpoint"):
        load_beside(load, pending, timeout_s=100)
    assert not ended
    ray.cancel(pending["late"], force=True)


def test_a_failed_target_is_reported_while_a_draft_loads(gate: threading.Event) -> None:
    def load() -> None:
        raise CheckpointError("it is torn")

    pending = {"late": loaded.remote(600)}
    with pytest.raises(CheckpointError, match="it is torn"):
        load_beside(load, pending, timeout_s=100)
    with pytest.raises(WorkerError, match=r"late did not start within 0\.1 seconds"):
        load_beside(lambda: gate.wait(120), pending, timeout_s=0.1)
    ray.cancel(pending["late"], force=True)


def test_target_and_draft_are_waited_for(gate: threading.Event) -> None:
    threading.Timer(0.2, gate.set).start()
    assert load_beside(lambda: gate.wait(60) and "target", {"draft": loaded.remote(0)}, timeout_s=60) == "target"
    assert load_beside(lambda: 3, {}, timeout_s=1) == 3
