"""The Ray actors: one process for each placement, started with the environment of its plan.

An actor first compares its environment with the plan, then takes its cores, and only then loads a model. Ray counts
cores (`neuron_cores`) and restarts processes; it does not choose cores. Not here: who starts actors (`group`).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import ray
import torch

from paceline.core.errors import ConfigurationError, RankError, WorkerError
from paceline.placement.cluster import nodes
from paceline.placement.cluster.roles import MakeDrafters, MakeTarget, Settings, TokenDelta, maker
from paceline.placement.host import environment, processes
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.host.processes import Process
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.quota import Quota
from paceline.placement.remote.channel import Address, listen
from paceline.placement.remote.drafter import DrafterContract, DraftTimeouts, RemoteDrafter
from paceline.placement.remote.reconnect import DrafterEndpoint
from paceline.placement.remote.server import DraftServer

log = logging.getLogger("paceline")

NAMESPACE = "paceline"
STREAMS = 64  # calls a target has at once; those without a slot wait for one
WATCH = "watch"  # concurrency group of methods that answer at once


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What one worker is: its cores on its node, its environment, and what to make.

    actor     its name among Ray's actors
    affinity  CPUs of the instance it may use, first and last; ``vcpus`` are the instance's in all
    address   of the drafter: where a draft listens, or whom a target calls; None for a target without one
    quota     of a draft: what its targets may have
    """

    actor: str
    label: str
    node: str
    cores: CoreRange
    env: tuple[tuple[str, str], ...]
    affinity: tuple[int, int]
    vcpus: int
    maker: str
    settings: Settings
    secret: bytes = field(repr=False)
    address: Address | None = None
    quota: Quota = field(default_factory=Quota)


@dataclass(frozen=True, slots=True)
class Link:
    """How a target calls its drafter: what they agree on, how patient it is, and the drafter's actor and node.

    start  seconds the drafter may take to load and compile before it can be called
    """

    terms: DrafterContract
    patience: DraftTimeouts
    actor: str
    node: str
    start: float


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker that runs; ``process`` on its node."""

    process: Process
    node: str
    cores: str


class ActorKeeper:
    """Kills a drafter's process; Ray starts it anew, with the same environment. ``node``: where, if it is not here."""

    def __init__(self, actor: str, node: str | None) -> None:
        self._actor, self._node = actor, node

    def replace(self, process: Process | None) -> bool:
        if process is not None:
            return processes.kill(process) if self._node is None else nodes.kill(self._node, process)
        with suppress(ValueError):  # no such actor now: Ray is at it already
            ray.kill(ray.get_actor(self._actor, NAMESPACE), no_restart=False)
        return True

    def ensure(self) -> bool:
        """Ray does."""
        return False


class _Worker:
    """What both kinds of workers do first."""

    def __init__(self, assignment: WorkerSpec) -> None:
        environment.check(assignment.env)
        node = ray.get_runtime_context().get_node_id()
        if node != assignment.node:
            raise WorkerError(f"{assignment.label} was planned for node {assignment.node} and started on {node}")
        self._given = assignment
        self._locks = CoreLocks(assignment.cores, node=node)
        self._locks.acquire()
        environment.share_cpus(*assignment.affinity)
        first, last = assignment.affinity
        here = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, min(last - first + 1, here * (last - first + 1) // assignment.vcpus)))

    def ready(self) -> Ready:
        """Answers when the worker is made."""
        return Ready(processes.running(os.getpid()), self._given.node, os.environ.get("PACELINE_CORES", ""))


class DraftWorker(_Worker):
    """Serves proposals at its socket, in a thread; its methods are for whoever looks after it."""

    def __init__(self, assignment: WorkerSpec) -> None:
        super().__init__(assignment)
        if assignment.address is None:
            raise ConfigurationError(f"{assignment.label} has no address to listen at")
        drafters = cast(MakeDrafters, maker(assignment.maker))(assignment.settings)
        listener = listen(assignment.address)
        server = DraftServer(listener, assignment.secret, drafters, quota=assignment.quota)
        threading.Thread(target=_serve, args=(server,), daemon=True, name="paceline-draft").start()


class TargetWorker(_Worker):
    """Generates: the whole loop is here, and what it commits streams to the callers round by round."""

    def __init__(self, assignment: WorkerSpec, link: Link | None) -> None:
        super().__init__(assignment)
        self._draft: RemoteDrafter | None = None
        if link is not None and assignment.address is not None:
            keeper = ActorKeeper(link.actor, None if link.node == assignment.node else link.node)
            caller = DrafterEndpoint(assignment.address, assignment.secret, keeper, link.start)
            self._draft = RemoteDrafter(link.terms, caller, patience=link.patience)
        self._target = cast(MakeTarget, maker(assignment.maker))(assignment.settings, self._draft)

    def stream(
        self, ticket: str, prompts: Sequence[Sequence[int]], emitted: Sequence[Sequence[int]], *, ask: Settings
    ) -> Iterator[TokenDelta]:
        """See `paceline.placement.cluster.roles.Target`. A divided model that lost a rank is of no use: its worker
        ends too.
        """
        try:
            yield from self._target.stream(ticket, prompts, emitted, ask=ask)
        except RankError:
            log.exception("a rank of %s is lost; its process ends, to be started anew", self._given.label)
            os._exit(1)  # whoever calls it has another one started, and loses no token

    def leave(self, ticket: str) -> None:
        """See `paceline.placement.cluster.roles.Target`. Ray cannot interrupt one of several threads."""
        self._target.leave(ticket)

    def progress(self) -> int:
        """See `paceline.placement.cluster.roles.Target`; answers while all streams are taken."""
        return self._target.progress()

    def statistics(self) -> Settings:
        """See `paceline.placement.cluster.roles.Target`."""
        return self._target.statistics()

    def wait_for_draft(self, seconds: float) -> bool:
        """Whether the drafter is there within so many seconds; a target without one has nothing to wait for."""
        return self._draft is None or self._draft.wait_until_up(seconds)

    def draft_pid(self) -> int | None:
        """The drafter's process, if it is up."""
        return None if self._draft is None else self._draft.pid


def _serve(server: DraftServer) -> None:
    """A server that ends by an error takes its process along, so that it is started anew."""
    try:
        server.run()
    finally:
        os._exit(1)
