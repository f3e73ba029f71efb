"""Lifecycle of a service over Ray: the client in each ingress process, and the one actor with the `ModelLifecycle`.

The actor is created only when needed: for a model on demand, a time to live, a limit of API keys, or an operator. It
belongs to the ingress process that created it and ends with it. The next call creates another one, which reads the
loaded models from Ray Serve and the decisions from Ray's key-value store. Requests for a model that responds do not
pass it; it polls the model's replicas for their usage.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from time import monotonic
from typing import Any

import ray
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from paceline.core.errors import PacelineError, WorkerError
from paceline.placement.cluster import nodes
from paceline.placement.cluster.core_allocator import call_allocator
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE, RESOURCE
from paceline.placement.host import environment
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.groups import LoadedModel, ReplicaGroupPlan, to_unload
from paceline.placement.planning.instances import Instance
from paceline.serving import ray_guard
from paceline.serving.errors import UNAVAILABLE, RefusedError
from paceline.serving.lifecycle import Decisions, ModelLifecycle, ModelState, ModelUsage
from paceline.serving.middleware import KeyCounts
from paceline.serving.ray_guard import DeploymentState, handle_of
from paceline.serving.replica import model_deployment
from paceline.serving.router import ModelCard
from paceline.serving.serve_router import ServeRouter, deployment_name

log = logging.getLogger("paceline")

_PERIOD_S = 0.5  # between a process's reports of the requests of its keys
_SILENT_S = 10.0  # after which a process without a report, and its requests, count as dead
_ANSWER_S = 5.0  # timeout of queries; loading a model has none
_TRIES, _PAUSE_S = 40, 0.25  # while Ray restarts the actor
_RETRY_S = 5.0
_ERRORS = (RayError, RuntimeError, ValueError, TimeoutError)
_LOOK_S = 0.2  # between checks of a model's state
_ALLOCATOR_ANSWER_S = 30.0  # timeout of the core allocator
_STUCK = ("UNHEALTHY", "DEPLOY_FAILED")


def actor_name(application: str) -> str:
    return f"paceline-lifecycle-{application}"


@dataclass(frozen=True, slots=True)
class Service:
    """Models of a service, as known to each process. ``application``: its name in Serve."""

    application: str
    groups: Mapping[str, ReplicaGroupPlan]
    fault_policy: FaultPolicy

    def application_of(self, name: str) -> str:
        """Return a model's application: a separate one on demand, since Serve deploys nothing without replicas."""
        return f"{self.application}-{name}" if self.groups[name].is_on_demand else self.application

    def handle(self, name: str) -> Any:
        """Return the handle of a model's deployment, which may not exist."""
        return handle_of(deployment_name(name), self.application_of(name))


class LifecycleActor:
    """The `ModelLifecycle`, and the requests per API key in all ingress processes."""

    def __init__(self, service: Service) -> None:
        residencies = {name: group.residency for name, group in service.groups.items()}
        self._lifecycle = ModelLifecycle(ServeLoader(service), residencies)
        self._starting = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._counts: dict[str, tuple[float, Mapping[str, int]]] = {}  # of each process, with the time of its report

    async def ask(self, method: str, *arguments: object) -> Any:
        """Call a method of the lifecycle, which first reads what an earlier one left."""
        async with self._starting:
            if self._watching is None:
                await self._lifecycle.restore()
                self._watching = asyncio.ensure_future(self._lifecycle.watch())
        return await getattr(self._lifecycle, method)(*arguments)

    async def count(self, process: str, counts: Mapping[str, int]) -> Mapping[str, int]:
        """Record a process's number of requests per key; return the sums of all other processes."""
        now = monotonic()
        self._counts[process] = now, counts
        self._counts = {name: one for name, one in self._counts.items() if now - one[0] < _SILENT_S}
        elsewhere: Counter[str] = Counter()
        for name, (_, own) in self._counts.items():
            if name != process:
                elsewhere.update(own)
        return elsewhere


