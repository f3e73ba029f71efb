"""Resources of a Ray Serve replica whose process runs the target: its cores, and the draft processes next to it.

Serve starts and replaces replicas, each in a placement group. The first bundle is for the replica, the others are for
its drafts. The replica requests free cores of its node from the core allocator, sets the runtime's variables in its own
process, takes its cores, and only then loads the target. Drafts run in actors (`DraftWorker`), which compare their
environment with the plan first, and end with the replica. Ray counts cores (`neuron_cores`) and restarts processes; it
does not choose cores.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic, sleep
from typing import TypeVar, cast

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.core.errors import ConfigurationError, PlanError, WorkerError
from paceline.placement.cluster import nodes
from paceline.placement.cluster.core_allocator import WORKERS, CoreRequest, call_allocator, give_back, worker_name
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE, RESOURCE
from paceline.placement.cluster.roles import MakeDrafters, maker
from paceline.placement.cluster.worker_spec import Location, WorkerSpec, worker_specs
from paceline.placement.host import environment, processes
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.host.processes import Process, run_apart
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement
from paceline.placement.remote.channel import BACKLOG, Address, bind
from paceline.placement.remote.drafter import RemoteDrafter
from paceline.placement.remote.reconnect import DrafterEndpoint
from paceline.placement.remote.server import DrafterPool, DraftServer

log = logging.getLogger("paceline")

Loaded = TypeVar("Loaded")

_POLL_S = 0.5  # between checks whether the target could be loaded
_RETRY_S = 5.0  # between starts of a draft that cannot start


class ReplicaGroup:
    """One target, which runs in this process, and its drafts, which run in separate processes: on the same node, or
    wherever the placement group has them.

    Raises:
        PlanError: ``members`` hold several targets, or this node lacks free cores.
        WorkerError: the core allocator does not respond, or another process holds a core.
    """

    def __init__(
        self, instance: Instance, members: Sequence[Placement], fault_policy: FaultPolicy, *, bundles: PlacementGroup
    ) -> None:
        targets = [item for item in members if item.role == "target"]
        if len(targets) != 1:
            raise PlanError(
                f"targets: expected one target per replica, got {len(targets)}; give each target its own draft"
            )
        self._policy, self._bundles = fault_policy, bundles
        self._placements = [*targets, *(item for item in members if item.role == "draft")]  # in the order of bundles
        self._requests: set[str] = set()  # names under which cores were requested
        self._specs = self._acquire(instance)
        self._actors: dict[str, ray.actor.ActorHandle] = {}
        try:
            environment.apply(self.spec.env)
            self._locks = take_cores(self.spec)
            self._start_drafts()
        except BaseException:
            self.close()
            raise

    @property
    def spec(self) -> WorkerSpec:
        return self._specs[self._placements[0].label]

    def drafter(self) -> RemoteDrafter | None:
        """Return the target's client of its draft process; None if it has no draft."""
        spec = self.spec
        if spec.link is None or spec.address is None:
            return None
        supervisor = ActorSupervisor(spec.link.actor, None if spec.link.node == spec.node else spec.link.node)
        endpoint = DrafterEndpoint(spec.address, spec.secret, supervisor, spec.link.startup_timeout_s)
        return RemoteDrafter(spec.link.contract, endpoint, timeouts=spec.link.timeouts)

    def wait_ready(self, load: Callable[[], Loaded]) -> Loaded:
        """Call ``load``, which loads the target, while the drafts load; return its result when all are ready.

        WorkerError: a draft did not start. The target may still be loading: end this process then.
        """
        pending = {label: actor.ready.remote() for label, actor in self._actors.items()}
        loaded = load_beside(load, pending, timeout_s=self._policy.startup_timeout_s)
        call_allocator("confirm", [spec.actor for spec in self._specs.values()], timeout=self._policy.startup_timeout_s)
        return loaded

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        return tuple(self._specs.values())

    def _acquire(self, instance: Instance) -> dict[str, WorkerSpec]:
        """Return a specification for each label, with its bundle's node and cores of it that the allocator assigns."""
        stamp = secrets.token_hex(4)
        names = [f"{WORKERS}{item.label}-{stamp}" for item in self._placements]
        names[0] = str(ray.get_runtime_context().get_actor_name())  # of this process
        self._requests |= set(names)
        table = placement_group_table(self._bundles)["bundles_to_node_id"]
        where = [str(table[index]) for index in range(len(names))]
        timeout, locations = self._policy.startup_timeout_s, dict[str, Location]()
        for node in dict.fromkeys(where):
            here = [
                pair for pair, at in zip(zip(names, self._placements, strict=True), where, strict=True) if at == node
            ]
            requests = [CoreRequest(name, item.cores, timeout) for name, item in here]
            ranges = call_allocator("claim", node, instance, requests, timeout=timeout)
            for (name, item), cores in zip(here, ranges, strict=True):
                locations[item.label] = Location(worker_name(name, node, cores), node, cores)
        self._requests |= {location.actor for location in locations.values()}
        return worker_specs(instance, self._placements, self._policy, locations=locations)

    def _start_drafts(self) -> None:
        for bundle, item in enumerate(self._placements):
            if item.role == "draft":
                spec = self._specs[item.label]
                self._actors[item.label] = ray.remote(DraftWorker).options(
                    name=spec.actor, namespace=NAMESPACE, num_cpus=0, resources={RESOURCE: len(spec.cores)},
                    max_restarts=-1, max_task_retries=0, runtime_env={"env_vars": environment.for_actor(spec.env)},
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._bundles, bundle),
                ).remote(spec)  # fmt: skip

    def close(self) -> None:
        """End the drafts and release the cores. End the process after this: its runtime keeps its cores."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
        if self._requests:
            give_back(sorted(self._requests), self._policy.placement_timeout_s)
        self._requests = set()


def load_beside(load: Callable[[], Loaded], pending: Mapping[str, ray.ObjectRef], *, timeout_s: float) -> Loaded:
    """Call ``load`` in a thread while workers start; return or raise what it does. ``pending``: their results, by name.

    WorkerError: a worker failed, or is not ready in time.
    """
    loading: Future[Loaded] = Future()
    num_threads = torch.get_num_threads()  # each thread has its own setting

    def call() -> None:
        torch.set_num_threads(num_threads)
        try:
            loading.set_result(load())
        except BaseException as error:
            loading.set_exception(error)

    threading.Thread(target=call, daemon=True, name="paceline-load-beside").start()
    names, deadline = {answer: label for label, answer in pending.items()}, monotonic() + timeout_s
    while names:
        done, _ = ray.wait(list(names), timeout=_POLL_S)
        for answer in done:
            label = names.pop(answer)
            try:
                ray.get(answer)
            except ray.exceptions.RayError as error:
                raise WorkerError(f"{label} did not start ({error}); see its log") from error
        if loading.done():
            loading.result()  # an error of it is raised at once, too
        if names and monotonic() > deadline:
            raise WorkerError(
                f"{', '.join(names.values())} did not start within {timeout_s} seconds; raise "
                "fault_policy.startup_timeout_s"
            )
    return loading.result()


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
    """Make this process the worker of a specification, on its node: take its cores and its share of the CPUs."""
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
