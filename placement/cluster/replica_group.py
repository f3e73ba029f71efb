"""Resources of a Ray Serve replica whose process runs the target: its cores, and the draft processes next to it.

Serve starts and replaces replicas, each in a placement group. The first bundle is for the replica, the others are for
its drafts. The replica requests free cores of its node from the core allocator, sets the runtime's variables in its own
process, and only then loads the target. Drafts end with the replica.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TypeVar

import ray
import torch
from ray.util.placement_group import PlacementGroup

from paceline.core.errors import PlanError, WorkerError
from paceline.placement.cluster.actors import ActorSupervisor, DraftWorker, take_cores
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE, RESOURCE
from paceline.placement.cluster.reservation import Reservation
from paceline.placement.cluster.worker_spec import WorkerSpec
from paceline.placement.host import environment
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement
from paceline.placement.remote.drafter import RemoteDrafter
from paceline.placement.remote.reconnect import DrafterEndpoint

Loaded = TypeVar("Loaded")

_POLL_S = 0.5  # between checks whether the target could be loaded


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
        self._policy, self._label = fault_policy, targets[0].label
        self._drafts = [item.label for item in members if item.role == "draft"]
        own_name = str(ray.get_runtime_context().get_actor_name())
        self._reservation = Reservation(
            instance,
            [*targets, *(item for item in members if item.role == "draft")],
            fault_policy,
            group=bundles,
            owner=own_name,
        )
        self._specs = self._reservation.acquire()
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
        """Specification of this process."""
        return self._specs[self._label]

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

        Raises:
            WorkerError: a draft did not start. Raised at once, though the target may still be loading: end this process
                then.
        """
        pending = {label: actor.ready.remote() for label, actor in self._actors.items()}
        loaded = load_beside(load, pending, timeout_s=self._policy.startup_timeout_s)
        self._reservation.confirm(self._specs.values())
        return loaded

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        """Specifications of the target and its drafts."""
        return tuple(self._specs.values())

    def _start_drafts(self) -> None:
        for label in self._drafts:
            spec = self._specs[label]
            self._actors[label] = (
                ray.remote(DraftWorker)
                .options(
                    name=spec.actor,
                    namespace=NAMESPACE,
                    num_cpus=0,
                    resources={RESOURCE: len(spec.cores)},
                    max_restarts=-1,
                    max_task_retries=0,
                    runtime_env={"env_vars": environment.for_actor(spec.env)},
                    scheduling_strategy=self._reservation.bundle(label),
                )
                .remote(spec)
            )

    def close(self) -> None:
        """End the drafts and release the cores. End the process after this: its runtime keeps its cores."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
        self._reservation.release()


def load_beside(load: Callable[[], Loaded], pending: Mapping[str, ray.ObjectRef], *, timeout_s: float) -> Loaded:
    """Call ``load`` in a thread while workers start; return or raise what it does. ``pending``: their results, by name.

    Raises:
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
