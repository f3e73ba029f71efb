"""A draft that cannot start again is started until it can; Ray itself gives up after an error in a constructor."""

from __future__ import annotations

import socket
from dataclasses import replace
from types import SimpleNamespace

import pytest

from paceline.core.errors import ChannelError, ConfigurationError, WorkerError
from paceline.placement import INSTANCES, FaultPolicy, plan
from paceline.placement.cluster import replica_group
from paceline.placement.cluster.worker_spec import Location, WorkerSpec, worker_specs
from paceline.placement.remote.channel import Address, connect
from tests.placement.wishes import model


@pytest.fixture
def spec() -> WorkerSpec:
    """Settings of a worker whose variables this process does not have, so that it cannot start in it."""
    made = plan([model("chat")], INSTANCES["inf2.48xlarge"])
    location = Location("chat", "here", made.placements[0].cores)
    return worker_specs(made.instance, made.placements, FaultPolicy(), locations={"chat": location})["chat"]


@pytest.mark.parametrize("restarted", [False, True])
def test_only_the_first_start_raises(spec: WorkerSpec, restarted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    context, paused = SimpleNamespace(was_current_actor_reconstructed=restarted), list[float]()
    monkeypatch.setattr(replica_group.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(replica_group, "sleep", paused.append)

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(replica_group.os, "_exit", end)
    with pytest.raises(SystemExit if restarted else WorkerError):
        replica_group.DraftWorker(spec)
    assert len(paused) == restarted, "a process that ends at once would be started without a pause"


def test_a_draft_worker_binds_its_address_before_loading(spec: WorkerSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that was free when it was chosen could be another's after the minutes that a model takes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address(host="127.0.0.1", port=probe.getsockname()[1])

    def load(_: object) -> None:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address.host, address.port))
        with pytest.raises(ChannelError, match="refused"):
            connect(address, b"secret", seconds=1)
        raise ConfigurationError("it has no weights")

    monkeypatch.setattr(replica_group.environment, "check", lambda _: None)
    monkeypatch.setattr(replica_group, "take_cores", lambda _: None)
    monkeypatch.setattr(replica_group, "maker", lambda _: load)
    monkeypatch.setattr(
        replica_group.ray, "get_runtime_context", lambda: SimpleNamespace(was_current_actor_reconstructed=False)
    )
    with pytest.raises(ConfigurationError, match="it has no weights"):
        replica_group.DraftWorker(replace(spec, address=address))
