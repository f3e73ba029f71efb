"""Core allocation in a cluster: one state, in one actor, so that no two plans use the same core.

`CoreAllocator` is a named actor. If it dies, the next one rebuilds its state from its record in Ray's key-value store
and from the named actors that are alive; a worker that is busy or hangs does not have to respond. Each node has its own
instance type, so a cluster may mix them. It holds no model and starts nothing.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from threading import Thread
from time import monotonic, sleep
from typing import Any

import ray

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
_RECORD = b"core-allocator"  # its key in Ray's key-value store
_IDLE_S = 10.0  # between checks whether any core is in use: the processes that used them may have been killed
_EXIT_S = 60.0  # longer than killing takes: a request received until then would be lost


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """Request for the cores of one worker.

    actor              name of the request, or the full name of a running actor
    preferred          range of the plan; another one of its length is assigned if that is in use
    startup_timeout_s  seconds in which the worker must exist; otherwise the request expires, since its caller may
                       have died
    """

    actor: str
    preferred: CoreRange
    startup_timeout_s: float = STARTUP_TIMEOUT_S


class ClusterView:
    """The cluster that this process is connected to, as the allocator sees it."""

    def nodes(self) -> Collection[str]:
        return nodes.living()

    def actors(self) -> Mapping[str, tuple[str, CoreRange] | None]:
        """Return the named actors that are not dead; for workers with the node and cores in their names."""
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
        """Return the record of an earlier allocator; empty if there is none."""
        text = nodes.kept(_RECORD)
        record: Mapping[str, Any] = json.loads(text) if text else {}
        return record

    def store(self, record: Mapping[str, object]) -> None:
        """Store a record for the next allocator. It has plain values only."""
        nodes.keep(_RECORD, json.dumps(record).encode())


class CoreAllocator:
    """Assign cores to workers and take them back; methods run one at a time. As an actor it ends after ``idle`` seconds
    without a core in use.
    """

    def __init__(self, idle: float | None = None, cluster: ClusterView | None = None) -> None:
        self._cluster = cluster or ClusterView()
        self._instances: dict[str, Instance] = {}  # node -> its instance type
        self._taken: dict[str, dict[str, CoreRange]] = {}  # node -> name -> cores
        self._running: set[str] = set()
        self._deadlines: dict[str, float] = {}  # for requests whose workers may not exist yet
        living = self._cluster.actors()
        self._restore(self._cluster.read(), living)
        for name, where in living.items():
            if where is not None:
                self._taken.setdefault(where[0], {})[name] = where[1]
                self._running.add(name)
        if idle is not None:
            Thread(target=_end_when_unused, args=(idle,), daemon=True).start()

    def confirm(self, actors: Sequence[str]) -> None:
        """Record that these workers run; their cores become free again when they end."""
        names = list(map(_name_of, actors))
        self._running.update(names)
        for name in names:
            self._deadlines.pop(name, None)

    def claim(self, node: str, instance: Instance, requests: Sequence[CoreRequest]) -> list[CoreRange]:
        """Assign ranges on a node of type ``instance`` to workers that start together; PlanError: not all fit."""
        self._forget_dead()
        names = {request.actor for request in requests}  # a request that is repeated after a fault replaces itself
        taken = {name: cores for name, cores in self._taken.get(node, {}).items() if name not in names}
        ranges = []
        for request in requests:
            used, degree = list(taken.values()), len(request.preferred)
            free = request.preferred in free_runs(instance, used, degree)
            cores = request.preferred if free else best_fit(instance, used, degree)
            if cores is None:
                left = fragmentation(instance, used)
                raise PlanError(
                    f"{left.free} cores are free on node {node[:8]}, but not {degree} aligned ones in a "
                    "row; stop a model, or start this one on another node"
                )
            taken[request.actor] = cores
            ranges.append(cores)
        self._taken[node], self._instances[node] = taken, instance
        self._write()
        now = monotonic()
        self._deadlines |= {request.actor: now + request.startup_timeout_s for request in requests}
        return ranges

    def release(self, actors: Sequence[str]) -> None:
        names = [_name_of(actor) for actor in actors]
        self._running.difference_update(names)
        for name in names:
            self._deadlines.pop(name, None)
            for ranges in self._taken.values():
                ranges.pop(name, None)
        self._write()

    def end_unused(self) -> None:
        """End if no core is in use. Runs between two methods, so that no answered request is lost."""
        if not self.taken():
            ray.kill(ray.get_runtime_context().current_actor)  # which also keeps Ray from restarting it
            sleep(_EXIT_S)

    def taken(self) -> dict[str, dict[str, CoreRange]]:
        self._forget_dead()
        return {node: dict(ranges) for node, ranges in self._taken.items() if ranges}

    def report(self) -> dict[str, Fragmentation]:
        """Return the free cores, and how fragmented they are, of each living node on which workers run or ran."""
        self._forget_dead()
        return {
            node: fragmentation(self._instances[node], list(ranges.values()))
            for node, ranges in self._taken.items()
            if node in self._instances
        }

    def _forget_dead(self) -> None:
        """Free the cores of workers that have ended or never started, released or not, and of dead nodes."""
        now = monotonic()
        overdue = {name for name, deadline in self._deadlines.items() if now > deadline}
        if gone := (self._running | overdue).difference(self._cluster.actors()):
            self.release(sorted(gone))
        living = self._cluster.nodes()
        self._taken = {node: ranges for node, ranges in self._taken.items() if node in living}

    def _write(self) -> None:
        """Store what the next allocator needs if this one is killed."""
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
        """Restore what an earlier allocator assigned to actors that are still alive."""
        for node, entry in record.items():
            fields = entry["instance"]
            self._instances[node] = Instance(**{**fields, "degrees": tuple(fields["degrees"])})
            for name, (first, last) in entry["taken"].items():
                if name in living:
                    self._taken.setdefault(node, {})[name] = CoreRange(first, last)
                    self._running.add(name)


def worker_name(name: str, node: str, cores: CoreRange) -> str:
    """Return Ray's name for the worker that requested cores under ``name`` and got these."""
    return f"{name}{_AT}{node}:{cores}"


