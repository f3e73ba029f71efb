"""Which worker has which cores in a cluster: one state, in one actor, so that no two plans use the same core.

`CoreAllocator` is a named actor. If it dies, the next one rebuilds its state from the names of the living workers,
which contain their cores: a worker that is busy or hangs need not answer. It holds no model and starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from time import monotonic, sleep
from typing import Any

import ray

from paceline.core.errors import PlanError, WorkerError
from paceline.placement.cluster import nodes
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.planning.core_range import CoreRange, Fragmentation, best_fit, fragmentation
from paceline.placement.planning.instances import Instance
from paceline.placement.remote.reconnect import STARTUP_TIMEOUT_S

NAME = "paceline-core-allocator"
WORKERS = "paceline-worker-"
_AT = "@"
_IDLE_S = 10.0  # between looks whether anything is taken: the processes that took it may have been killed
_EXIT_S = 60.0  # more than it takes to be killed: what is requested meanwhile would be forgotten


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """Cores for one worker.

    actor              the name under which they are requested
    degree             how many
    preferred          the range of the plan; another one is given if that is taken
    startup_timeout_s  seconds in which the worker exists; without one the request is void then, for its caller may
                       have died
    """

    actor: str
    degree: int
    preferred: CoreRange
    startup_timeout_s: float = STARTUP_TIMEOUT_S


class CoreAllocator:
    """Gives and takes back cores; methods run one at a time. As an actor it ends by itself when no core has been taken
    for ``idle`` seconds.
    """

    def __init__(self, instance: Instance, idle: float | None = None) -> None:
        self._instance = instance
        self._taken: dict[str, dict[str, CoreRange]] = {}  # node -> name -> cores
        self._running: set[str] = set()
        self._deadlines: dict[str, float] = {}  # of requests whose workers may not exist yet
        for name, (node, cores) in _workers().items():
            self._taken.setdefault(node, {})[name] = cores
            self._running.add(name)
        if idle is not None:
            Thread(target=_end_when_unused, args=(idle,), daemon=True).start()

    def confirm(self, actors: Sequence[str]) -> None:
        """These workers run now; from here on their cores are free again when they end."""
        names = list(map(_name_of, actors))
        self._running.update(names)
        for name in names:
            self._deadlines.pop(name, None)

    def claim(self, node: str, requests: Sequence[CoreRequest]) -> list[CoreRange]:
        """Ranges on a node for workers that start together; all of them or none.

        Raises:
            PlanError: there is no room.
        """
        self._forget_dead()
        names = {request.actor for request in requests}  # a request that is repeated after a fault replaces itself
        taken = {name: cores for name, cores in self._taken.get(node, {}).items() if name not in names}
        ranges = []
        for request in requests:
            used = list(taken.values())
            free = all(set(request.preferred.cores).isdisjoint(cores.cores) for cores in used)
            cores = request.preferred if free else best_fit(self._instance, used, request.degree)
            if cores is None:
                left = fragmentation(self._instance, used)
                raise PlanError(
                    f"{left.free} cores free but no aligned run of {request.degree} on node {node[:8]}; stop a model, "
                    "or start this one where there is room"
                )
            taken[request.actor] = cores
            ranges.append(cores)
        self._taken[node] = taken
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
        return {node: fragmentation(self._instance, list(ranges.values())) for node, ranges in self._taken.items()}

    def _forget_dead(self) -> None:
        """Workers that ran and are gone, or never started, have no cores, released or not. Nor have dead nodes."""
        now = monotonic()
        overdue = {name for name, deadline in self._deadlines.items() if now > deadline}
        self.release(sorted((self._running | overdue).difference(_workers())))
        living = nodes.living()
        self._taken = {node: ranges for node, ranges in self._taken.items() if node in living}


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


def _workers() -> dict[str, tuple[str, CoreRange]]:
    """Name -> node and cores of all living workers of the cluster."""
    workers = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        name, _, location = str(actor["name"]).partition(_AT)
        if actor["namespace"] == NAMESPACE and name.startswith(WORKERS):
            node, _, cores = location.partition(":")
            first, _, last = cores.partition("-")
            workers[name] = node, CoreRange(int(first), int(last or first))
    return workers


def allocator(instance: Instance) -> ray.actor.ActorHandle:
    """The cluster's allocator; it is made if there is none."""
    actor = ray.remote(CoreAllocator).options(
        name=NAME, namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0, max_restarts=-1,
        max_task_retries=3,
    )  # fmt: skip
    return actor.remote(instance, _IDLE_S)


def call_allocator(instance: Instance, method: str, *arguments: object, timeout: float) -> Any:
    """What the allocator returns. One that has just ended is made anew and asked again.

    Raises:
        PlanError: it refuses.
        WorkerError: it does not answer within ``timeout`` seconds, or is lost.
    """

    def call() -> Any:
        return ray.get(getattr(allocator(instance), method).remote(*arguments), timeout=timeout)

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
        raise WorkerError(
            f"the allocator of the cluster's cores gave no answer in {timeout} seconds ({error}); try again"
        ) from error


def give_back(actors: Sequence[str], timeout: float) -> None:
    """These workers are gone. Without an allocator nothing is to be done: a new one sees the living workers only."""
    with suppress(ValueError, ray.exceptions.RayError):
        ray.get(ray.get_actor(NAME, NAMESPACE).release.remote(actors), timeout=timeout)


def end_unused(timeout: float) -> None:
    """End the allocator if nothing is taken."""
    with suppress(ValueError, ray.exceptions.RayError):  # its end is an error of the call, too
        ray.get(ray.get_actor(NAME, NAMESPACE).end_unused.options(max_task_retries=0).remote(), timeout=timeout)
