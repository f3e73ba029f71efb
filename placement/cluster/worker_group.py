"""A group: targets and the drafts they share, on one node, started and stopped together.

Ray's placement group keeps them on a node and counts their cores; the ledger says which cores. Drafts are restarted by
Ray, in place. A target is restarted here, in place if its node lives, else the whole group moves to another node.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.core.errors import PlacementError, PlanError, WorkerError
from paceline.placement.cluster import nodes, worker_spec
from paceline.placement.cluster.actors import NAMESPACE, STREAMS, WATCH, DraftWorker, Ready, TargetWorker, WorkerSpec
from paceline.placement.cluster.core_allocator import WORKERS, CoreRequest, ask, give_back, worker_name
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.host.processes import Process
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement

RESOURCE = "neuron_cores"
_LOOK = 1.0  # seconds between looks at a node's health


class WorkerGroup:
    """Workers that live and move together. ``given``: the caller's placement group, from its bundle ``offset`` on."""

    def __init__(
        self,
        instance: Instance,
        placements: Sequence[Placement],
        care: FaultPolicy,
        *,
        given: PlacementGroup | None = None,
        offset: int = 0,
    ) -> None:
        self._instance, self._care, self._given, self._offset = instance, care, given, offset
        # Drafts first: a target calls its draft as soon as it is made.
        self.placements = sorted(placements, key=lambda item: item.role != "draft")
        self._labels = frozenset(item.label for item in self.placements)
        self._stamp = secrets.token_hex(4)
        self._group: PlacementGroup | None = None
        self._claims: list[str] = []
        self._assigned: dict[str, WorkerSpec] = {}
        self._actors: dict[str, ray.actor.ActorHandle] = {}
        self._running: dict[str, Process] = {}
        self._changed = threading.Condition()
        self._changing: set[str] = set()  # labels of workers that are just being started
        self._stopped = False
        self.moves = self.restarts = 0

    @property
    def targets(self) -> list[str]:
        """Labels of the targets."""
        return [item.label for item in self.placements if item.role == "target"]

    def actor(self, label: str) -> ray.actor.ActorHandle:
        """The worker of that label; one that is just being brought back is waited for.

        Raises:
            WorkerError: it could not be brought back, or was stopped.
        """
        with self._changed:
            self._changed.wait_for(lambda: label not in self._changing)
            if label not in self._actors:
                raise WorkerError(f"{label} does not run; it was stopped, or could not be started again")
            return self._actors[label]

    def assignment(self, label: str) -> WorkerSpec:
        """What that worker was given."""
        return self._assigned[label]

    @property
    def cores(self) -> dict[str, CoreRange]:
        """Label -> cores it really has, of the workers that run."""
        return {label: given.cores for label, given in self._assigned.items()}

    # ---- starting

    def launch(self) -> None:
        """Find a node, take cores, and have every worker begin to load.

        Raises:
            PlanError: no node has room; nothing is left then.
            WorkerError: a worker did not start, or the group was stopped; nothing is left then.
        """
        with self._alone(self._labels):
            self._begin()

    def wait_ready(self) -> None:
        """Wait until all are ready. Raises as `begin`."""
        with self._alone(self._labels):
            self._finish()

    @contextmanager
    def _alone(self, labels: frozenset[str]) -> Iterator[None]:
        """Nobody else starts or ends these workers meanwhile, and who asks for one of them waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._changing.isdisjoint(labels))
            if self._stopped:
                raise WorkerError(f"{', '.join(sorted(labels))} was stopped")
            self._changing |= labels
        try:
            yield
        finally:
            with self._changed:
                self._changing -= labels
                self._changed.notify_all()

    def _begin(self) -> None:
        with self._or_nothing():
            self._assign(self._reserve())
            for item in self.placements:
                self._put(item)

    def _finish(self) -> None:
        with self._or_nothing():
            self._wait([item.label for item in self.placements])
            names = [given.actor for given in self._assigned.values()]
            ask(self._instance, "confirm", names, seconds=self._care.startup_timeout_s)

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        try:
            yield
        except ray.exceptions.RayError as error:
            self._clear()
            raise WorkerError(f"{', '.join(sorted(self._labels))} did not start: {error}") from error
        except BaseException:
            self._clear()
            raise

    def _reserve(self) -> list[str]:
        """For each placement a node with enough cores, as Ray counts them; the same for all unless they may part."""
        self._group = self._given
        if self._group is None:
            bundles = [{RESOURCE: float(len(item.cores))} for item in self.placements]
            self._group = placement_group(bundles, strategy="STRICT_PACK" if self._care.colocate else "PACK")
            if not self._group.wait(self._care.placement_timeout_s):
                labels, wanted = ", ".join(item.label for item in self.placements), sum(b[RESOURCE] for b in bundles)
                raise PlanError(
                    f"no node of the cluster has {wanted:.0f} free {RESOURCE} for {labels}; stop a model, add a node, "
                    "let drafts be far from their targets (Care.near), or start Ray's nodes with that resource"
                )
        found = placement_group_table(self._group)["bundles_to_node_id"]
        return [str(found[self._offset + index]) for index in range(len(self.placements))]

    def _assign(self, where: Sequence[str]) -> None:
        self._claims = [f"{WORKERS}{item.label}-{self._stamp}" for item in self.placements]
        wanted = [
            (node, CoreRequest(claim, len(item.cores), item.cores, self._care.startup_timeout_s))
            for item, node, claim in zip(self.placements, where, self._claims, strict=True)
        ]
        cores: dict[str, CoreRange] = {}
        for node in dict.fromkeys(where):
            mine = [claim for at, claim in wanted if at == node]
            given = ask(self._instance, "claim", node, mine, seconds=self._care.startup_timeout_s)
            cores |= {claim.actor: one for claim, one in zip(mine, given, strict=True)}
        self._assigned = worker_spec.assignments(
            self._instance, self.placements, self._care, where=where, claims=self._claims, cores=cores
        )

    def _put(self, item: Placement) -> None:
        """Have a worker begin to load, unless the group was stopped: nobody would end it."""
        with self._changed:
            if self._stopped:
                raise WorkerError(f"{item.label} was stopped while it started")
            self._actors[item.label] = self._spawn(item)

    def _spawn(self, item: Placement) -> ray.actor.ActorHandle:
        given, index = self._assigned[item.label], self.placements.index(item) + self._offset
        options = {
            "name": given.actor,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "resources": {RESOURCE: len(item.cores)},
            "max_restarts": -1 if item.role == "draft" else 0,
            "max_task_retries": 0,
            "runtime_env": {"env_vars": dict(given.env)},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._group, index),
        }
        if item.role == "draft":
            return ray.remote(DraftWorker).options(**options).remote(given)
        threaded = ray.remote(concurrency_groups={WATCH: 2}, max_concurrency=STREAMS)(TargetWorker)
        return threaded.options(**options).remote(
            given, worker_spec.link(item, self.placements, self._care, assigned=self._assigned)
        )

    def _wait(self, labels: Sequence[str]) -> None:
        """Until these workers are ready; no longer than their node lives."""
        made = [self._actors[label].ready.remote() for label in labels]
        end, names = monotonic() + self._care.startup_timeout_s, ", ".join(labels)
        while len(ray.wait(made, num_returns=len(made), timeout=_LOOK)[0]) < len(made):
            if monotonic() > end:
                raise WorkerError(
                    f"{names} did not start within {self._care.startup_timeout_s} seconds; give them more (Care.start)"
                )
            if not self._nodes_live():
                raise WorkerError(f"the node of {names} died while they started")
        try:
            found: list[Ready] = ray.get(made)
        except ray.exceptions.RayError as error:
            raise WorkerError(f"{names} did not start: {error}") from error
        self._running |= {label: ready.process for label, ready in zip(labels, found, strict=True)}

    # ---- restarting and stopping

    def restart(self, label: str, seen: ray.actor.ActorHandle, *, hung: bool = False) -> None:
        """Bring a dead or hung target back: on its cores if its node lives, else the whole group somewhere else.

        Nothing is done if another caller brought back the worker ``seen`` already. Other targets go on meanwhile,
        unless the group moves.

        Raises:
            PlanError: no node has room.
            WorkerError: it does not start, or the group was stopped.
        """
        why: PlacementError | None = None
        with self._alone(frozenset([label])):
            if self._actors.get(label) is not seen:
                return
            with self._changed:
                self.restarts += 1
            _kill(seen)
            process = self._running.pop(label, None)
            if self._nodes_live():
                try:
                    if hung and process is not None:
                        nodes.kill(self._assigned[label].node, process)
                    self._respawn(label)
                    return
                except PlacementError as error:
                    why = error
            last = self._actors[label]
        with self._alone(self._labels):
            if self._actors.get(label) is not last:  # another caller moved the group
                return
            if self._given is not None:
                what = "died with its node" if why is None else f"could not be started again ({why})"
                raise WorkerError(f"{label} {what}; whoever gave it its placement group starts it anew") from why
            self.moves += 1
            self._clear()
            self._stamp = secrets.token_hex(4)
            self._begin()
            self._finish()

    def _respawn(self, label: str) -> None:
        """A new worker in the place of a dead one. Its name is new too: Ray may not have forgotten the old one yet."""
        item, old = next(p for p in self.placements if p.label == label), self._assigned[label]
        name = f"{WORKERS}{label}-{secrets.token_hex(4)}"
        claim = CoreRequest(name, len(old.cores), old.cores, self._care.startup_timeout_s)
        give_back([old.actor], self._care.placement_timeout_s)
        (cores,) = ask(self._instance, "claim", old.node, [claim], seconds=self._care.startup_timeout_s)
        actor, env = worker_name(name, old.node, cores), worker_spec.variables(self._instance, item, cores)
        self._assigned[label] = replace(old, actor=actor, cores=cores, env=env)
        self._put(item)
        self._wait([label])
        ask(self._instance, "confirm", [name], seconds=self._care.startup_timeout_s)

    def _nodes_live(self) -> bool:
        return all(map(nodes.lives, {given.node for given in self._assigned.values()}))

    def stop(self) -> None:
        """End every worker for good and give everything back, also while another thread brings one back."""
        with self._changed:
            self._stopped = True
            for actor in self._actors.values():  # whoever waits for one to be ready hears of it at once
                _kill(actor)
            self._changed.wait_for(lambda: not self._changing)
            self._clear()

    def _clear(self) -> None:
        """End every worker and give everything back."""
        for actor in self._actors.values():
            _kill(actor)
        names = [*self._claims, *(given.actor for given in self._assigned.values())]
        if names:
            give_back(names, self._care.placement_timeout_s)
        if self._group is not None and self._given is None:
            remove_placement_group(self._group)
        for given in self._assigned.values():
            if given.address is not None and given.address.path:
                Path(given.address.path).unlink(missing_ok=True)
        self._actors, self._assigned, self._claims, self._group = {}, {}, [], None


def _kill(actor: ray.actor.ActorHandle) -> None:
    with suppress(ray.exceptions.RayError):
        ray.kill(actor)