def _end_when_unused(idle: float) -> None:
    """Poll from within the allocator's actor, in turn with requests from other processes."""
    me = ray.get_runtime_context().current_actor
    while True:
        sleep(idle)
        me.end_unused.options(max_task_retries=0).remote()


def _name_of(actor: str) -> str:
    return actor.partition(_AT)[0]


def allocator() -> ray.actor.ActorHandle:
    """Return the cluster's allocator; create it if there is none. It belongs to no caller's placement group."""
    actor = ray.remote(CoreAllocator).options(
        name=NAME, namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0, max_restarts=-1,
        max_task_retries=3, scheduling_strategy="DEFAULT", runtime_env={"env_vars": environment.without_cores()},
    )  # fmt: skip
    return actor.remote(_IDLE_S)


def call_allocator(method: str, *arguments: object, timeout: float) -> Any:
    """Call a method of the allocator and return its result. If the allocator has just ended, create it again and retry.

    Raises:
        PlanError: it rejects the request.
        WorkerError: it does not respond within ``timeout`` seconds, or is lost.
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
            f"the allocator of the cluster's cores did not respond in {timeout} seconds ({kind}); try again"
        ) from error


def give_back(actors: Sequence[str], timeout: float) -> None:
    """Free the cores of these workers, which have ended. A new allocator would read the living ones."""
    with suppress(ValueError, ray.exceptions.RayError):
        ray.get(ray.get_actor(NAME, NAMESPACE).release.remote(actors), timeout=timeout)


def end_unused(timeout: float) -> None:
    with suppress(ValueError, ray.exceptions.RayError):  # its end is an error of the call, too
        ray.get(ray.get_actor(NAME, NAMESPACE).end_unused.options(max_task_retries=0).remote(), timeout=timeout)
