"""What Ray Serve leaves open, and every use of a name of Ray's that is not public (seen with Ray 2.60): a controller
that hangs, streams whose reader hangs, the number of replicas, whom a request belongs to, what outlives processes, and
the files of logs.

`watch_cluster` replaces Serve's controller and the core allocator when they do not answer: a process that is stopped,
or hangs. Ray starts an actor again whose process ended, and asks none whether it answers. The controller asks replicas
and proxies, and nobody asks it; so while it is stopped, nothing else is replaced. Every replica of ours, of the edge
and of models, therefore asks both: of any two processes that stop, one that asks is left. Replicas and proxies are the
controller's (`paceline.serving.replica`), a draft its target's.

`Readers` and `UntilTaken`: a stream ends when who reads it has taken all of it, and not before. Ray sends the items of
a stream to its caller, and where the stream ends, waits until the caller has confirmed them all. It waits in the one
thread that begins every call of the actor: while a caller is stopped or cannot be reached, nobody else's call begins
there, be it a request or Ray Serve's question whether the actor is well, for which it is replaced (seen with Ray 2.60).
So no stream of ours ends there. A replica of a model asks the process of HTTP that reads the answer whether it is
there; the process of HTTP waits for the proxy's word that the answer is complete. The client has its answer by then. A
caller that is gone confirms nothing, and nobody waits for it.

`controller` is asked what the dashboard's REST endpoints `GET /api/serve/applications/` and `POST
.../deployments/NAME/scale` ask; here no dashboard runs. The core allocator keeps its record in Ray's key-value
store too (`paceline.placement.cluster.core_allocator`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

import ray
from ray import serve
from ray._private.state import actors  # the state without its dashboard; it has no public name
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental import internal_kv  # its functions have no public names; Serve and others use them all the same
from ray.serve._private.common import DeploymentID  # what the method takes; it has no public name
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.config import HTTPOptions
from ray.serve.context import _RequestContext, _serve_request_context  # what Serve's proxy sets
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.placement.cluster import core_allocator, nodes
from paceline.serving.middleware import LOGGER, identify

log = logging.getLogger("paceline")

WATCHED = ((SERVE_CONTROLLER_NAME, SERVE_NAMESPACE), (core_allocator.NAME, nodes.NAMESPACE))
"""Name and namespace of each. Both may be killed at any time: they keep what they know in Ray's key-value store."""
_PERIOD_S = 2.0  # between questions, in a small cluster
_SMALL_NODES = 4  # up to which it is one
_ANSWER_S = 3.0  # that an answer may take: with the pauses, 15 seconds until an actor is killed
_MISSES = 3  # in a row, of one process


class NamedActor(Protocol):
    """An actor that is watched."""

    def process(self) -> int | None:
        """Its pid; None while there is no such actor, or Ray is starting it."""

    def answers(self) -> bool:
        """Whether it does, in good time. One that has just ended counts as answering: Ray knows of it."""

    def kill(self) -> None:
        """End its process, for Ray to start it again."""


@dataclass(frozen=True, slots=True)
class RayActor:
    """An actor of this cluster. While there is none of that name, nothing is asked of it."""

    name: str
    namespace: str

    def process(self) -> int | None:
        try:
            state = actors(self._handle()._actor_id.hex())
        except (ValueError, RayError):
            return None
        return int(state["Pid"]) if state.get("State") == "ALIVE" else None

    def answers(self) -> bool:
        try:
            ray.get(self._handle().__ray_ready__.options(max_task_retries=0).remote(), timeout=_ANSWER_S)
        except GetTimeoutError:
            return False
        except (ValueError, RayError):
            return True
        return True

    def kill(self) -> None:
        """See `NamedActor`. What does not end by itself, as nothing stopped can, Ray kills some seconds later."""
        try:
            ray.kill(self._handle(), no_restart=False)
        except (ValueError, RayError):
            log.warning("%s was gone when it was to be killed", self.name)

    def _handle(self) -> Any:
        return ray.get_actor(self.name, namespace=self.namespace)


