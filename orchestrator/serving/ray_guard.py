"""Guards for what Ray Serve leaves open, and all uses of Ray's private names (seen with Ray 2.60): a controller that
hangs, streams whose reader hangs, the number of replicas, the request of a call, and log files.

`watch_cluster` replaces Serve's controller and the core allocator if they do not respond. Ray restarts an actor whose
process ended, but does not check whether actors respond, and no process checks the controller, which replaces all
others. So every replica of ours, ingress or model, checks both: if any two processes are suspended, at least one health
checker is still running.

`Readers` and `UntilTaken`: a stream ends only when its reader has taken all of it. At the end of a stream Ray waits, in
the one thread that starts every call of the actor, until the caller has confirmed all items. While a caller is
suspended or unreachable, no other call starts, not even Serve's health check, after which the actor is replaced. So a
model replica first polls the ingress process that reads the response, and the ingress process waits until the proxy
reports that the response is complete. A lost caller confirms nothing, and no process waits for it.

`controller` gets the calls of the dashboard's REST endpoints, since Paceline runs no dashboard.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import ray
from ray import serve
from ray._private.state import actors  # the state without its dashboard; it has no public name
from ray.exceptions import GetTimeoutError, RayError
from ray.serve._private.common import DeploymentID  # what the method takes; it has no public name
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import HTTPOptions
from ray.serve.context import _RequestContext, _serve_request_context  # what Serve's proxy sets
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.placement.cluster import core_allocator, nodes
from paceline.serving.middleware import LOGGER, identify

log = logging.getLogger("paceline")

WATCHED = ((SERVE_CONTROLLER_NAME, SERVE_NAMESPACE), (core_allocator.NAME, nodes.NAMESPACE))
"""Name and namespace of each watched actor. Both may be killed at any time: they keep their state in Ray's key-value
store.
"""
_PERIOD_S = 2.0  # between health checks, in a small cluster
_SMALL_NODES = 4  # maximum number of nodes of a small cluster
_ANSWER_S = 3.0  # timeout of a health check: with the pauses, 15 seconds until an actor is killed
_MISSES = 3  # consecutive, of one process


class WatchedActor:
    """Actor of this cluster, and its missed health checks. While there is none of that name, it gets none."""

    def __init__(self, name: str, namespace: str) -> None:
        self._name, self._namespace = name, namespace
        self._process: int | None = None
        self._missed = 0

    @property
    def suspects(self) -> bool:
        return self._missed > 0

    def look(self) -> None:
        """Check once, and kill the actor after the last allowed miss."""
        if self.answers():
            self._missed = 0
            return
        process = self.process()
        self._missed = self._missed + 1 if process == self._process else 1
        self._process = process  # changed if another process has replaced it
        if process is not None and self._missed >= _MISSES:
            log.error("%s (process %s) failed %s health checks in a row; killing it", self._name, process, _MISSES)
            self.kill()
            self._missed = 0

    def process(self) -> int | None:
        """Return its pid; None while there is none, or Ray is starting it."""
        try:
            state = actors(self._handle()._actor_id.hex())
        except (ValueError, RayError):
            return None
        return int(state["Pid"]) if state.get("State") == "ALIVE" else None

    def answers(self) -> bool:
        """Whether it responds in time. One that has just ended counts as responding: Ray handles it."""
        try:
            ray.get(self._handle().__ray_ready__.options(max_task_retries=0).remote(), timeout=_ANSWER_S)
        except GetTimeoutError:
            return False
        except (ValueError, RayError):
            return True
        return True

    def kill(self) -> None:
        """Kill its process; Ray starts it again. A suspended one, which does not end, Ray kills some seconds later."""
        try:
            ray.kill(self._handle(), no_restart=False)
        except (ValueError, RayError):
            log.warning("cannot kill %s: it no longer exists", self._name)

    def _handle(self) -> Any:
        return ray.get_actor(self._name, namespace=self._namespace)


def pause_s(living: int, *, suspects: bool = False) -> float:
    """Return the seconds from one health check to the next, in a cluster of ``living`` nodes.

    Every replica checks the one controller. To keep its load constant, each checks less often the more nodes there are,
    but soon after a missed check. Of many checkers one is always about to check, so a suspended process is found as
    soon as in a small cluster.
    """
    return _PERIOD_S if suspects else _PERIOD_S * max(1.0, living / _SMALL_NODES)


def watch_cluster(watched: Sequence[tuple[str, str]] = WATCHED) -> None:
    """Watch actors, each in a thread, until this process ends."""
    for name, namespace in watched:
        arguments = (WatchedActor(name, namespace),)
        threading.Thread(target=_go_on, args=arguments, daemon=True, name=f"watch-{name}").start()


def _go_on(watch: WatchedActor) -> None:
    pause = _PERIOD_S
    while True:
        time.sleep(pause)
        try:
            watch.look()
            pause = pause_s(len(nodes.living()), suspects=watch.suspects)
        except Exception:  # for example of Ray's client while its store is unavailable: this thread must not end
            log.exception("the health check of a watched actor failed")


def own_name() -> str:
    """Return the name by which `Readers` polls this process, an actor of Ray Serve."""
    return str(ray.get_runtime_context().get_actor_name() or "")


@dataclass(slots=True)
class _Line:
    asked_at: float = float("-inf")  # start of the last poll
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Readers:
    """Processes that read the streams of this one."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._actors: dict[str, Any] = {}  # each is looked up once

    async def taken(self, reader: str) -> None:
        """Return when a reader (its `own_name`; "": this process) has everything sent to it before. One poll serves all
        streams that waited before it.
        """
        if not reader:
            return
        came_at = monotonic()
        line = self._lines.setdefault(reader, _Line())
        async with line.asking:
            if line.asked_at <= came_at:
                line.asked_at = monotonic()
                if not await self._ask(reader):
                    self._lines.pop(reader, None)

    async def _ask(self, reader: str) -> bool:
        """Poll a reader. One whose connection is lost counts as lost: Ray does not wait for it either."""
        try:
            if reader not in self._actors:
                self._actors[reader] = await asyncio.to_thread(ray.get_actor, reader, namespace=SERVE_NAMESPACE)
            await self._actors[reader].__ray_ready__.options(max_task_retries=0).remote()
        except (ValueError, RayError):
            self._actors.pop(reader, None)
            return False
        return True


