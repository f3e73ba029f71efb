"""What a replica of Ray Serve holds when the replica's own process runs the target: its cores, and drafts beside it.

Serve starts and replaces replicas, each in a placement group whose first bundle is the replica itself; the others are
those of its drafts. The replica asks the core allocator which cores of its node are free, sets the variables of the
runtime in its own process, and only then loads the target. Drafts end with the replica. Not here: groups that restart
their targets themselves (`worker_group`), and what a replica serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

import ray
from ray.util.placement_group import PlacementGroup

from paceline.core.errors import PlanError, WorkerError
from paceline.placement.cluster.actors import ActorSupervisor, DraftWorker, take_cores
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.cluster.reservation import RESOURCE, Reservation
from paceline.placement.cluster.worker_spec import WorkerSpec
from paceline.placement.host import environment
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement
from paceline.placement.remote.drafter import RemoteDrafter
from paceline.placement.remote.reconnect import DrafterEndpoint


class ReplicaGroup:
    """One target, which this process becomes, and its drafts, which are processes of their own: on the same node, or
    wherever the placement group has them.

    Raises:
        PlanError: ``members`` hold several targets, or there is no room on this node.
        WorkerError: the core allocator does not answer, or another process holds a core.
    """

    def __init__(
        self, instance: Instance, members: Sequence[Placement], fault_policy: FaultPolicy, *, bundles: PlacementGroup
    ) -> None:
        targets = [item for item in members if item.role == "target"]
        if len(targets) != 1:
            raise PlanError(f"a replica runs one target, not {len(targets)}; give each target a draft of its own")
        self._policy, self._label = fault_policy, targets[0].label
        self._drafts = [item.label for item in members if item.role == "draft"]
        own_name = str(ray.get_runtime_context().get_actor_name())
        self._reservation = Reservation(
            instance,
            [*targets, *(item for item in members if item.role == "draft")],
            fault_policy,
            existing=bundles,
            offset=0,
            owners={self._label: own_name},
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
        """What this process runs."""
        return self._specs[self._label]

    def drafter(self) -> RemoteDrafter | None:
        """The draft in its own process, as the target calls it; None if it has none."""
        spec = self.spec
        if spec.link is None or spec.address is None:
            return None
        endpoint = DrafterEndpoint(
            spec.address, spec.secret, ActorSupervisor(spec.link.actor, None), spec.link.startup_timeout_s
        )
        return RemoteDrafter(spec.link.contract, endpoint, timeouts=spec.link.timeouts)

    def wait_ready(self) -> None:
        """Until the drafts are loaded. Raises WorkerError: one did not start."""
        pending = {label: actor.ready.remote() for label, actor in self._actors.items()}
        deadline = monotonic() + self._policy.startup_timeout_s
        for label, answer in pending.items():
            try:
                ray.get(answer, timeout=max(0.0, deadline - monotonic()))
            except ray.exceptions.GetTimeoutError as error:
                raise WorkerError(
                    f"{label} did not start within {self._policy.startup_timeout_s} seconds; raise "
                    "fault_policy.startup_timeout_s"
                ) from error
            except ray.exceptions.RayError as error:
                raise WorkerError(f"{label} did not start: {error}") from error
        self._reservation.confirm(self._specs.values())

    @property
    def workers(self) -> tuple[WorkerSpec, ...]:
        """What the target and its drafts are."""
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
                    runtime_env={"env_vars": {**environment.without_cores(), **dict(spec.env)}},
                    scheduling_strategy=self._reservation.bundle(label),
                )
                .remote(spec)
            )

    def close(self) -> None:
        """End the drafts and give the cores back. The process is to end after this: its runtime keeps its cores."""
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors = {}
        self._reservation.release()