class Watch:
    """Counts for one actor how often it did not answer."""

    def __init__(self, name: str, actor: NamedActor) -> None:
        self._name, self._actor = name, actor
        self._process: int | None = None
        self._missed = 0

    @property
    def suspects(self) -> bool:
        """Whether the last question went without an answer."""
        return self._missed > 0

    def look(self) -> None:
        """Ask once. Kills what has not answered for the last time."""
        if self._actor.answers():
            self._missed = 0
            return
        process = self._actor.process()
        self._missed = self._missed + 1 if process == self._process else 1
        self._process = process  # another one than before: somebody has replaced it meanwhile
        if process is not None and self._missed >= _MISSES:
            log.error("%s (process %s) did not answer %s times in a row; it is killed", self._name, process, _MISSES)
            self._actor.kill()
            self._missed = 0


def pause_s(living: int, *, suspects: bool = False) -> float:
    """Seconds from an answer to the next question.

    As many replicas ask as the cluster has room for, and one controller answers them all: so that it has no more to
    answer in a large cluster, each asks the less often the more nodes there are. Who got no answer asks again soon; of
    many one is always about to ask, so what has stopped is found no later than in a small cluster.

    living  nodes of the cluster
    """
    return _PERIOD_S if suspects else _PERIOD_S * max(1.0, living / _SMALL_NODES)


def watch_cluster(watched: Sequence[tuple[str, str]] = WATCHED) -> None:
    """Watch actors, each in a thread, until this process ends."""
    for name, namespace in watched:
        arguments = (Watch(name, RayActor(name, namespace)),)
        threading.Thread(target=_go_on, args=arguments, daemon=True, name=f"watch-{name}").start()


def _go_on(watch: Watch) -> None:
    pause = _PERIOD_S
    while True:
        time.sleep(pause)
        try:
            watch.look()
            pause = pause_s(len(nodes.living()), suspects=watch.suspects)
        except Exception:  # of Ray's client while its store is away, say: this thread must not end
            log.exception("a watched actor could not be asked")


Ask = Callable[[str], Awaitable[bool]]


def own_name() -> str:
    """The name by which `Readers` asks this process, an actor of Ray Serve."""
    return str(ray.get_runtime_context().get_actor_name() or "")


@dataclass(slots=True)
class _Line:
    """Of streams that wait for one reader. ``asked_at``: when the last question to it began."""

    asked_at: float = float("-inf")
    asking: asyncio.Lock = field(default_factory=asyncio.Lock)


