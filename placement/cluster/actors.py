"""Processes with planned cores: how a process takes them, and the Ray actor that runs a draft.

A process first compares its environment with the plan, then takes its cores, and only then loads a model. Ray counts
cores (`neuron_cores`) and restarts processes; it does not choose cores. See also: what starts actors (`replica_group`).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from contextlib import suppress
from time import sleep
from typing import cast

import ray
import torch

from paceline.core.errors import ConfigurationError, WorkerError
from paceline.placement.cluster import nodes
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.cluster.roles import MakeDrafters, maker
from paceline.placement.cluster.worker_spec import WorkerSpec
from paceline.placement.host import environment, processes
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.host.processes import Process, run_apart
from paceline.placement.remote.channel import BACKLOG, Address, bind
from paceline.placement.remote.server import DrafterPool, DraftServer

log = logging.getLogger("paceline")

_RETRY_S = 5.0  # between starts of a draft that cannot start


class ActorSupervisor:
    """Kill a drafter's process, which Ray restarts with the same environment. ``node``: its node, if not this one."""

    def __init__(self, actor: str, node: str | None) -> None:
        self._actor, self._node = actor, node

    def replace(self, process: Process | None) -> bool:
        if process is not None:
            return processes.kill(process) if self._node is None else nodes.kill(self._node, process)
        with suppress(ValueError):  # Ray is restarting the actor
            ray.kill(ray.get_actor(self._actor, NAMESPACE), no_restart=False)
        return True

    def ensure(self) -> bool:
        """Do nothing: Ray restarts a process that died."""
        return False


def take_cores(spec: WorkerSpec) -> CoreLocks:
    """Make this process the worker of a specification: check its node, then take its cores and its share of the CPUs.

    Raises:
        WorkerError: the process is on another node, or another process has a core.
    """
    node = ray.get_runtime_context().get_node_id()
    if node != spec.node:
        raise WorkerError(f"{spec.label}: expected to start on node {spec.node}, got {node}; launch it again")
    locks = CoreLocks(spec.cores, node=node)
    locks.acquire()
    environment.share_cpus(*spec.affinity)
    num_threads = int(dict(spec.env)["OMP_NUM_THREADS"])
    num_cpus, (first, last) = len(os.sched_getaffinity(0)), spec.affinity
    torch.set_num_threads(max(1, min(num_threads, num_cpus * (last - first + 1) // spec.vcpus)))
    return locks


class DraftWorker:
    """Drafter server that answers at its socket, in a thread; its methods are for its supervisor."""

    def __init__(self, spec: WorkerSpec) -> None:
        try:
            environment.check(spec.env)
            self._locks = take_cores(spec)
            if spec.address is None:
                raise ConfigurationError(f"{spec.label}: expected an address to listen at, got none; set `address`")
            listener, pool = _listening(spec, spec.address)
        except Exception:
            # Ray restarts an actor whose process ends, but not one whose constructor raised. The first error is raised
            # to the process that starts the draft; after a restart no process waits for it, so this process ends
            # instead.
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                raise
            log.exception("restarting %s failed; the next attempt is in %s seconds", spec.label, _RETRY_S)
            sleep(_RETRY_S)
            os._exit(1)
        server = DraftServer(listener, spec.secret, pool)
        threading.Thread(target=_serve, args=(server,), daemon=True, name="paceline-draft").start()

    def ready(self) -> None:
        """Return when the worker is ready."""


def _listening(spec: WorkerSpec, address: Address) -> tuple[socket.socket, DrafterPool]:
    """Bind the address, load the model, then listen. The port was chosen as free, and loading may take minutes."""
    listener = bind(address)
    try:
        pool = run_apart(lambda: cast(MakeDrafters, maker(spec.maker))(spec.settings))
        listener.listen(BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener, pool


def _serve(server: DraftServer) -> None:
    """Run a server; if it ends by an error, end its process too, so that Ray restarts it."""
    try:
        server.run()
    finally:
        os._exit(1)
