"""Serving until somebody ends it: Ray is started or joined, the application deployed, and taken down again.

In a cluster that was joined nothing else is touched: what others serve there goes on.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client  # the only way to what Serve really listens at
from ray.serve.exceptions import RayServeException

from paceline.core.errors import ConfigurationError, PlacementError, WorkerError
from paceline.placement import Plan
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.worker_group import RESOURCE
from paceline.serving.app import application

log = logging.getLogger("paceline")

APPLICATION = "paceline"

_HERE = "local"  # a new cluster, though another one may run on this machine
_CPUS = 2  # of Ray's own count; workers on cores do not take part in it
_ENDS = (signal.SIGINT, signal.SIGTERM)
_FAILURES = (OSError, RuntimeError, ValueError, RayError, RayServeException)  # what Ray and Serve raise


class _Ended(BaseException):
    """A signal came. No `Exception`: Ray and Serve catch those."""


def run(made: Plan, care: FaultPolicy, *, host: str, port: int, address: str | None, ready: Callable[[], None]) -> None:
    """Serve a plan until SIGINT or SIGTERM, while models load too. ``ready`` is called when requests are taken.

    Raises:
        ConfigurationError: Serve runs in the cluster, and listens elsewhere or has an application of this name.
        PlacementError: there is no such cluster, or the service did not start.
    """
    wanted = application(made, care)
    with _until_a_signal() as again:
        _connect(made, address)
        again()
        try:
            _serve(wanted, host=host, port=port, ready=ready)
        finally:
            ray.shutdown()


@contextmanager
def _until_a_signal() -> Iterator[Callable[[], None]]:
    """A signal ends the block, a second one its cleaning up. To be called again after what has handlers of its own."""
    before = {number: signal.getsignal(number) for number in _ENDS}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(*_: object) -> None:
        put_back()
        raise _Ended

    def take() -> None:
        for number in _ENDS:
            signal.signal(number, end)

    take()
    try:
        yield take
    except _Ended:
        return
    finally:
        put_back()


def _connect(made: Plan, address: str | None) -> None:
    own = {"resources": {RESOURCE: made.instance.cores}, "num_cpus": _CPUS, "include_dashboard": False}
    try:
        ray.init(address=address or _HERE, log_to_driver=False, **({} if address else own))
    except _FAILURES as error:
        where = f"no Ray cluster can be joined at {address}" if address else "Ray did not start here"
        raise PlacementError(f"{where}: {_short(error)}") from error


def _serve(wanted: serve.Application, *, host: str, port: int, ready: Callable[[], None]) -> None:
    """Until a signal, in the cluster this process is connected to."""
    there = _get_global_client(raise_if_no_controller_running=False)
    if there is not None:
        _check(there.http_config, host=host, port=port)
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(wanted, name=APPLICATION, route_prefix="/")
        ready()
        threading.Event().wait()
    except _FAILURES as error:
        raise WorkerError(f"the service did not start: {_short(error)}") from error
    finally:
        _take_down(alone=there is None)


def _take_down(*, alone: bool) -> None:
    """What is ours. If that fails too, why it ended must not get lost."""
    try:
        if alone and not set(serve.status().applications) - {APPLICATION}:
            serve.shutdown()
        else:
            serve.delete(APPLICATION)
    except _FAILURES as error:
        log.warning("the service could not be taken down (%s)", _short(error))


def _check(found: HTTPOptions, *, host: str, port: int) -> None:
    """Serve listens where it was told to first, whatever it is told later; and a name has one application."""
    if (found.host, found.port) != (host, port):
        raise ConfigurationError(
            f"Serve runs in this cluster and listens at {found.host}:{found.port}, not at {host}:{port}; to be served "
            f"there, give --host {found.host} --port {found.port}"
        )
    if APPLICATION in serve.status().applications:
        raise ConfigurationError(
            f"an application {APPLICATION!r} is served in this cluster; end it first, or put both into one models file"
        )


def _short(error: Exception) -> str:
    """The first line and the last: Ray puts the tracebacks of other processes between them."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()] or [type(cause).__name__]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
