"""Which worker has which cores in a cluster: one state, in one actor, so that no two plans use the same core.

`CoreAllocator` is a named actor. If it dies, the next one rebuilds its state from its record in Ray's key-value store
and from which named actors live: a worker that is busy or hangs need not answer. Instance types are those of nodes, so
that a cluster may mix them. It holds no model and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Thread
from time import monotonic, sleep
from typing import Any, Protocol

import ray
from ray.experimental import internal_kv

from paceline.core.errors import PlanError, WorkerError
from paceline.placement.cluster import nodes
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.host import environment
from paceline.placement.planning.core_range import CoreRange, Fragmentation, best_fit, fragmentation, free_runs
from paceline.placement.planning.instances import Instance
from paceline.placement.remote.reconnect import STARTUP_TIMEOUT_S

NAME = "paceline-core-allocator"
WORKERS = "paceline-worker-"
_AT = "@"
_RECORD, _STORE = b"core-allocator", b"paceline"  # key and namespace in Ray's key-value store
_IDLE_S = 10.0  # between looks whether anything is taken: the processes that took it may have been killed
_EXIT_S = 60.0  # more than it takes to be killed: what is requested meanwhile would be forgotten


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """Cores for one worker.

    actor              the name under which they are requested, or the whole name of an actor that runs already
    degree             how many
    preferred          the range of the plan; another one is given if that is taken
    startup_timeout_s  seconds in which the worker exists; without one the request is void then, for its caller may
                       have died
    """

    actor: str
    degree: int
    preferred: CoreRange
    startup_timeout_s: float = STARTUP_TIMEOUT_S


class ClusterView(Protocol):
    """What an allocator knows of the cluster."""

    def nodes(self) -> Collection[str]:
        """The nodes that live."""

    def actors(self) -> Mapping[str, tuple[str, CoreRange] | None]:
        """The named actors that are not dead: of workers, also the node and cores that their names hold."""

    def read(self) -> Mapping[str, Any]:
        """The record of an earlier allocator; empty if there is none."""

    def store(self, record: Mapping[str, object]) -> None:
        """Keep a record for the next allocator. It has plain values only."""


class RayView:
    """The cluster that this process is connected to."""

    def nodes(self) -> Collection[str]:
        return nodes.living()

    def actors(self) -> Mapping[str, tuple[str, CoreRange] | None]:
        cores_of: dict[str, tuple[str, CoreRange] | None] = {}
        for actor in ray.util.list_named_actors(all_namespaces=True):
            name, _, location = str(actor["name"]).partition(_AT)
            if actor["namespace"] == NAMESPACE and name.startswith(WORKERS):
                node, _, cores = location.partition(":")
                first, _, last = cores.partition("-")
                cores_of[name] = node, CoreRange(int(first), int(last or first))
            else:
                cores_of[str(actor["name"])] = None
        return cores_of

    def read(self) -> Mapping[str, Any]:
        text = internal_kv._internal_kv_get(_RECORD, namespace=_STORE)
        record: Mapping[str, Any] = json.loads(text) if text else {}
        return record

    def store(self, record: Mapping[str, object]) -> None:
        internal_kv._internal_kv_put(_RECORD, json.dumps(record).encode(), overwrite=True, namespace=_STORE)


class CoreAllocator:
    """Gives and takes back cores; methods run one at a time. As an actor it ends by itself when no core has been taken
    for ``idle`` seconds.
    """

    def __init__(self, idle: float | None = None, cluster: ClusterView | None = None) -> None:
        self._cluster: ClusterView = cluster or RayView()
        self._instances: dict[str, Instance] = {}  # node -> what it is
        self._taken: dict[str, dict[str, CoreRange]] = {}  # node -> name -> cores
        self._running: set[str] = set()
        self._deadlines: dict[str, float] = {}  # of requests whose workers may not exist yet
        living = self._cluster.actors()
        self._restore(self._cluster.read(), living)
        for name, where in living.items():
            if where is not None:
                self._taken.setdefault(where[0], {})[name] = where[1]
                self._running.add(name)
        if idle is not None:
            Thread(target=_end_when_unused, args=(idle,), daemon=True).start()

    def confirm(self, actors: Sequence[str]) -> None:
        """These workers run now; from here on their cores are free again when they end."""
        names = list(map(_name_of, actors))
        self._running.update(names)
        for name in names:
            self._deadlines.pop(name, None)

    def claim(self, node: str, instance: Instance, requests: Sequence[CoreRequest]) -> list[CoreRange]:
        """Ranges on a node, which is such an ``instance``, for workers that start together; all of them or none.

        Raises:
            PlanError: there is no room.
        """
        self._forget_dead()
        names = {request.actor for request in requests}  # a request that is repeated after a fault replaces itself
        taken = {name: cores for name, cores in self._taken.get(node, {}).items() if name not in names}
        ranges = []
        for request in requests:
            used = list(taken.values())
            free = request.preferred in free_runs(instance, used, request.degree)
            cores = request.preferred if free else best_fit(instance, used, request.degree)
            if cores is None:
                left = fragmentation(instance, used)
                raise PlanError(
                    f"{left.free} cores free but no aligned run of {request.degree} on node {node[:8]}; stop a model, "
                    "or start this one where there is room"
                )
            taken[request.actor] = cores
            ranges.append(cores)
        self._taken[node], self._instances[node] = taken, instance
        self._write()
        now = monotonic()
        self._deadlines |= {request.actor: now + request.startup_timeout_s for request in requests}
        return ranges

    def release(self, actors: Sequence[str]) -> None:
        """These workers are gone."""
        names = [_name_of(actor) for actor in actors]
        self._running.difference_update(names)
        for name in names:
            self._deadlines.pop(name, None)
            for ranges in self._taken.values():
                ranges.pop(name, None)
        self._write()

    def end_unused(self) -> None:
        """End if nothing is taken. This runs between two methods, so that no request that was answered is lost."""
        if not self.taken():
            ray.kill(ray.get_runtime_context().current_actor)  # which also keeps Ray from restarting it
            sleep(_EXIT_S)

    def taken(self) -> dict[str, dict[str, CoreRange]]:
        """Node -> worker -> cores."""
        self._forget_dead()
        return {node: dict(ranges) for node, ranges in self._taken.items() if ranges}

    def report(self) -> dict[str, Fragmentation]:
        """What is free on each living node where something runs or ran, and in what pieces."""
        self._forget_dead()
        return {
            node: fragmentation(self._instances[node], list(ranges.values()))
            for node, ranges in self._taken.items()
            if node in self._instances
        }

    def _forget_dead(self) -> None:
        """Workers that ran and are gone, or never started, have no cores, released or not. Nor have dead nodes."""
        now = monotonic()
        overdue = {name for name, deadline in self._deadlines.items() if now > deadline}
        if gone := (self._running | overdue).difference(self._cluster.actors()):
            self.release(sorted(gone))
        living = self._cluster.nodes()
        self._taken = {node: ranges for node, ranges in self._taken.items() if node in living}

    def _write(self) -> None:
        """Keep what the next allocator must know if this one is killed."""
        self._cluster.store(
            {
                node: {
                    "instance": asdict(self._instances[node]),
                    "taken": {name: [cores.first, cores.last] for name, cores in ranges.items()},
                }
                for node, ranges in self._taken.items()
                if node in self._instances
            }
        )

    def _restore(self, record: Mapping[str, Any], living: Mapping[str, object]) -> None:
        """What an earlier allocator gave to actors that still live."""
        for node, entry in record.items():
            fields = entry["instance"]
            self._instances[node] = Instance(**{**fields, "degrees": tuple(fields["degrees"])})
            for name, (first, last) in entry["taken"].items():
                if name in living:
                    self._taken.setdefault(node, {})[name] = CoreRange(first, last)
                    self._running.add(name)


def worker_name(name: str, node: str, cores: CoreRange) -> str:
    """What Ray calls the worker that requested cores under a name and got these."""
    return f"{name}{_AT}{node}:{cores}"


def _end_when_unused(idle: float) -> None:
    """Within the allocator's actor, and in turn with what other processes ask of it."""
    me = ray.get_runtime_context().current_actor
    while True:
        sleep(idle)
        me.end_unused.options(max_task_retries=0).remote()


