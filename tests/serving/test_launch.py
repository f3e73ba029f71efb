"""Serving ends on a signal at any time, and removes only what it started. Ray is played by a record."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from ray.exceptions import RaySystemError

from paceline.core.errors import ConfigurationError, PlanError, WorkerError
from paceline.placement import INSTANCES
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.jobs import JobWorkers
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.placement.planning.plan import Plan
from paceline.serving import launch as module
from paceline.serving.deployment import launch
from paceline.serving.ray_app import ListeningSocket

ENDS = [signal.SIGINT, signal.SIGTERM]
_NOTHING = Plan(INSTANCES["inf2.48xlarge"], ())


class Played:
    """Ray and Serve. ``calls`` are those that change something."""

    def __init__(self, *, others: tuple[str, ...] = (), listens: int | None = None) -> None:
        self.calls: list[str] = []
        self.others, self.listens = list(others), listens
        self.lost, self.forgotten, self.proxies = False, list[str](), list[str | None]()
        self.deploys: Callable[[], None] = lambda: None
        self.connects: Callable[[], object] = lambda: signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))

    def init(self, **_: object) -> None:
        self.calls.append("init")
        self.connects()

    def start(self, *, proxy_location: str | None = None, **_: object) -> None:
        self.calls.append("start")
        self.proxies.append(proxy_location)

    def run(self, *_: object, name: str, **__: object) -> None:
        self.calls.append(f"run {name}")
        self.deploys()

    def status(self) -> SimpleNamespace:
        if self.lost:
            raise RaySystemError("the cluster is gone")
        return SimpleNamespace(applications=dict.fromkeys(self.others))

    def delete(self, name: str) -> None:
        self.calls.append(f"delete {name}")

    def shutdown(self) -> None:
        self.calls.append("serve.shutdown")

    def address(self) -> tuple[str, int] | None:
        return None if self.listens is None else ("127.0.0.1", self.listens)


def serve(
    played: Played,
    monkeypatch: pytest.MonkeyPatch,
    *,
    ready: Callable[[], None],
    port: int = 8000,
    address: str | None = "joined",
) -> list[str]:
    monkeypatch.setattr(module, "ray", SimpleNamespace(shutdown=lambda: played.calls.append("ray.shutdown")))
    monkeypatch.setattr("paceline.placement.cluster.nodes.ray.init", played.init)
    monkeypatch.setattr(module, "serve", played)
    monkeypatch.setattr(module, "running_address", played.address)
    monkeypatch.setattr(module, "application", lambda *_, **__: None)
    monkeypatch.setattr(module, "forget_decisions", played.forgotten.append)
    before = [signal.getsignal(number) for number in ENDS]
    try:
        group = ReplicaGroupPlan("m", 1, _NOTHING)
        module.serve_groups([group], FaultPolicy(), host="127.0.0.1", port=port, address=address, ready=ready)
    finally:
        assert [signal.getsignal(number) for number in ENDS] == before
    return played.calls


def raising(error: Exception) -> Callable[[], None]:
    def fails() -> None:
        raise error

    return fails


never = raising(AssertionError("it is not ready"))


def tell(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(20)  # is not slept through
    raise AssertionError("the signal did nothing")


@pytest.mark.parametrize("number", ENDS)
def test_a_signal_ends_it_while_models_load_and_when_it_serves(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    played.deploys = lambda: tell(number)
    calls = ["init", "start", "run paceline", "serve.shutdown", "ray.shutdown"]
    assert serve(played, monkeypatch, ready=never) == calls

    def ready() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), number)).start()

    assert serve(Played(), monkeypatch, ready=ready) == calls


@pytest.mark.parametrize("loads", [False, True])
def test_a_new_cluster_ends_with_the_service(loads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy runs: the process of HTTP listens at the socket of this process, until the end and no longer."""
    played = Played()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def end() -> None:
        with pytest.raises(OSError, match="in use"), socket.socket() as other:
            other.bind(("127.0.0.1", port))
        tell(signal.SIGTERM)

    if loads:
        played.deploys = end
    calls = serve(played, monkeypatch, ready=end, port=port, address=None)
    assert calls == ["init", "start", "run paceline", "delete paceline", "ray.shutdown"]
    assert played.proxies == ["Disabled"]
    ListeningSocket("127.0.0.1", port).close()


