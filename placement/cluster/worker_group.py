"""A group: targets and the drafts they share, on one node, started and stopped together.

Ray's placement group keeps them on a node and counts their cores; the core allocator says which cores. Drafts are
restarted by Ray, in place. A target is restarted here, in place if its node lives, else the whole group moves to
another node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import ray
from ray.util.placement_group import PlacementGroup

from paceline.core.errors import PlacementError, WorkerError
from paceline.placement.cluster import nodes
from paceline.placement.cluster.actors import STREAMS, WATCH, DraftWorker, Ready, TargetWorker
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.cluster.reservation import RESOURCE as RESOURCE
from paceline.placement.cluster.reservation import Reservation
from paceline.placement.cluster.worker_spec import WorkerSpec
from paceline.placement.host.processes import Process
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement

_POLL_S = 1.0  # between looks at a node's health


@dataclass(slots=True)
class Worker:
    """A worker of a group; ``process`` is known once it is ready."""

    spec: WorkerSpec
    actor: ray.actor.ActorHandle
    process: Process | None = None


class Changes:
    """Which workers are just being started or ended: by one thread at a time, while others wait for them."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._changing: set[str] = set()
        self._stopped = False

    @contextmanager
    def change(self, labels: frozenset[str]) -> Iterator[None]:
        """No other thread starts or ends these workers meanwhile. Raises WorkerError if the group was stopped."""
        with self._condition:
            self._condition.wait_for(lambda: self._changing.isdisjoint(labels))
            self._refuse_stopped(labels)
            self._changing |= labels
        try:
            yield
        finally:
            with self._condition:
                self._changing -= labels
                self._condition.notify_all()

    @contextmanager
    def settled(self, label: str) -> Iterator[None]:
        """With the lock, once no thread is starting or ending that worker."""
        with self._condition:
            self._condition.wait_for(lambda: label not in self._changing)
            yield

    @contextmanager
    def running(self, label: str) -> Iterator[None]:
        """With the lock. Raises WorkerError if the group was stopped."""
        with self._condition:
            self._refuse_stopped({label})
            yield

    @contextmanager
    def stop(self) -> Iterator[Callable[[], None]]:
        """With the lock; nothing changes any more after what this yields was called, which waits for other threads."""
        with self._condition:
            self._stopped = True

            def wait_for_others() -> None:
                self._condition.wait_for(lambda: not self._changing)

            yield wait_for_others

    def _refuse_stopped(self, labels: set[str] | frozenset[str]) -> None:
        if self._stopped:
            raise WorkerError(f"{', '.join(sorted(labels))} was stopped; launch the plan again to use it")