class Readers:
    """The processes that read the streams of this one. ``ask``: whether a reader answers; False: it is gone."""

    def __init__(self, ask: Ask | None = None) -> None:
        self._ask, self._lines = ask or _Actors().answer, dict[str, _Line]()

    async def taken(self, reader: str) -> None:
        """Return when a reader has what was sent to it until now. A question is that of all streams that came before.

        reader  its `own_name`; "": this process itself
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


class _Actors:
    """Asks readers. Each is looked up once."""

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    async def answer(self, reader: str) -> bool:
        """See `Readers`. A reader whose connection is gone counts as gone: Ray does not wait for it, either."""
        try:
            if reader not in self._known:
                self._known[reader] = await asyncio.to_thread(ray.get_actor, reader, namespace=SERVE_NAMESPACE)
            await self._known[reader].__ray_ready__.options(max_task_retries=0).remote()
        except (ValueError, RayError):
            self._known.pop(reader, None)
            return False
        return True


class UntilTaken:
    """ASGI: a call ends when the server says that the answer is complete, or that its client is gone."""

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
            with suppress(Exception):  # of whatever passes its messages on: it is gone
                while (await receive())["type"] != "http.disconnect":
                    pass


_CONTROLLER_ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """What Serve knows of a deployment.

    target    replicas that it is to have
    replicas  those that there are, in whatever state
    status    Serve's word: HEALTHY, UPDATING, UNHEALTHY, ...
    """

    target: int
    replicas: int
    status: str


def controller() -> Any:
    """The actor. Raises ValueError: Serve does not run in this cluster."""
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def running_address() -> tuple[str, int] | None:
    """Host and port that Serve listens at; None where it does not run.

    Raises:
        RayError: the controller does not answer.
    """
    try:
        actor = controller()
    except ValueError:
        return None
    # What it leaves out has its default value.
    options = ray.get(actor.get_serve_instance_details.remote(), timeout=_CONTROLLER_ANSWER_S).get("http_options") or {}
    return str(options.get("host", HTTPOptions().host)), int(options.get("port", HTTPOptions().port))


async def running_deployments() -> Mapping[tuple[str, str], DeploymentState]:
    """(application, deployment) -> what Serve knows of it.

    Raises:
        RayError, ValueError: the controller does not answer, or is gone.
    """
    details = await controller().get_serve_instance_details.remote()
    return {
        (application, name): DeploymentState(int(one["target_num_replicas"]), len(one["replicas"]), str(one["status"]))
        for application, about in details["applications"].items()
        for name, one in about.get("deployments", {}).items()
    }


async def scale_deployment(application: str, deployment: str, replicas: int) -> None:
    """Have so many replicas. Returns before they start or end.

    Raises:
        RayError, ValueError: the controller does not answer, or the application was not deployed with
            ``external_scaler_enabled``.
    """
    await controller().update_deployment_replicas.remote(DeploymentID(deployment, application), replicas)


def handle_of(deployment: str, application: str) -> Any:
    """Of a deployment that need not be there yet: requests wait until it is."""
    return serve.get_deployment_handle(deployment, application, _check_exists=False)


class WithServe:
    """ASGI: tells Serve which request a call belongs to, so that what any process logs of it has its id."""

    def __init__(self, app: ASGIApp, application: str) -> None:
        self._app, self._application = app, application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            context = _RequestContext(scope["path"], request_id=identify(scope), app_name=self._application)
            _serve_request_context.set(context)
        await self._app(scope, receive, send)


SERVE_LOGGING = {"encoding": "JSON", "enable_access_log": False}
"""Of every deployment. Serve's own access log says less than ours (`paceline.serving.middleware.AccessLog`)."""


class _ToServe(logging.Handler):
    """Hands records on to Serve, which writes them with what it knows of the request."""

    def emit(self, record: logging.LogRecord) -> None:
        logging.getLogger("ray.serve").handle(record)


def write_with_serve() -> None:
    """Have what this process logs, from INFO on, in the file of its replica. Once is enough; more do nothing."""
    ours = logging.getLogger(LOGGER)
    if not any(isinstance(handler, _ToServe) for handler in ours.handlers):
        ours.addHandler(_ToServe())
        ours.setLevel(logging.INFO)
        ours.propagate = False  # else Serve has it again, from the standard error that it reads


_SPACE = b"paceline"  # of keys, beside that of the core allocator
STORE_ERRORS = (AttributeError, OSError, RuntimeError, ValueError, RayError)
"""Of a store that does not answer, or is not there."""


def keep(key: bytes, data: bytes) -> None:
    """Keep this in Ray's GCS, in place of what was kept. Raises one of `STORE_ERRORS`."""
    internal_kv._internal_kv_put(key, data, namespace=_SPACE)


def kept(key: bytes) -> bytes | None:
    """What is kept. Raises one of `STORE_ERRORS`."""
    data: bytes | None = internal_kv._internal_kv_get(key, namespace=_SPACE)
    return data


def forget(key: bytes) -> None:
    """Keep it no more. Raises one of `STORE_ERRORS`."""
    internal_kv._internal_kv_del(key, namespace=_SPACE)
