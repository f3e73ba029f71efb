"""Serve until a signal: start or join Ray, deploy the application, and take it down again.

In a joined cluster nothing else is changed: other applications keep running.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import ray
from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.exceptions import RayServeException

from paceline.core.errors import ConfigurationError, WorkerError
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import RAY_ERRORS, connect, summary
from paceline.placement.host import environment
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.serving.ray_app import ListeningSocket, application
from paceline.serving.ray_guard import running_address
from paceline.serving.serve_lifecycle import forget_decisions
from paceline.serving.settings import ApiSettings

log = logging.getLogger("paceline")

APPLICATION = "paceline"

_LOOK_S = 0.5  # between checks of starting deployments
_CPUS = 2  # as Ray counts; workers on cores are not included
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RAY_ERRORS = (*RAY_ERRORS, RayServeException)  # errors of Ray and Serve


class _SignalReceived(BaseException):
    """Signal as an exception; not an `Exception`, because Ray and Serve catch those."""


def serve_groups(
    groups: Sequence[ReplicaGroupPlan],
    fault_policy: FaultPolicy,
    settings: ApiSettings | None = None,
    *,
    host: str,
    port: int,
    address: str | None,
    ready: Callable[[], None],
    progress: Callable[[str], None] = log.info,
) -> None:
    """Serve planned models until SIGINT or SIGTERM, which also end it while models load.

    ``address``: of a Ray cluster to join, in which Serve's proxies listen; None starts one on this machine, and the
    ingress process listens itself. ``ready``: called when requests are accepted; ``progress``: with status messages
    until then.

    Raises:
        ConfigurationError: the address is not available, or Serve already runs in the cluster, and listens elsewhere or
            has an application of this name.
        PlanError: there is no such cluster.
        WorkerError: the service did not start.
    """
    with _until_a_signal() as take_signals, ExitStack() as stack:
        listening = stack.enter_context(ListeningSocket(host, port)) if address is None else None
        app = application(groups, fault_policy, settings, handover=listening.handover if listening else "")
        progress("starting Ray" if address is None else f"joining the Ray cluster at {address}")
        environment.prepare_new_cluster()
        connect(address, cores=max(group.plan.instance.cores for group in groups), num_cpus=_CPUS)
        take_signals()  # Ray has installed its own handlers
        stack.callback(ray.shutdown)
        started = stack.enter_context(_reported(progress))

        def served() -> None:
            started.set()
            ready()

        if listening is None:
            _serve_by_proxy(app, host=host, port=port, ready=served)
        else:
            _serve_at(listening, app, ready=served)


@contextmanager
def _until_a_signal() -> Iterator[Callable[[], None]]:
    """End the block at a signal, and its clean-up at a second one. Yields a function that sets the handlers again."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}

    def restore() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def end(*_: object) -> None:
        restore()
        raise _SignalReceived

    def take_signals() -> None:
        for number in _SIGNALS:
            signal.signal(number, end)

    take_signals()
    try:
        yield take_signals
    except _SignalReceived:
        return
    finally:
        restore()


@contextmanager
def _reported(progress: Callable[[str], None]) -> Iterator[threading.Event]:
    """Report which deployments are not ready, whenever that changes, until the yielded event is set."""
    started = threading.Event()

    def report() -> None:
        said = ""
        while not started.wait(_LOOK_S):
            with suppress(*_RAY_ERRORS):
                waits = ", ".join(_starting())
                if waits and waits != said and not started.is_set():
                    progress(f"waiting for {waits}")
                    said = waits

    thread = threading.Thread(target=report, name="progress", daemon=True)
    thread.start()
    try:
        yield started
    finally:
        started.set()
        thread.join()


def _starting() -> list[str]:
    """Deployments of ours that are not ready: models by their names, and the ingress process."""
    applications = serve.status().applications
    own = (applications[name] for name in _own(applications) if name in applications)
    deployments = [pair for application in own for pair in application.deployments.items()]
    return sorted(name.removeprefix("model-") for name, one in deployments if one.status != "HEALTHY")


def _serve_at(listening: ListeningSocket, app: serve.Application, *, ready: Callable[[], None]) -> None:
    """Serve in our own cluster until a signal. Serve ends with the cluster: taking it down before makes Ray print that
    the call failed, since the called actor ends itself.
    """
    with _named_errors():
        try:
            serve.start(proxy_location=ProxyLocation.Disabled)
            logging.getLogger("ray.serve").setLevel(logging.WARNING)  # else it logs an unused address
            _run(app, ready)
        finally:
            listening.close()  # the ingress process still has it, until it stops accepting
            with _warned():
                _delete(_own(serve.status().applications))


def _serve_by_proxy(app: serve.Application, *, host: str, port: int, ready: Callable[[], None]) -> None:
    """Serve in the joined cluster until a signal. Serve ends if this process started it and no application remains."""
    running = running_address()
    if running is not None:
        _check_address(running, host=host, port=port)
    with _named_errors():
        try:
            serve.start(http_options={"host": host, "port": port})
            _run(app, ready)
        finally:
            with _warned():
                applications = serve.status().applications
                own = _own(applications)
                if running is None and not set(applications) - own:
                    serve.shutdown()
                else:
                    _delete(own)
                forget_decisions(APPLICATION)


def _run(app: serve.Application, ready: Callable[[], None]) -> None:
    serve.run(app, name=APPLICATION, route_prefix="/", external_scaler_enabled=True)
    ready()
    threading.Event().wait()


def _own(applications: Collection[str]) -> set[str]:
    """Return our applications: the service, and models that were loaded on demand."""
    return {APPLICATION, *(name for name in applications if name.startswith(f"{APPLICATION}-"))}


def _delete(applications: set[str]) -> None:
    for name in sorted(applications):
        serve.delete(name)


@contextmanager
def _named_errors() -> Iterator[None]:
    try:
        yield
    except _RAY_ERRORS as error:
        raise WorkerError(f"the service did not start ({summary(error)}); see Ray's log") from error


@contextmanager
def _warned() -> Iterator[None]:
    """Log errors during take-down, which must not hide others."""
    try:
        yield
    except _RAY_ERRORS as error:
        log.warning("shutting down the service failed (%s)", summary(error))


def _check_address(running: tuple[str, int], *, host: str, port: int) -> None:
    if running != (host, port):
        address = ":".join(map(str, running))
        raise ConfigurationError(
            f"--host: Ray Serve already runs in this cluster and listens on {address}, not {host}:{port}; give "
            f"--host {running[0]} --port {running[1]} to use it"
        )
    if APPLICATION in serve.status().applications:
        raise ConfigurationError(
            f"an application {APPLICATION!r} already runs in this cluster; stop it first, or put both into one "
            "models file"
        )