class ServeLifecycle:
    """Client of the actor in an ingress process, a `paceline.serving.lifecycle.Lifecycle`.

    needed  the actor is needed from the start
    keys    requests by API key in this process; None: there is no limit
    """

    def __init__(self, service: Service, *, needed: bool, keys: KeyCounts | None = None) -> None:
        self._service, self._needed, self._keys = service, needed or keys is not None, keys
        self._process = secrets.token_hex(8)
        self._actor: Any = None
        self._looked = False
        self._making = asyncio.Lock()
        self._states = [
            ModelState.of(name, group.residency, pinned=group.residency.pinned)
            for name, group in service.groups.items()
        ]

    async def states(self) -> Sequence[ModelState]:
        """Return the states; the last known ones while the actor does not respond."""
        try:
            self._states = await self._call("ask", "states", seconds=_ANSWER_S) or self._states
        except WorkerError as error:
            log.warning("the list of loaded models is not available (%s)", error)
        return self._states

    async def demand(self, name: str) -> None:
        await self._call("ask", "demand", name, seconds=None)

    async def load(self, name: str) -> ModelState:
        return await self._ask("load", name)

    async def unload(self, name: str) -> ModelState:
        return await self._ask("unload", name)

    async def pin(self, name: str, pinned: bool) -> ModelState:
        return await self._ask("pin", name, pinned)

    async def restore(self) -> None:
        await self.states()

    async def watch(self) -> None:
        """Report the requests of each key to the other processes, until cancelled."""
        while self._keys is not None:
            await asyncio.sleep(_PERIOD_S)
            try:
                self._keys.elsewhere = await self._call("count", self._process, self._keys.own(), seconds=_ANSWER_S)
            except PacelineError:
                continue  # it is logged; the last received counts hold

    async def _ask(self, method: str, *arguments: object) -> ModelState:
        """Call the actor for an operator. RefusedError (503) if it is not available."""
        self._needed = True
        try:
            state: ModelState = await self._call("ask", method, *arguments, seconds=None)
        except WorkerError as error:
            raise RefusedError(
                503, f"{error}; send the request again", code=UNAVAILABLE, retry_after_s=_RETRY_S
            ) from error
        return state

    async def _call(self, method: str, *arguments: object, seconds: float | None) -> Any:
        """Call a method of the actor; return None if there is none and none is needed. If the actor is lost, create it
        again and retry: all calls may be repeated. Raises WorkerError if it does not respond within ``seconds``.
        """
        lost: Exception | None = None
        for _ in range(_TRIES):
            try:
                actor = await self._find()
                if actor is None:
                    return None
                return await asyncio.wait_for(getattr(actor, method).remote(*arguments), seconds)
            except ActorUnavailableError as error:  # Ray restarts it, and ends it if no process keeps its handle
                lost = error
                await asyncio.sleep(_PAUSE_S)
            except RayActorError as error:
                self._actor, lost = None, error
                await asyncio.sleep(_PAUSE_S)
            except _ERRORS as error:
                if isinstance(error, RayTaskError) and isinstance(error.cause, RefusedError):
                    raise error.cause from error
                lost = error
                break
        log.warning("the lifecycle actor did not respond to %s", (method, *arguments)[:2], exc_info=lost)
        raise WorkerError("the process that loads and unloads models does not respond; see its log") from lost

    async def _find(self) -> Any:
        """Return the actor, created if it is needed; None if it is not and there is none."""
        if self._actor is None:
            async with self._making:
                if self._actor is None:
                    if not self._looked:  # an operator may have made decisions before this process started
                        decided = await read_decisions(self._service.application)
                        self._needed |= any((decided.pinned, decided.unpinned, decided.stopped))
                        self._looked = True
                    self._actor = await asyncio.to_thread(self._make if self._needed else self._existing)
                    self._needed |= self._actor is not None
        return self._actor

    def _make(self) -> Any:
        actor = ray.remote(LifecycleActor).options(
            name=actor_name(self._service.application), namespace=NAMESPACE, get_if_exists=True, num_cpus=0,
            max_restarts=-1, scheduling_strategy="DEFAULT", runtime_env={"env_vars": environment.without_cores()},
        )  # fmt: skip
        return actor.remote(self._service)

    def _existing(self) -> Any:
        try:
            return ray.get_actor(actor_name(self._service.application), namespace=NAMESPACE)
        except ValueError:
            return None