def test_an_address_in_use_is_rejected_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(ConfigurationError, match=r"cannot listen on 127\.0\.0\.1"),
    ):
        serve(played, monkeypatch, ready=never, port=other.getsockname()[1], address=None)
    assert not played.calls


def test_core_variables_of_the_command_are_rejected_before_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would say that its raylet has fewer of them, since it reads no range."""
    monkeypatch.setenv("NEURON_RT_VISIBLE_CORES", "0-1")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    remedy = r"NEURON_RT_VISIBLE_CORES: expected it unset.*got 0-1; unset it for this command \(env -u"
    for start in (lambda: serve(Played(), monkeypatch, ready=never, port=0, address=None), lambda: launch(_NOTHING)):
        with pytest.raises(PlanError, match=remedy):
            start()
    with pytest.raises(PlanError, match=remedy):
        JobWorkers(lambda: str, address="local", degree=1, count=1)
    assert "run paceline" in serve(Played(), monkeypatch, ready=lambda: tell(signal.SIGINT))


@pytest.mark.parametrize("listens", [8000, None])
def test_other_applications_in_the_cluster_keep_running(listens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve was running before, or started with this application and has others since."""
    played = Played(others=("other",), listens=listens)
    calls = serve(played, monkeypatch, ready=lambda: tell(signal.SIGINT))
    assert played.forgotten == ["paceline"], "the next service begins as its file says"
    assert calls[-2:] == ["delete paceline", "ray.shutdown"] and "serve.shutdown" not in calls


def test_a_failed_start_is_named_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played()
    said = "Deploying application paceline failed:\n  Traceback\n\nCheckpointError: no such folder\n"
    played.deploys = raising(RuntimeError(said))
    with pytest.raises(WorkerError, match=r"failed: \.\.\. CheckpointError: no such folder\); see Ray's log$"):
        serve(played, monkeypatch, ready=never)
    assert played.calls[-2:] == ["serve.shutdown", "ray.shutdown"]
    played = Played()
    played.connects = raising(ConnectionError("nobody answers"))
    with pytest.raises(PlanError, match="at joined: nobody answers"):
        serve(played, monkeypatch, ready=never)
    assert played.calls == ["init"]


def test_a_lost_cluster_hides_neither_the_error_nor_the_exit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    played = Played()
    played.lost, played.deploys = True, raising(RuntimeError("no room"))
    with pytest.raises(WorkerError, match=r"the service did not start \(no room\)"):
        serve(played, monkeypatch, ready=never)
    played.deploys = lambda: tell(signal.SIGINT)
    assert serve(played, monkeypatch, ready=never)[-1] == "ray.shutdown"
    assert "shutting down the service failed" in caplog.text and "the cluster is gone" in caplog.text


def test_the_command_reports_what_it_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models by their names, each state once, and nothing after the service is ready or where Ray does not answer."""
    states = [{"model-a": "UPDATING", "openai": "UPDATING"}, {"model-a": "HEALTHY", "openai": "UPDATING"}]
    said: list[str] = []
    all_said = threading.Event()

    def status() -> SimpleNamespace:
        state = states[min(len(said), 1)]
        deployments = {name: SimpleNamespace(status=one) for name, one in state.items()}
        others = SimpleNamespace(deployments={"x": SimpleNamespace(status="UPDATING")})
        return SimpleNamespace(applications={"paceline": SimpleNamespace(deployments=deployments), "other": others})

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            all_said.set()

    monkeypatch.setattr(module, "serve", SimpleNamespace(status=status))
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    with module._reported(say):
        assert all_said.wait(60)
    assert said == ["waiting for a, openai", "waiting for openai"]