def _name_of(actor: str) -> str:
    return actor.partition(_AT)[0]


def allocator() -> ray.actor.ActorHandle:
    """The cluster's allocator; it is made if there is none. It belongs to no placement group of whoever calls first."""
    actor = ray.remote(CoreAllocator).options(
        name=NAME, namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0, max_restarts=-1,
        max_task_retries=3, scheduling_strategy="DEFAULT", runtime_env={"env_vars": environment.without_cores()},
    )  # fmt: skip
    return actor.remote(_IDLE_S)


def call_allocator(method: str, *arguments: object, timeout: float) -> Any:
    """What the allocator returns. One that has just ended is made anew and asked again.

    Raises:
        PlanError: it refuses.
        WorkerError: it does not answer within ``timeout`` seconds, or is lost.
    """

    def call() -> Any:
        return ray.get(getattr(allocator(), method).remote(*arguments), timeout=timeout)

    try:
        try:
            return call()
        except ray.exceptions.RayActorError:
            return call()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PlanError):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
        kind = type(error).__name__
        raise WorkerError(
            f"the allocator of the cluster's cores gave no answer in {timeout} seconds ({kind}); try again"
        ) from error


def give_back(actors: Sequence[str], timeout: float) -> None:
    """These workers are gone. Without an allocator nothing is to be done: a new one sees the living workers only."""
    with suppress(ValueError, ray.exceptions.RayError):
        ray.get(ray.get_actor(NAME, NAMESPACE).release.remote(actors), timeout=timeout)


def end_unused(timeout: float) -> None:
    """End the allocator if nothing is taken."""
    with suppress(ValueError, ray.exceptions.RayError):  # its end is an error of the call, too
        ray.get(ray.get_actor(NAME, NAMESPACE).end_unused.options(max_task_retries=0).remote(), timeout=timeout)