class ServeLoader:
    """Loader of models on Ray Serve. An unloaded model is a deployment without replicas, or none, so its cores and
    memory are free. Errors omit Ray's text, since clients read them; the log has it.
    """

    def __init__(self, service: Service, router: ServeRouter | None = None) -> None:
        self._service, self._groups = service, service.groups
        self._startup_timeout_s = service.fault_policy.startup_timeout_s
        self._router = router or ServeRouter({name: service.handle(name) for name in service.groups})

    async def load(self, name: str) -> None:
        try:
            if self._groups[name].is_on_demand:
                await self._change(name, lambda: asyncio.to_thread(self._deploy, name))
            else:
                await self._scale(name, self._groups[name].replicas)
            await self._router.ask_all(name, "stay")  # if it was leaving, and could not be ended
            await self._until_it_answers(name)
        except BaseException:
            try:
                await self.unload(name)
            except WorkerError:
                log.warning("%s does not start, and stopping it failed", name)
            raise

    async def unload(self, name: str) -> None:
        if self._groups[name].is_on_demand:
            await self._change(name, lambda: asyncio.to_thread(serve.delete, self._service.application_of(name)))
            return
        await self._scale(name, 0)
        while (await self._deployments())[name].replicas:
            await asyncio.sleep(_LOOK_S)

    async def loaded(self) -> Sequence[str]:
        return [name for name, one in (await self._deployments()).items() if one.target]

    async def usage(self, name: str) -> ModelUsage | None:
        found: list[ModelUsage] = await self._router.ask_all(name, "usage")
        if not found:
            return None
        return ModelUsage(sum(one.running for one in found), min(one.idle_s for one in found))

    async def leave(self, name: str, *, unless_used: bool) -> bool:
        answers = await self._router.ask_all(name, "leave", unless_used)
        if unless_used and not (answers and all(answers)):
            await self._router.ask_all(name, "stay")
            return False
        return True

    async def to_unload(self, name: str, movable: Sequence[str]) -> Sequence[str]:
        residents = [LoadedModel(other, _cores(await self._router.cards(other)), movable=True) for other in movable]
        return await asyncio.to_thread(_room, self._groups[name], [one for one in residents if one.cores])

    async def remember(self, kept: Decisions) -> None:
        data = json.dumps(asdict(kept)).encode()
        try:
            await asyncio.to_thread(nodes.keep, _key(self._service.application), data)
        except nodes.STORE_ERRORS as error:
            raise WorkerError(
                f"cannot store the pinned models in Ray's GCS ({type(error).__name__}); check that the head node is "
                "up, then retry"
            ) from error

    async def remembered(self) -> Decisions:
        return await read_decisions(self._service.application)

    async def _until_it_answers(self, name: str) -> None:
        end = monotonic() + self._startup_timeout_s
        while not await self._router.cards(name):
            state = (await self._deployments()).get(name)
            if state is not None and state.status in _STUCK:
                raise WorkerError(f"{name} did not start; see the log of its replica")
            if monotonic() > end:
                raise WorkerError(
                    f"{name} did not start within {self._startup_timeout_s} seconds; see the log of its replica, or "
                    "raise fault_policy.startup_timeout_s"
                )
            await asyncio.sleep(_LOOK_S)

    def _deploy(self, name: str) -> None:
        app = model_deployment(self._groups[name], self._service.fault_policy)
        serve.run(app, name=self._service.application_of(name), route_prefix=None)

    async def _scale(self, name: str, replicas: int) -> None:
        application = self._service.application
        await self._change(name, lambda: ray_guard.scale_deployment(application, deployment_name(name), replicas))

    async def _change(self, name: str, change: Callable[[], Awaitable[object]]) -> None:
        try:
            await change()
        except (OSError, RuntimeError, ValueError, RayError, RayServeException) as error:
            log.warning("Ray Serve did not start or stop %s", name, exc_info=error)
            raise WorkerError(f"Ray Serve did not start or stop {name}; see its log") from error

    async def _deployments(self) -> Mapping[str, DeploymentState]:
        try:
            running = await ray_guard.running_deployments()
        except (RayError, ValueError) as error:
            raise WorkerError(
                f"Ray Serve's controller does not respond ({type(error).__name__}); check that the head node is up"
            ) from error
        keys = {name: (self._service.application_of(name), deployment_name(name)) for name in self._groups}
        return {name: running[key] for name, key in keys.items() if key in running}


def _room(group: ReplicaGroupPlan, movable: Sequence[LoadedModel]) -> Sequence[str]:
    stay: dict[str, list[CoreRange]] = {}
    for node, taken in call_allocator("taken", timeout=_ALLOCATOR_ANSWER_S).items():
        leave = [run for one in movable for run in one.cores.get(node, ())]
        stay[node] = [run for run in taken.values() if run not in leave]
    return to_unload(group, [*movable, LoadedModel("others", stay)], _nodes(group.plan.instance))


def _cores(cards: Sequence[ModelCard]) -> dict[str, list[CoreRange]]:
    cores: dict[str, list[CoreRange]] = {}
    for placed in (placed for card in cards for placed in card.placement):
        cores.setdefault(placed.node, []).append(CoreRange(placed.cores[0], placed.cores[-1]))
    return cores


def _nodes(instance: Instance) -> dict[str, Instance]:
    """Living nodes with cores. One of another size counts as the plan's instance, resized."""
    found = {}
    for node in ray.nodes():
        cores = int(node["Resources"].get(RESOURCE, 0)) if node["Alive"] else 0
        if cores:
            devices = max(1, cores // instance.cores_per_device)
            found[str(node["NodeID"])] = replace(instance, devices=devices)
    return found


async def read_decisions(application: str) -> Decisions:
    """Return the operator's last decisions about an application's models; empty if there are none.

    They are in the key-value store of Ray's GCS, like the state of Ray Serve, so they outlive every process but the
    GCS, and that one too if it has fault tolerance.
    """
    try:
        data = await asyncio.to_thread(nodes.kept, _key(application))
        return Decisions() if data is None else Decisions(**json.loads(data))
    except (*nodes.STORE_ERRORS, TypeError) as error:
        raise WorkerError(
            f"cannot read the pinned models from Ray's GCS ({type(error).__name__}); check that the head node is "
            "up, then retry"
        ) from error


def forget_decisions(application: str) -> None:
    """Delete the decisions of an ended application; the next one of its name starts from its file."""
    nodes.forget(_key(application))


def _key(application: str) -> bytes:
    return f"operator-decisions-{application}".encode()
