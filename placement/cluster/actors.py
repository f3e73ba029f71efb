"""The Ray actors: one process for each placement, started with the environment of its plan.

An actor first compares its environment with the plan, then takes its cores, and only then loads a model. Ray counts
cores (`neuron_cores`) and restarts processes; it does not choose cores. Not here: what starts actors (`deployment`).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from time import sleep
from typing import cast

import ray
import torch

from paceline.core.errors import ConfigurationError, RankError, WorkerError
from paceline.placement.cluster import nodes
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.cluster.roles import (
    GenerateRequest,
    MakeDrafters,
    MakeTarget,
    Settings,
    TokenDelta,
    maker,
)
from paceline.placement.cluster.worker_spec import WorkerSpec
from paceline.placement.host import environment, processes
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.host.processes import Process, run_apart
from paceline.placement.remote.channel import BACKLOG, Address, bind
from paceline.placement.remote.drafter import RemoteDrafter
from paceline.placement.remote.reconnect import DrafterEndpoint
from paceline.placement.remote.server import DrafterPool, DraftServer

log = logging.getLogger("paceline")

STREAMS = 64
"""Calls a target has at once; those without a slot wait for one."""
_RETRY_S = 5.0  # between starts of a draft that cannot start
WATCH = "watch"
"""Concurrency group of the methods that answer at once."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker that is ready; ``process``: of its node."""

    process: Process
    node: str
    cores: str


class ActorSupervisor:
    """Kills a drafter's process; Ray restarts it, with the same environment. ``node``: its node, if another one."""

    def __init__(self, actor: str, node: str | None) -> None:
        self._actor, self._node = actor, node

    def replace(self, process: Process | None) -> bool:
        if process is not None:
            return processes.kill(process) if self._node is None else nodes.kill(self._node, process)
        with suppress(ValueError):  # there is no such actor now: Ray is restarting it
            ray.kill(ray.get_actor(self._actor, NAMESPACE), no_restart=False)
        return True

    def ensure(self) -> bool:
        """Ray restarts a process that died."""
        return False


def take_cores(spec: WorkerSpec) -> CoreLocks:
    """Make this process the worker of a specification: on its node, with its cores and its share of the CPUs.

    Raises:
        WorkerError: the process is on another node, or another process has a core.
    """
    node = ray.get_runtime_context().get_node_id()
    if node != spec.node:
        raise WorkerError(f"{spec.label} was planned for node {spec.node} and started on {node}; launch it again")
    locks = CoreLocks(spec.cores, node=node)
    locks.acquire()
    environment.share_cpus(*spec.affinity)
    num_threads = int(dict(spec.env)["OMP_NUM_THREADS"])
    num_cpus, (first, last) = len(os.sched_getaffinity(0)), spec.affinity
    torch.set_num_threads(max(1, min(num_threads, num_cpus * (last - first + 1) // spec.vcpus)))
    return locks


class _Worker:
    """What both kinds of workers do first: check their environment, take their cores, keep to their CPUs."""

    def __init__(self, spec: WorkerSpec) -> None:
        environment.check(spec.env)
        self._spec, self._locks = spec, take_cores(spec)

    def ready(self) -> Ready:
        """Replies when the worker is made."""
        return Ready(processes.running(os.getpid()), self._spec.node, environment.assigned_cores())


class DraftWorker(_Worker):
    """Serves proposals at its socket, in a thread; its methods are for whatever supervises it."""

    def __init__(self, spec: WorkerSpec) -> None:
        try:
            super().__init__(spec)
            if spec.address is None:
                raise ConfigurationError(f"{spec.label} has no address to listen at; give its specification one")
            listener, pool = _listening(spec, spec.address)
        except Exception:
            # Ray starts an actor again whose process ends, and never one whose constructor raised. The first error is
            # raised, for whoever starts the draft to see; after a restart nobody waits, so the process ends instead.
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                raise
            log.exception("%s could not be started again; its next start is in %s seconds", spec.label, _RETRY_S)
            sleep(_RETRY_S)
            os._exit(1)
        server = DraftServer(listener, spec.secret, pool, quota=spec.quota)
        threading.Thread(target=_serve, args=(server,), daemon=True, name="paceline-draft").start()


class TargetWorker(_Worker):
    """Generates: the engine runs here, and what it commits streams to the callers round by round."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        link, drafter = spec.link, None
        if link is not None and spec.address is not None:
            supervisor = ActorSupervisor(link.actor, None if link.node == spec.node else link.node)
            endpoint = DrafterEndpoint(spec.address, spec.secret, supervisor, link.startup_timeout_s)
            drafter = RemoteDrafter(link.contract, endpoint, timeouts=link.timeouts)
        self._target = cast(MakeTarget, maker(spec.maker))(spec.settings, drafter)

    def stream(self, request: GenerateRequest) -> Iterator[TokenDelta]:
        """See `paceline.placement.cluster.roles.Target`. A divided model that lost a rank cannot go on: its worker
        ends too.
        """
        try:
            yield from self._target.stream(request)
        except RankError:
            log.exception("a rank of %s is lost; its process ends, to be restarted", self._spec.label)
            os._exit(1)  # its caller has another one started, and loses no token

    def abort(self, ticket: str) -> None:
        """See `paceline.placement.cluster.roles.Target`. Ray cannot interrupt one of several threads."""
        self._target.abort(ticket)

    def progress(self) -> int:
        """See `paceline.placement.cluster.roles.Target`; answers while all streams are taken."""
        return self._target.progress()

    def statistics(self) -> Settings:
        """See `paceline.placement.cluster.roles.Target`."""
        return self._target.statistics()


def _listening(spec: WorkerSpec, address: Address) -> tuple[socket.socket, DrafterPool]:
    """The address is taken first: a port was free when it was chosen, and a model may take minutes to load."""
    listener = bind(address)
    try:
        pool = run_apart(lambda: cast(MakeDrafters, maker(spec.maker))(spec.settings))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, pool


def _serve(server: DraftServer) -> None:
    """A server that ends by an error ends its process too, so that Ray restarts it."""
    try:
        server.run()
    finally:
        os._exit(1)