class UntilTaken:
    """ASGI middleware: a call ends when the server reports that the response is complete, or that its client
    disconnected.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        complete = False

        async def send_on(message: Message) -> None:
            nonlocal complete
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        await self._app(scope, receive, send_on)
        if complete:
            with suppress(Exception):  # of the process that forwards its messages: it is lost
                while (await receive())["type"] != "http.disconnect":
                    pass


_CONTROLLER_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """Serve's state of a deployment: desired and existing replicas, and HEALTHY, UPDATING, UNHEALTHY, ..."""

    target: int
    replicas: int
    status: str


def controller() -> Any:
    """Return the controller's actor. Raises ValueError if Serve does not run in this cluster."""
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def running_address() -> tuple[str, int] | None:
    """Return the host and port that Serve listens at; None if it does not run."""
    try:
        actor = controller()
    except ValueError:
        return None
    # Fields that are missing have their default values.
    options = ray.get(actor.get_serve_instance_details.remote(), timeout=_CONTROLLER_ANSWER_S).get("http_options") or {}
    return str(options.get("host", HTTPOptions().host)), int(options.get("port", HTTPOptions().port))


async def running_deployments() -> Mapping[tuple[str, str], DeploymentState]:
    """Return (application, deployment) -> Serve's state of it."""
    details = await controller().get_serve_instance_details.remote()
    return {
        (application, name): DeploymentState(int(one["target_num_replicas"]), len(one["replicas"]), str(one["status"]))
        for application, about in details["applications"].items()
        for name, one in about.get("deployments", {}).items()
    }


async def scale_deployment(application: str, deployment: str, replicas: int) -> None:
    """Set the number of replicas; return before they start or end. Raises RayError, or ValueError if the application
    was not deployed with ``external_scaler_enabled``.
    """
    await controller().update_deployment_replicas.remote(DeploymentID(deployment, application), replicas)


def handle_of(deployment: str, application: str) -> Any:
    """Return the handle of a deployment that may not exist yet: requests wait until it does."""
    return serve.get_deployment_handle(deployment, application, _check_exists=False)


class WithServe:
    """ASGI middleware: sets the request id of a call in Serve, so that log records of any process have it."""

    def __init__(self, app: ASGIApp, application: str) -> None:
        self._app, self._application = app, application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            context = _RequestContext(scope["path"], request_id=identify(scope), app_name=self._application)
            _serve_request_context.set(context)
        await self._app(scope, receive, send)


SERVE_LOGGING = {"encoding": "JSON", "enable_access_log": False}
"""Logging configuration of every deployment. Serve's own access log has less information than ours
(`paceline.serving.middleware.AccessLog`).
"""


class _ToServe(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("ray.serve").handle(record)


def write_with_serve() -> None:
    """Write log records of this process, from INFO, to the file of its replica. Repeated calls have no effect."""
    ours = logging.getLogger(LOGGER)
    if not any(isinstance(handler, _ToServe) for handler in ours.handlers):
        ours.addHandler(_ToServe())
        ours.setLevel(logging.INFO)
        ours.propagate = False  # else Serve logs it twice, since it also reads standard error
