"""Who has which cores in a cluster: one state, in one actor, so that no two plans give away the same core.

The ledger is kept by a named actor. If that dies, it is rebuilt from the names of the living workers, which say what
they have: a worker that is busy, or hangs, need not answer. It holds no model and starts nothing.
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
from paceline.placement.cluster.actors import NAMESPACE
from paceline.placement.planning.core_range import CoreRange, Fragmentation, best_fit, fragmentation
from paceline.placement.planning.instances import Instance
from paceline.placement.remote.reconnect import START

NAME = "paceline-ledger"
WORKERS = "paceline-worker-"
_HAS = "@"
_IDLE = 10.0  # seconds after which it is looked whether anything is taken: who took it may have been killed
_DYING = 60.0  # seconds, more than it takes to be killed: what is claimed meanwhile would be forgotten


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """Cores for one worker. ``wanted`` is the range of the plan; another one is given if that is taken.

    start  seconds in which the worker is there; a claim without one is void then, for its caller may have died
    """

    actor: str
    degree: int
    wanted: CoreRange
    start: float = START


class CoreAllocator:
    """Claims and releases; methods run one at a time. As an actor it ends by itself ``idle`` seconds after the last."""

    def __init__(self, instance: Instance, idle: float | None = None) -> None:
        self._instance = instance
        self._taken: dict[str, dict[str, CoreRange]] = {}
        self._running: set[str] = set()
        self._ends: dict[str, float] = {}  # of claims whose workers may not be there yet
        for claim, (node, cores) in _workers().items():
            self._taken.setdefault(node, {})[claim] = cores
            self._running.add(claim)
        if idle is not None:
            Thread(target=_end_when_unused, args=(idle,), daemon=True).start()

    def _forget_dead(self) -> None:
        """Who ran and is no more, or never came, has lost its cores, said or not. A node that is gone has none."""
        now = monotonic()
        late = {claim for claim, end in self._ends.items() if now > end}
        self.release(sorted((self._running | late).difference(_workers())))
        living = nodes.living()
        self._taken = {node: ranges for node, ranges in self._taken.items() if node in living}

    def confirm(self, actors: Sequence[str]) -> None:
        """These workers run now; from here on their claims end with them."""
        claims = list(map(_claim_of, actors))
        self._running.update(claims)
        for claim in claims:
            self._ends.pop(claim, None)

    def claim(self, node: str, claims: Sequence[CoreRequest]) -> list[CoreRange]:
        """Ranges on a node for workers that start together; all of them or none.

        Raises:
            PlanError: there is no room.
        """
        self._forget_dead()
        mine = {claim.actor for claim in claims}  # a claim that is made again, after a fault, replaces itself
        taken = {actor: cores for actor, cores in self._taken.get(node, {}).items() if actor not in mine}
        made = []
        for claim in claims:
            used = list(taken.values())
            free = all(set(claim.wanted.cores).isdisjoint(item.cores) for item in used)
            run = claim.wanted if free else best_fit(self._instance, used, claim.degree)
            if run is None:
                left = fragmentation(self._instance, used)
                raise PlanError(
                    f"{left.free} cores free but no aligned run of {claim.degree} on node {node[:8]}; stop a model, or "
                    "start this one where there is room"
                )
            taken[claim.actor] = run
            made.append(run)
        self._taken[node] = taken
        now = monotonic()
        self._ends |= {claim.actor: now + claim.start for claim in claims}
        return made

    def release(self, actors: Sequence[str]) -> None:
        """These workers are gone."""
        claims = [_claim_of(actor) for actor in actors]
        self._running.difference_update(claims)
        for claim in claims:
            self._ends.pop(claim, None)
        for ranges in self._taken.values():
            for claim in claims:
                ranges.pop(claim, None)

    def end_unused(self) -> None:
        """End if nothing is taken. Between two methods: no claim is lost that was answered."""
        if not self.taken():
            ray.kill(ray.get_runtime_context().current_actor)  # which also keeps Ray from starting it again
            sleep(_DYING)

    def taken(self) -> dict[str, dict[str, CoreRange]]:
        """Node -> worker -> cores."""
        self._forget_dead()
        return {node: dict(ranges) for node, ranges in self._taken.items() if ranges}

    def report(self) -> dict[str, Fragmentation]:
        """What is free on each node that lives and where something runs or ran, and in what pieces."""
        self._forget_dead()
        return {node: fragmentation(self._instance, list(ranges.values())) for node, ranges in self._taken.items()}


def worker_name(claim: str, node: str, cores: CoreRange) -> str:
    """What Ray calls the worker that made a claim and got these cores."""
    return f"{claim}{_HAS}{node}:{cores}"


def _end_when_unused(idle: float) -> None:
    """Within the ledger's actor, and in turn with what others ask of it."""
    me = ray.get_runtime_context().current_actor
    while True:
        sleep(idle)
        me.end_unused.options(max_task_retries=0).remote()


def _claim_of(actor: str) -> str:
    return actor.partition(_HAS)[0]


def _workers() -> dict[str, tuple[str, CoreRange]]:
    """Claim -> node and cores of all living workers of the cluster."""
    found = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        claim, _, has = str(actor["name"]).partition(_HAS)
        if actor["namespace"] == NAMESPACE and claim.startswith(WORKERS):
            node, _, cores = has.partition(":")
            first, _, last = cores.partition("-")
            found[claim] = node, CoreRange(int(first), int(last or first))
    return found


def ledger(instance: Instance) -> ray.actor.ActorHandle:
    """The cluster's ledger, made if there is none."""
    made = ray.remote(CoreAllocator).options(
        name=NAME, namespace=NAMESPACE, get_if_exists=True, lifetime="detached", num_cpus=0, max_restarts=-1,
        max_task_retries=3,
    )  # fmt: skip
    return made.remote(instance, _IDLE)


def ask(instance: Instance, method: str, *arguments: object, seconds: float) -> Any:
    """The ledger's answer, its refusals as what they are. One that has just ended is made anew and asked again.

    Raises:
        PlanError: it refuses.
        WorkerError: it does not answer in time, or is lost.
    """

    def answer() -> Any:
        return ray.get(getattr(ledger(instance), method).remote(*arguments), timeout=seconds)

    try:
        try:
            return answer()
        except ray.exceptions.RayActorError:
            return answer()
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, PlanError):
            raise error.cause from error
        raise
    except ray.exceptions.RayError as error:
        raise WorkerError(f"the ledger of the cluster's cores gave no answer in {seconds} seconds: {error}") from error


def give_back(actors: Sequence[str], seconds: float) -> None:
    """These workers are gone; where there is no ledger nobody has to know: one that is made sees the living only."""
    with suppress(ValueError, ray.exceptions.RayError):
        ray.get(ray.get_actor(NAME, NAMESPACE).release.remote(actors), timeout=seconds)


def end_unused(seconds: float) -> None:
    """End the ledger if nothing is taken."""
    with suppress(ValueError, ray.exceptions.RayError):  # its end too is an error of the one who asked
        ray.get(ray.get_actor(NAME, NAMESPACE).end_unused.options(max_task_retries=0).remote(), timeout=seconds)