class WorkerGroup:
    """Workers that live and move together. ``existing``: the caller's placement group, from its bundle ``offset`` on;
    such a group does not move.
    """

    def __init__(
        self,
        instance: Instance,
        placements: Sequence[Placement],
        fault_policy: FaultPolicy,
        *,
        existing: PlacementGroup | None = None,
        offset: int = 0,
    ) -> None:
        # Drafts first: a target calls its draft as soon as it is made.
        self.placements = sorted(placements, key=lambda item: item.role != "draft")
        self._policy, self._moves_itself = fault_policy, existing is None
        self._reservation = Reservation(instance, self.placements, fault_policy, existing=existing, offset=offset)
        self._labels = frozenset(item.label for item in self.placements)
        self._changes = Changes()
        self._specs: dict[str, WorkerSpec] = {}
        self._workers: dict[str, Worker] = {}
        self._launched = False
        self.moves = self.restarts = 0

    @property
    def targets(self) -> list[str]:
        """Labels of the targets."""
        return [item.label for item in self.placements if item.role == "target"]

    def actor(self, label: str) -> ray.actor.ActorHandle:
        """The worker of that label; one that is just being brought back is waited for. A group that could not be moved
        when its node died is started again now, for there may be room meanwhile.

        Raises:
            PlanError: there is none.
            WorkerError: it could not be brought back, or was stopped.
        """
        with self._changes.settled(label):
            if label in self._workers:
                return self._workers[label].actor
            if not (self._moves_itself and self._launched):
                raise WorkerError(f"{label} does not run; it was stopped, or could not be started again")
        return self._relaunch(label)

    def spec(self, label: str) -> WorkerSpec:
        """What that worker is."""
        return self._specs[label]

    @property
    def cores(self) -> dict[str, CoreRange]:
        """Label -> cores it really has, of the workers that run."""
        return {label: spec.cores for label, spec in self._specs.items()}

    # ---- starting

    def launch(self) -> None:
        """Find a node, take cores, and have every worker begin to load.

        Raises:
            PlanError: no node has room; nothing is left then.
            WorkerError: a worker did not start, or the group was stopped; nothing is left then.
        """
        with self._changes.change(self._labels):
            self._launch()

    def wait_ready(self) -> None:
        """Wait until all are ready. Raises as `launch`."""
        with self._changes.change(self._labels):
            self._wait_ready()

    def _launch(self) -> None:
        with self._or_nothing():
            self._specs = self._reservation.acquire()
            for item in self.placements:
                self._spawn(self._specs[item.label], role=item.role)

    def _wait_ready(self) -> None:
        with self._or_nothing():
            self._await([item.label for item in self.placements])
            self._reservation.confirm(self._specs.values())
            self._launched = True

    def _relaunch(self, label: str) -> ray.actor.ActorHandle:
        """Start a group of which nothing is left; another caller may have done so."""
        with self._changes.change(self._labels):
            if label not in self._workers:
                self.moves += 1
                self._launch()
                self._wait_ready()
            return self._workers[label].actor

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        """What fails in here leaves no worker behind."""
        try:
            yield
        except ray.exceptions.RayError as error:
            self._clear()
            raise WorkerError(f"{', '.join(sorted(self._labels))} did not start: {error}") from error
        except BaseException:
            self._clear()
            raise

    def _spawn(self, spec: WorkerSpec, *, role: str) -> None:
        """Have a worker begin to load, unless the group was stopped: nothing would end it then."""
        options = {
            "name": spec.actor,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "resources": {RESOURCE: len(spec.cores)},
            "max_restarts": -1 if role == "draft" else 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": dict(spec.env)},
            "scheduling_strategy": self._reservation.bundle(spec.label),
        }
        if role == "draft":
            remote_class = ray.remote(DraftWorker)
        else:
            remote_class = ray.remote(concurrency_groups={WATCH: 2}, max_concurrency=STREAMS)(TargetWorker)
        with self._changes.running(spec.label):
            self._workers[spec.label] = Worker(spec, remote_class.options(**options).remote(spec))

    def _await(self, labels: Sequence[str]) -> None:
        """Until these workers are ready; no longer than their node lives."""
        workers, names = [self._workers[label] for label in labels], ", ".join(labels)
        pending = [worker.actor.ready.remote() for worker in workers]
        deadline = monotonic() + self._policy.startup_timeout_s
        waiting = list(pending)
        while waiting:
            done, waiting = ray.wait(waiting, timeout=_POLL_S)
            try:
                ray.get(done)  # one that failed is told at once, though others still load
            except ray.exceptions.RayError as error:
                raise WorkerError(f"{names} did not start: {error}") from error
            if waiting and monotonic() > deadline:
                raise WorkerError(
                    f"{names} did not start within {self._policy.startup_timeout_s} seconds; raise "
                    "fault_policy.startup_timeout_s"
                )
            if waiting and not self._nodes_live():
                raise WorkerError(f"the node of {names} died while they started; start them again")
        answers: list[Ready] = ray.get(pending)
        for worker, ready in zip(workers, answers, strict=True):
            worker.process = ready.process

    # ---- restarting and stopping

    def restart(self, label: str, seen: ray.actor.ActorHandle, *, hung: bool = False) -> None:
        """Bring a dead or hung target back: on its cores if its node lives, else the whole group somewhere else.

        Nothing is done if another caller brought back the worker ``seen`` already. Other targets go on meanwhile,
        unless the group moves.

        Raises:
            PlanError: no node has room.
            WorkerError: it does not start, or the group was stopped.
        """
        reason: PlacementError | None = None
        with self._changes.change(frozenset([label])):
            if not self._is(label, seen):
                return
            worker = self._workers[label]
            with self._changes.running(label):
                self.restarts += 1
            _kill(seen)
            process, worker.process = worker.process, None
            if self._nodes_live():
                try:
                    if hung and process is not None:
                        nodes.kill(worker.spec.node, process)
                    self._respawn(label)
                    return
                except PlacementError as error:
                    reason = error
            last = self._workers[label].actor
        with self._changes.change(self._labels):
            if not self._is(label, last):  # another caller moved the group
                return
            if not self._moves_itself:
                what = "died with its node" if reason is None else f"could not be started again ({reason})"
                raise WorkerError(
                    f"{label} {what}; the owner of its placement group has to start the group again"
                ) from reason
            self.moves += 1
            self._clear()
            self._launch()
            self._wait_ready()

    def _is(self, label: str, actor: ray.actor.ActorHandle) -> bool:
        return label in self._workers and self._workers[label].actor is actor

    def _respawn(self, label: str) -> None:
        """A new worker in the place of a dead one."""
        spec = self._specs[label] = self._reservation.replace(self._specs[label])
        self._spawn(spec, role="target")
        self._await([label])
        self._reservation.confirm([spec])

    def _nodes_live(self) -> bool:
        return all(map(nodes.lives, {spec.node for spec in self._specs.values()}))

    def stop(self) -> None:
        """End every worker for good and give everything back, also while another thread brings one back."""
        with self._changes.stop() as wait_for_others:
            for worker in self._workers.values():  # a thread that waits for one to be ready hears of it at once
                _kill(worker.actor)
            wait_for_others()
            self._clear()

    def _clear(self) -> None:
        """End every worker and give everything back."""
        for worker in self._workers.values():
            _kill(worker.actor)
        self._reservation.release()
        for spec in self._specs.values():
            if spec.address is not None and spec.address.path:
                Path(spec.address.path).unlink(missing_ok=True)
        self._workers, self._specs = {}, {}


def _kill(actor: ray.actor.ActorHandle) -> None:
    with suppress(ray.exceptions.RayError):
        ray.kill(actor)
