"""Cluster resources of a replica group: capacity on nodes, which Ray counts, and cores, which the allocator assigns.

See also: the processes themselves (`replica_group`).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Sequence

from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.placement.cluster.core_allocator import WORKERS, CoreRequest, call_allocator, give_back, worker_name
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.worker_spec import Location, WorkerSpec, worker_specs
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement


class Reservation:
    """Nodes and cores for the placements of a group, each in its bundle of the placement ``group``. ``owner``: the
    running actor that is the first of them.
    """

    def __init__(
        self,
        instance: Instance,
        placements: Sequence[Placement],
        fault_policy: FaultPolicy,
        *,
        group: PlacementGroup,
        owner: str,
    ) -> None:
        self._instance, self._placements, self._policy = instance, placements, fault_policy
        self._group, self._owner = group, owner
        self._names: set[str] = set()  # under which cores were requested

    def acquire(self) -> dict[str, WorkerSpec]:
        """Return a specification for each label, with a node and cores.

        Raises:
            PlanError: no node has enough free cores.
            WorkerError: the allocator does not respond.
        """
        stamp = secrets.token_hex(4)
        names = [self._owner, *(f"{WORKERS}{item.label}-{stamp}" for item in self._placements[1:])]
        requests = [
            CoreRequest(name, len(item.cores), item.cores, self._policy.startup_timeout_s)
            for name, item in zip(names, self._placements, strict=True)
        ]
        table = placement_group_table(self._group)["bundles_to_node_id"]
        where = [str(table[index]) for index in range(len(self._placements))]
        self._names |= set(names)
        locations: dict[str, Location] = {}
        for node in dict.fromkeys(where):
            here = [index for index, other in enumerate(where) if other == node]
            ranges = self._call("claim", node, self._instance, [requests[index] for index in here])
            for index, cores in zip(here, ranges, strict=True):
                actor = worker_name(names[index], node, cores)
                locations[self._placements[index].label] = Location(actor, node, cores)
        self._names |= {location.actor for location in locations.values()}
        return worker_specs(self._instance, self._placements, self._policy, locations=locations)

    def confirm(self, specs: Collection[WorkerSpec]) -> None:
        """Record that these workers run; they now hold their cores themselves."""
        self._call("confirm", [spec.actor for spec in specs])

    def bundle(self, label: str) -> PlacementGroupSchedulingStrategy:
        """Return the scheduling strategy for the worker of that label."""
        index = next(index for index, item in enumerate(self._placements) if item.label == label)
        return PlacementGroupSchedulingStrategy(self._group, index)

    def release(self) -> None:
        """Release all cores."""
        if self._names:
            give_back(sorted(self._names), self._policy.placement_timeout_s)
        self._names = set()

    def _call(self, method: str, *arguments: object) -> list[CoreRange]:
        answer: list[CoreRange] = call_allocator(method, *arguments, timeout=self._policy.startup_timeout_s)
        return answer
