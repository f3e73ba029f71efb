"""A group: targets and the drafts they share, on one node, started and stopped together.

Ray's placement group keeps them on a node and counts their cores; the ledger says which cores. Drafts are restarted by
Ray, in place. A target is restarted here, in place if its node lives, else the whole group moves to another node.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from time import monotonic

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.core.errors import PlanError, WorkerError
from paceline.placement import environment, nodes
from paceline.placement.actors import NAMESPACE, STREAMS, WATCH, Assignment, DraftWorker, Link, Ready, TargetWorker
from paceline.placement.care import Care
from paceline.placement.catalogue import Instance
from paceline.placement.channel import Address
from paceline.placement.ledger import WORKERS, Claim, asked, ledger, worker_name
from paceline.placement.plans import Placement
from paceline.placement.ranges import CoreRange
from paceline.placement.remote import Terms
from paceline.placement.roles import Settings

RESOURCE = "neuron_cores"
_LOOK = 1.0  # seconds between looks at a node's health


class Group:
    """Workers that live and move together. ``given``: the caller's placement group, from its bundle ``offset`` on."""

    def __init__(
        self,
        instance: Instance,
        placements: Sequence[Placement],
        care: Care,
        *,
        given: PlacementGroup | None = None,
        offset: int = 0,
    ) -> None:
        self._instance, self._care, self._given, self._offset = instance, care, given, offset
        # Drafts first: a target calls its draft as soon as it is made.
        self.placements = sorted(placements, key=lambda item: item.role != "draft")
        self._stamp = secrets.token_hex(4)
        self._group: PlacementGroup | None = None
        self._claims: list[str] = []
        self._assigned: dict[str, Assignment] = {}
        self._actors: dict[str, ray.actor.ActorHandle] = {}
        self._pids: dict[str, int] = {}
        self._reviving = threading.Lock()
        self.moves = self.restarts = 0

    @property
    def targets(self) -> list[str]:
        """Labels of the targets."""
        return [item.label for item in self.placements if item.role == "target"]

    def actor(self, label: str) -> ray.actor.ActorHandle:
        """The worker of that label; one that is just being brought back is waited for.

        Raises:
            WorkerError: it could not be brought back.
        """
        with self._reviving:
            if label not in self._actors:
                raise WorkerError(f"{label} does not run; it could not be started again")
            return self._actors[label]

    def assignment(self, label: str) -> Assignment:
        """What that worker was given."""
        return self._assigned[label]

    # ---- starting

    def start(self) -> None:
        """Have all workers running.

        Raises:
            PlanError: no node has room.
            WorkerError: a worker did not start.
        """
        self.begin()
        self.finish()

    def begin(self) -> None:
        """Find a node, take cores, and have every worker begin to load. Raises as `start`; nothing is left then."""
        with self._or_nothing():
            self._assign(self._reserve())
            for item in self.placements:
                self._actors[item.label] = self._spawn(item)

    def finish(self) -> None:
        """Wait until all are ready. Raises as `start`; nothing is left then."""
        with self._or_nothing():
            self._wait([item.label for item in self.placements])
            names = [given.actor for given in self._assigned.values()]
            asked(ledger(self._instance).confirm.remote(names), self._care.room)

    @contextmanager
    def _or_nothing(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _reserve(self) -> list[str]:
        """For each placement a node with enough cores, as Ray counts them; the same for all unless they may part."""
        self._group = self._given
        if self._group is None:
            bundles = [{RESOURCE: float(len(item.cores))} for item in self.placements]
            self._group = placement_group(bundles, strategy="STRICT_PACK" if self._care.near else "PACK")
            if not self._group.wait(self._care.room):
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
            (node, Claim(claim, len(item.cores), item.cores))
            for item, node, claim in zip(self.placements, where, self._claims, strict=True)
        ]
        cores: dict[str, CoreRange] = {}
        for node in dict.fromkeys(where):
            mine = [claim for at, claim in wanted if at == node]
            given = asked(ledger(self._instance).claim.remote(node, mine), self._care.room)
            cores |= {claim.actor: one for claim, one in zip(mine, given, strict=True)}
        secret, addresses = secrets.token_bytes(32), self._addresses(where)
        for item, node, claim in zip(self.placements, where, self._claims, strict=True):
            own = item if item.role == "draft" else self._draft_of(item)
            self._assigned[item.label] = Assignment(
                actor=worker_name(claim, node, cores[claim]),
                label=item.label,
                node=node,
                cores=cores[claim],
                env=self._env(item, cores[claim]),
                affinity=item.affinity,
                vcpus=self._instance.vcpus,
                maker=self._care.makers[item.role],
                settings=self._settings(item),
                secret=secret,
                quota=item.model.quota.by_label({p.label: p.name for p in self.placements}),
                address=None if own is None else addresses[own.label],
            )

    def _addresses(self, where: Sequence[str]) -> dict[str, Address]:
        """Where drafts listen: a socket file if all who call are on the same node, else a port."""
        nodes_of = {item.label: node for item, node in zip(self.placements, where, strict=True)}
        folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}" / "sockets"
        found = {}
        for item in self.placements:
            if item.role == "draft":
                here = nodes_of[item.label]
                callers = [p for p in self.placements if (p.name, p.replica) in item.drafts_for]
                file = Address(path=str(folder / f"{item.label}-{secrets.token_hex(4)}"))
                near = all(nodes_of[caller.label] == here for caller in callers)
                found[item.label] = file if near else nodes.tcp_address(here)
        return found

    def _env(self, item: Placement, cores: CoreRange) -> tuple[tuple[str, str], ...]:
        """The plan's, or the same for the range that was free instead."""
        if cores == item.cores:
            return item.env
        threads = int(dict(item.env)["OMP_NUM_THREADS"])
        return environment.planned(
            self._instance, cores, label=item.label, index=cores.first, threads=threads, timeout=item.timeout
        )

    def _settings(self, item: Placement) -> Settings:
        model = item.model
        gqa = None if model.gqa is None else model.gqa.value
        ranks = {"tp_degree": len(item.cores), "group_query_attention": gqa}
        given = {"folder": str(model.folder), "backend": model.backend, "k": model.k, "ahead": self._care.ahead}
        return {**asdict(model.shape), **ranks, **given}

    def _draft_of(self, item: Placement) -> Placement | None:
        return next((p for p in self.placements if (item.name, item.replica) in p.drafts_for), None)

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
        return threaded.options(**options).remote(given, self._link(item))

    def _link(self, item: Placement) -> Link | None:
        draft = self._draft_of(item)
        if draft is None:
            return None
        model, reach = item.model, draft.model.shape.n_positions
        terms = Terms(draft.model.k, model.shape.batch_size, model.config.vocab_size, reach, item.label)
        given = self._assigned[draft.label]
        return Link(terms, self._care.patience, given.actor, given.node, self._care.start)

    def _wait(self, labels: Sequence[str]) -> None:
        """Until these workers are ready; no longer than their node lives."""
        made = [self._actors[label].ready.remote() for label in labels]
        end, names = monotonic() + self._care.start, ", ".join(labels)
        while len(ray.wait(made, num_returns=len(made), timeout=_LOOK)[0]) < len(made):
            if monotonic() > end:
                raise WorkerError(
                    f"{names} did not start within {self._care.start} seconds; give them more (Care.start)"
                )
            if not self._nodes_live():
                raise WorkerError(f"the node of {names} died while they started")
        try:
            found: list[Ready] = ray.get(made)
        except ray.exceptions.RayError as error:
            raise WorkerError(f"{names} did not start: {error}") from error
        self._pids |= {label: ready.pid for label, ready in zip(labels, found, strict=True)}

    # ---- restarting and stopping

    def revive(self, label: str, seen: ray.actor.ActorHandle, *, hung: bool = False) -> None:
        """Bring a dead or hung target back: on its cores if its node lives, else the whole group somewhere else.

        Nothing is done if another caller brought back the worker ``seen`` already.

        Raises:
            PlanError: no node has room.
            WorkerError: it does not start.
        """
        with self._reviving:
            if self._actors.get(label) is not seen:
                return
            self.restarts += 1
            _kill(self._actors.get(label))
            if self._nodes_live():
                with suppress(WorkerError):
                    if hung:
                        nodes.kill(self._assigned[label].node, self._pids[label])
                    self._respawn(label)
                    return
            if self._given is not None:
                raise WorkerError(f"{label} died with its node; whoever gave it its placement group starts it anew")
            self.moves += 1
            self.stop()
            self._stamp = secrets.token_hex(4)
            self.start()

    def _respawn(self, label: str) -> None:
        """A new worker in the place of a dead one. Its name is new too: Ray may not have forgotten the old one yet."""
        item, old = next(p for p in self.placements if p.label == label), self._assigned[label]
        keeper, name = ledger(self._instance), f"{WORKERS}{label}-{secrets.token_hex(4)}"
        asked(keeper.release.remote([old.actor]), self._care.room)
        (cores,) = asked(keeper.claim.remote(old.node, [Claim(name, len(old.cores), old.cores)]), self._care.room)
        actor = worker_name(name, old.node, cores)
        self._assigned[label] = replace(old, actor=actor, cores=cores, env=self._env(item, cores))
        self._actors[label] = self._spawn(item)
        self._wait([label])
        asked(keeper.confirm.remote([name]), self._care.room)

    def _nodes_live(self) -> bool:
        return all(map(nodes.lives, {given.node for given in self._assigned.values()}))

    def stop(self) -> None:
        """End every worker and give everything back."""
        for actor in self._actors.values():
            _kill(actor)
        names = [*self._claims, *(given.actor for given in self._assigned.values())]
        if names:
            with suppress(ray.exceptions.RayError):
                asked(ledger(self._instance).release.remote(names), self._care.room)
        if self._group is not None and self._given is None:
            remove_placement_group(self._group)
        for given in self._assigned.values():
            if given.address is not None and given.address.path:
                Path(given.address.path).unlink(missing_ok=True)
        self._actors, self._assigned, self._claims, self._group = {}, {}, [], None


def _kill(actor: ray.actor.ActorHandle | None) -> None:
    if actor is not None:
        with suppress(ray.exceptions.RayError):
            ray.kill(actor)
