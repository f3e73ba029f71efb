"""What a group of workers holds in the cluster: a place on nodes, as Ray counts it, and cores, as the allocator does.

Not here: the workers themselves (`deployment`).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paceline.core.errors import PlanError
from paceline.placement.cluster.core_allocator import WORKERS, CoreRequest, call_allocator, give_back, worker_name
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.cluster.nodes import RESOURCE as RESOURCE
from paceline.placement.cluster.worker_spec import Location, WorkerSpec, variables, worker_specs
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Placement
from paceline.placement.planning.planner import cpus_of


class Reservation:
    """Nodes and cores for the workers of a group. ``existing``: a placement group of the caller, from its bundle
    ``offset`` on, which is never removed here. ``owners``: actors that run already, by the label they are to serve.
    """

    def __init__(
        self,
        instance: Instance,
        placements: Sequence[Placement],
        fault_policy: FaultPolicy,
        *,
        existing: PlacementGroup | None,
        offset: int,
        owners: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._instance, self._placements, self._policy = instance, placements, fault_policy
        self._existing, self._offset, self._owners = existing, offset, owners
        self._group: PlacementGroup | None = None
        self._names: set[str] = set()  # under which cores were requested

    def acquire(self) -> dict[str, WorkerSpec]:
        """A specification for each label, with a node and cores.

        Raises:
            PlanError: no node has room.
            WorkerError: the allocator does not answer.
        """
        stamp = secrets.token_hex(4)
        requests = [
            self._request(self._owners.get(item.label, f"{WORKERS}{item.label}-{stamp}"), item)
            for item in self._placements
        ]
        where = self._reserve_nodes()
        self._names |= {request.actor for request in requests}
        locations: dict[str, Location] = {}
        for node in dict.fromkeys(where):
            here = [index for index, other in enumerate(where) if other == node]
            ranges = self._call("claim", node, self._instance, [requests[index] for index in here])
            for index, cores in zip(here, ranges, strict=True):
                actor = worker_name(requests[index].actor, node, cores)
                locations[self._placements[index].label] = Location(actor, node, cores)
        self._names |= {location.actor for location in locations.values()}
        return worker_specs(self._instance, self._placements, self._policy, locations=locations)

    def replace(self, spec: WorkerSpec) -> WorkerSpec:
        """The specification of a worker that takes the place of a dead one. Its name is new too: Ray may not have
        forgotten the old one yet.
        """
        item = next(item for item in self._placements if item.label == spec.label)
        name = f"{WORKERS}{spec.label}-{secrets.token_hex(4)}"
        give_back([spec.actor], self._policy.placement_timeout_s)
        self._names.add(name)
        (cores,) = self._call(
            "claim", spec.node, self._instance, [replace(self._request(name, item), preferred=spec.cores)]
        )
        actor, env = worker_name(name, spec.node, cores), variables(self._instance, item, cores)
        return replace(spec, actor=actor, cores=cores, env=env, affinity=cpus_of(self._instance, cores))

    def confirm(self, specs: Collection[WorkerSpec]) -> None:
        """These workers run now; from here on they hold their cores themselves."""
        self._call("confirm", [spec.actor for spec in specs])

    def bundle(self, label: str) -> PlacementGroupSchedulingStrategy:
        """Where Ray is to start the worker of that label."""
        index = next(index for index, item in enumerate(self._placements) if item.label == label)
        return PlacementGroupSchedulingStrategy(self._group, index + self._offset)

    def release(self) -> None:
        """Give everything back."""
        if self._names:
            give_back(sorted(self._names), self._policy.placement_timeout_s)
        if self._group is not None and self._existing is None:
            remove_placement_group(self._group)
        self._names, self._group = set(), None

    def _reserve_nodes(self) -> list[str]:
        """For each placement a node with enough cores, as Ray counts them: the same for all if they are colocated."""
        self._group = self._existing
        if self._group is None:
            bundles = [{RESOURCE: float(len(item.cores))} for item in self._placements]
            self._group = placement_group(bundles, strategy="STRICT_PACK" if self._policy.colocate else "PACK")
            if not self._group.wait(self._policy.placement_timeout_s):
                labels = ", ".join(item.label for item in self._placements)
                raise PlanError(
                    f"no node of the cluster has {sum(len(item.cores) for item in self._placements)} free {RESOURCE} "
                    f"for {labels}; stop a model, add a node, let drafts run on other nodes than their targets "
                    "(fault_policy.colocate: false), or start Ray's nodes with that resource"
                )
        table = placement_group_table(self._group)["bundles_to_node_id"]
        return [str(table[self._offset + index]) for index in range(len(self._placements))]

    def _request(self, name: str, item: Placement) -> CoreRequest:
        return CoreRequest(name, len(item.cores), item.cores, self._policy.startup_timeout_s)

    def _call(self, method: str, *arguments: object) -> list[CoreRange]:
        answer: list[CoreRange] = call_allocator(method, *arguments, timeout=self._policy.startup_timeout_s)
        return answer
