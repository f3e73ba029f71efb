"""The one `ModelLifecycle` of a service, over Ray: what each process of HTTP has of it, and the actor that decides.

`SharedLifecycle` knows what it was told last, so that a request for a loaded model asks nobody, and says twice a second
who uses what. Before a model leaves, every process is told, and reports once more: so what one process uses, no other's
request, idle time or lack of room takes away.

The `Owner` is one named actor, however many processes answer HTTP. There is none before somebody has something to
decide: a model on demand, a time to live, a limit of API keys, or an operator. It belongs to the HTTP process that made
it and ends with that; the next to ask makes another, which finds what is loaded at Ray Serve and what was decided in
Ray's key-value store. So nothing is left when a service ends. Not here: what is decided (`paceline.serving.lifecycle`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from time import monotonic
from typing import Any, Protocol

import ray
from ray import serve
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError
from ray.experimental import internal_kv  # its functions have no public names; Serve and others use them all the same
from ray.serve.exceptions import RayServeException

from paceline.core.errors import PacelineError, WorkerError
from paceline.placement.cluster.core_allocator import call_allocator
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.cluster.reservation import RESOURCE
from paceline.placement.host import environment
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.groups import ReplicaGroupPlan, Resident, to_unload
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.residency import Residency
from paceline.serving.deployments import Service, deployment_name, model_deployment
from paceline.serving.lifecycle import (
    ANSWERS,
    PERIOD_S,
    Decisions,
    Lifecycle,
    ModelLifecycle,
    ModelState,
    Report,
    View,
    first_state,
    is_awaited,
)
from paceline.serving.middleware import KeyCounts
from paceline.serving.openai.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from paceline.serving.ray_guard import DeploymentState, running_deployments, scale_deployment
from paceline.serving.refused import UNAVAILABLE, RefusedError, model_not_found, refusal
from paceline.serving.router import Failed, GenerationRequest, Health, Item, ModelCard, ModelRouter, RequestContext
from paceline.serving.serve_router import ServeRouter

log = logging.getLogger("paceline")


class Owner(Protocol):
    """The process with the `ModelLifecycle`. What it refuses it refuses with a RefusedError."""

    async def exchange(self, process: str, report: Report) -> View | None:
        """See `ModelLifecycle.reported`. None: there is nothing to decide, and never was; all is as the file says.

        Raises:
            PacelineError: it does not answer now.
        """

    async def demand(self, name: str) -> None:
        """See `ModelLifecycle`."""

    async def load(self, name: str) -> ModelState:
        """See `ModelLifecycle`."""

    async def unload(self, name: str) -> ModelState:
        """See `ModelLifecycle`."""

    async def pin(self, name: str, pinned: bool) -> ModelState:
        """See `ModelLifecycle`."""


class SharedLifecycle:
    """A `paceline.serving.lifecycle.Lifecycle`.

    owner        the process that decides
    residencies  of every model of the service, by name
    follow       is told which models are loaded, whenever that may have changed
    keys         requests by API key, of which the owner adds up those of all processes
    """

    def __init__(
        self,
        owner: Owner,
        residencies: Mapping[str, Residency],
        *,
        follow: Callable[[Collection[str]], None] = lambda _: None,
        keys: KeyCounts | None = None,
    ) -> None:
        self._owner, self._follow, self._keys = owner, follow, keys or KeyCounts()
        self._process = secrets.token_hex(8)
        self._states = {name: _as_in_the_file(name, own) for name, own in residencies.items()}
        self._seen = 0
        self._running: Counter[str] = Counter()
        self._used: dict[str, float] = {}
        self._asking = asyncio.Lock()  # what is said in one order arrives in that order

    def states(self) -> list[ModelState]:
        """See `Lifecycle`: as they were told last."""
        return list(self._states.values())

    @asynccontextmanager
    async def use(self, name: str) -> AsyncIterator[None]:
        if name not in self._states:
            raise model_not_found(name, list(self._states))
        self._running[name] += 1
        try:
            while self._states[name].state not in ANSWERS:
                await self._owner.demand(name)
                await self.restore()
            yield
        finally:
            self._running[name] -= 1
            self._used[name] = monotonic()

    async def load(self, name: str) -> ModelState:
        return await self._told(await self._owner.load(name))

    async def unload(self, name: str) -> ModelState:
        return await self._told(await self._owner.unload(name))

    async def pin(self, name: str, *, pinned: bool) -> ModelState:
        return await self._told(await self._owner.pin(name, pinned))

    async def restore(self) -> None:
        """See `Lifecycle`. Reports too."""
        async with self._asking:
            now = monotonic()
            report = Report(
                {name: count for name, count in self._running.items() if count},
                {name: now - used for name, used in self._used.items()},
                self._keys.own(),
                self._seen,
            )
            view = await self._owner.exchange(self._process, report)
            if view is None:
                return
            self._keys.elsewhere = view.keys
            if view.version != self._seen:
                self._follow([one.name for one in view.states if one.state in ANSWERS])
            self._states = {one.name: one for one in view.states}
            self._seen = view.version

    async def watch(self) -> None:
        """See `Lifecycle`. While nobody answers, what was told last holds."""
        silent = False
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.restore()
                silent = False
            except Exception as error:  # the next time may succeed
                if not silent:
                    known = isinstance(error, PacelineError)
                    log.warning("nobody says which models are in memory (%s)", error, exc_info=not known)
                silent = True

    async def _told(self, state: ModelState) -> ModelState:
        await self.restore()
        return state


def _as_in_the_file(name: str, residency: Residency) -> ModelState:
    state = first_state(residency)
    awaited = is_awaited(residency, state)
    return ModelState(name, state, residency.load, residency.pinned, awaited, 0, 0.0, residency.idle_ttl_s)


class ManagedRouter:
    """A `ModelRouter` over another one. ``lifecycle``: knows every model of it."""

    def __init__(self, router: ModelRouter, lifecycle: Lifecycle) -> None:
        self._router, self.lifecycle = router, lifecycle

    async def models(self) -> Sequence[ModelCard]:
        return await self._router.models()

    async def stream(self, request: GenerationRequest, context: RequestContext) -> AsyncIterator[Item]:
        try:
            async with self.lifecycle.use(request.model):
                async for item in self._router.stream(request, context):
                    yield item
        except (RefusedError, PacelineError) as error:
            yield Failed.of(refusal(error))

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        async with self.lifecycle.use(request.model):
            return await self._router.tokenize(request)

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        async with self.lifecycle.use(request.model):
            return await self._router.detokenize(request)

    async def health(self) -> Health:
        """See `ModelRouter`. A model that is not in memory, as it should be, is no reason not to be ready."""
        models = (await self._router.health()).models
        words = {
            one.name: models.get(one.name, "loading") if one.state in ("loaded", "scaled") else one.state
            for one in self.lifecycle.states()
        }
        awaited = [one.name for one in self.lifecycle.states() if one.awaited]
        return Health(all(words[name] == "ready" for name in awaited), words)

    async def metrics(self) -> bytes:
        return await self._router.metrics()


_ANSWER_S = 5.0  # that an answer about what is known may take; what loads a model takes its time
_FIRST_S = 60.0  # that the first one may take, for which a process may have to start: nothing is known before it
_TRIES, _PAUSE_S = 40, 0.25  # with an actor that is started again
_RETRY_S = 5.0
_ERRORS = (RayError, RuntimeError, ValueError, TimeoutError)


def actor_name(application: str) -> str:
    """Of the actor, in `paceline.placement.cluster.nodes.NAMESPACE`."""
    return f"paceline-lifecycle-{application}"


class LifecycleActor:
    """A `ModelLifecycle` for the processes of HTTP. Its methods are those of `Owner`."""

    def __init__(self, service: Service) -> None:
        eager = [name for name, group in service.groups.items() if not group.is_on_demand]
        router = ServeRouter({name: service.route(name) for name in eager})
        loader = ServeLoader(service, router)
        residencies = {name: group.residency for name, group in service.groups.items()}
        self._lifecycle = ModelLifecycle(loader, residencies, shared=True)
        self._starting = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def exchange(self, process: str, report: Report) -> View:
        """See `ModelLifecycle.reported`."""
        return (await self._restored()).reported(process, report)

    async def demand(self, name: str) -> None:
        await (await self._restored()).demand(name)

    async def load(self, name: str) -> ModelState:
        return await (await self._restored()).load(name)

    async def unload(self, name: str) -> ModelState:
        return await (await self._restored()).unload(name)

    async def pin(self, name: str, pinned: bool) -> ModelState:
        return await (await self._restored()).pin(name, pinned=pinned)

    async def _restored(self) -> ModelLifecycle:
        async with self._starting:
            if self._watching is None:
                await self._lifecycle.restore()
                self._watching = asyncio.ensure_future(self._lifecycle.watch())
        return self._lifecycle


class RayOwner:
    """See the module. ``needed``: there is something to decide from the start."""

    def __init__(self, service: Service, *, needed: bool) -> None:
        self._service, self._needed = service, needed
        self._actor: Any = None
        self._looked = self._told = False
        self._making = asyncio.Lock()

    async def exchange(self, process: str, report: Report) -> View | None:
        view: View | None = await self._call("exchange", process, report, seconds=_ANSWER_S if self._told else _FIRST_S)
        self._told = True
        return view

    async def demand(self, name: str) -> None:
        await self._ask("demand", name)

    async def load(self, name: str) -> ModelState:
        return await self._ask("load", name)  # type: ignore[no-any-return]

    async def unload(self, name: str) -> ModelState:
        return await self._ask("unload", name)  # type: ignore[no-any-return]

    async def pin(self, name: str, pinned: bool) -> ModelState:
        return await self._ask("pin", name, pinned)  # type: ignore[no-any-return]

    async def _ask(self, method: str, *arguments: object) -> Any:
        """Raises RefusedError: it refuses, or there is none."""
        self._needed = True
        try:
            return await self._call(method, *arguments, seconds=None)
        except WorkerError as error:
            raise RefusedError(
                503, f"{error}; send the request again", code=UNAVAILABLE, retry_after_s=_RETRY_S
            ) from error

    async def _call(self, method: str, *arguments: object, seconds: float | None) -> Any:
        """What it answers, or None where there is none and none is needed. One that is lost is made anew and asked
        again: all that is asked may be repeated.

        Raises:
            RefusedError: it refuses.
            WorkerError: there is none, or it does not answer within ``seconds``.
        """
        lost: Exception | None = None
        for _ in range(_TRIES):
            try:
                actor = await self._find()
                if actor is None:
                    return None
                return await asyncio.wait_for(getattr(actor, method).remote(*arguments), seconds)
            except ActorUnavailableError as error:  # Ray starts it again, and ends it where nobody keeps its handle
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
        log.warning("the actor of the lifecycle did not answer %s", method, exc_info=lost)
        raise WorkerError("the process that loads and unloads models does not answer") from lost

    async def _find(self) -> Any:
        """The actor, which is made where it is needed; None where it is not and there is none."""
        if self._actor is None:
            async with self._making:
                if self._actor is None:
                    if not self._looked:  # an operator may have decided something before this process began
                        decided = await _read_decisions(self._service.application)
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


_LOOK_S = 0.2  # between looks at what became of it
_ALLOCATOR_ANSWER_S = 30.0  # that the core allocator may take
_RAY_ERRORS = (OSError, RuntimeError, ValueError, RayError, RayServeException)  # what Ray and Serve raise
_STUCK = ("UNHEALTHY", "DEPLOY_FAILED")


class ServeLoader:
    """A `Loader` over Ray Serve: an unloaded model has no replica, so its cores and its memory are free.

    A model that is loaded from the start is a deployment of the service's application, and one without replicas when it
    is unloaded. A model that is loaded on demand is an application of its own, since Serve deploys none without
    replicas. Errors have no text of Ray's, since clients read them; the log has it.

    router  tells which replicas answer, and on which cores; models on demand are put into it when they are loaded
    """

    def __init__(self, service: Service, router: ServeRouter) -> None:
        self._service, self._router = service, router
        self._application, self._groups, self._policy = service.application, service.groups, service.fault_policy

    async def load(self, name: str) -> None:
        group = self._groups[name]
        try:
            if group.is_on_demand:
                app = model_deployment(group, self._policy)
                await asyncio.to_thread(serve.run, app, name=self._service.own_application(name), route_prefix=None)
                self._router.put(name, self._service.route(name))
            else:
                await self._scale(name, group.replicas)
            await self._until_it_answers(name)
        except BaseException as error:
            with suppress(*_RAY_ERRORS, WorkerError):
                await self.unload(name)
            if isinstance(error, _RAY_ERRORS):
                log.warning("%s does not start", name, exc_info=error)
                raise WorkerError(f"{name} does not start; the log of its replica says why") from error
            raise

    async def unload(self, name: str) -> None:
        if self._groups[name].is_on_demand:
            self._router.remove(name)
            await asyncio.to_thread(serve.delete, self._service.own_application(name))
            return
        await self._scale(name, 0)
        while (await self._deployments())[name].replicas:
            await asyncio.sleep(_LOOK_S)
        self._router.forget(name)

    async def loaded(self) -> Sequence[str]:
        loaded = [name for name, one in (await self._deployments()).items() if one.target]
        applications = (await asyncio.to_thread(serve.status)).applications
        on_demand = [
            name
            for name, group in self._groups.items()
            if group.is_on_demand and self._service.own_application(name) in applications
        ]
        for name in on_demand:
            self._router.put(name, self._service.route(name))
        return [*loaded, *on_demand]

    async def to_unload(self, name: str, movable: Sequence[str]) -> Sequence[str]:
        """See `Loader`. Whatever else has cores in the cluster stays."""
        group = self._groups[name]
        residents = [Resident(other, _cores(await self._router.cards(other)), movable=True) for other in movable]
        return await asyncio.to_thread(_room, group, [one for one in residents if one.cores])

    async def remember(self, kept: Decisions) -> None:
        await _write_decisions(self._application, kept)

    async def remembered(self) -> Decisions:
        return await _read_decisions(self._application)

    async def _until_it_answers(self, name: str) -> None:
        end = monotonic() + self._policy.startup_timeout_s
        while not await self._router.cards(name, fresh=True):
            states = await self._deployments()
            if name in states and states[name].status in _STUCK:
                raise WorkerError(f"{name} does not start; the log of its replica says why")
            if monotonic() > end:
                raise WorkerError(f"{name} did not start within {self._policy.startup_timeout_s} seconds")
            await asyncio.sleep(_LOOK_S)

    async def _scale(self, name: str, replicas: int) -> None:
        try:
            await scale_deployment(self._application, deployment_name(name), replicas)
        except (RayError, ValueError) as error:
            log.warning("Ray Serve did not take the number of replicas of %s", name, exc_info=error)
            raise WorkerError(f"Ray Serve did not take the number of replicas of {name}; the log says why") from error

    async def _deployments(self) -> Mapping[str, DeploymentState]:
        """What Serve knows of each model."""
        try:
            deployments = await running_deployments(self._application)
        except (RayError, ValueError) as error:
            raise WorkerError(f"Ray Serve's controller does not answer ({type(error).__name__})") from error
        return {name: deployments[key] for name in self._groups if (key := deployment_name(name)) in deployments}


def _room(group: ReplicaGroupPlan, movable: Sequence[Resident]) -> Sequence[str]:
    stay: dict[str, list[CoreRange]] = {}
    for node, taken in call_allocator("taken", timeout=_ALLOCATOR_ANSWER_S).items():
        leave = [run for one in movable for run in one.cores.get(node, ())]
        stay[node] = [run for run in taken.values() if run not in leave]
    return to_unload(group, [*movable, Resident("others", stay)], _nodes(group.plan.instance))


def _cores(cards: Sequence[ModelCard]) -> dict[str, list[CoreRange]]:
    """What all replicas of a model have, by node."""
    cores: dict[str, list[CoreRange]] = {}
    for placed in (placed for card in cards for placed in card.placement):
        cores.setdefault(placed.node, []).append(CoreRange(placed.cores[0], placed.cores[-1]))
    return cores


def _nodes(instance: Instance) -> dict[str, Instance]:
    """The living nodes with cores. One with more or fewer than the plan's instance is such an instance of its size."""
    nodes = {}
    for node in ray.nodes():
        cores = int(node["Resources"].get(RESOURCE, 0)) if node["Alive"] else 0
        if cores:
            devices = max(1, cores // instance.cores_per_device)
            nodes[str(node["NodeID"])] = replace(instance, devices=devices)
    return nodes


_SPACE = b"paceline"  # of keys, beside that of the core allocator
_STORE_ERRORS = (
    AttributeError,
    OSError,
    RuntimeError,
    ValueError,
    RayError,
)  # of a store that does not answer, or is not there


async def _write_decisions(application: str, decisions: Decisions) -> None:
    """Replace what an operator decided about an application's models, so that the next HTTP process knows it.

    It lies in the key-value store of Ray's GCS, as the state of Ray Serve itself does: it outlives every process but
    the GCS, and that one too where it has fault tolerance.

    Raises:
        WorkerError: the store does not answer.
    """
    data = json.dumps(asdict(decisions)).encode()
    try:
        await asyncio.to_thread(internal_kv._internal_kv_put, _key(application), data, namespace=_SPACE)
    except _STORE_ERRORS as error:
        raise WorkerError(f"Ray's GCS does not keep what is pinned ({type(error).__name__})") from error


async def _read_decisions(application: str) -> Decisions:
    """What was written last; nothing where nothing was.

    Raises:
        WorkerError: the store does not answer, or something else wrote there.
    """
    try:
        data = await asyncio.to_thread(internal_kv._internal_kv_get, _key(application), namespace=_SPACE)
        return Decisions() if data is None else Decisions(**json.loads(data))
    except (*_STORE_ERRORS, TypeError) as error:
        raise WorkerError(f"Ray's GCS does not tell what is pinned ({type(error).__name__})") from error


def forget_decisions(application: str) -> None:
    """The application has ended; the next one of its name begins as its file says.

    Raises:
        RayError, RuntimeError: the store does not answer.
    """
    internal_kv._internal_kv_del(_key(application), namespace=_SPACE)


def _key(application: str) -> bytes:
    return f"operator-decisions-{application}".encode()
