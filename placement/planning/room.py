"""What fits beside what: which models are to leave for one that is to be loaded, and which drafts stay away.

Pure; the answer is the planner's. Where there is too little room for a model and its draft, the draft goes before
anything of the model does: its context stays as long as it was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import RoomError
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.groups import ReplicaGroupPlan, without_draft
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.plan import Plan
from paceline.placement.planning.planner import plan


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is loaded.

    cores    node -> what it has there
    movable  whether it may be unloaded: it is not pinned, and serves nobody now
    """

    name: str
    cores: Mapping[str, Sequence[CoreRange]]
    movable: bool = False


def to_unload(group: ReplicaGroupPlan, residents: Sequence[Resident], nodes: Mapping[str, Instance]) -> tuple[str, ...]:
    """Names of the residents that have to leave for ``group``, as few as it takes, of the first ones.

    residents  in the order in which they may leave, such as by when they were last used
    nodes      those that live, and what they are

    Raises:
        RoomError: it does not fit, even if all leave that may; the message names those that stay.
    """
    movable = [resident.name for resident in residents if resident.movable]
    for count in range(len(movable) + 1):
        leaving = movable[:count]
        if not _fits(group, _without(residents, leaving), nodes):
            continue
        for name in reversed(movable[:count]):  # one that left for nothing stays, the last used first
            spared = [other for other in leaving if other != name]
            if _fits(group, _without(residents, spared), nodes):
                leaving = spared
        return tuple(leaving)
    stay = ", ".join(resident.name for resident in residents if not resident.movable) or "none"
    raise RoomError(
        f"{group.name} wants {' + '.join(map(str, group.num_cores))} cores for each of {group.replicas} replicas, "
        f"and no node has room (pinned or busy: {stay}); unpin or unload one, or add a node"
    )


def fit_together(groups: Sequence[ReplicaGroupPlan], instance: Instance) -> tuple[ReplicaGroupPlan, ...]:
    """The groups that are loaded from the start, on one instance: where they do not fit together, the drafts of the
    last ones stay away.

    Raises:
        RoomError: they do not fit without drafts either.
    """
    settled = list(groups)
    while True:
        eager = [group for group in settled if group.min_replicas]
        taken: dict[str, list[CoreRange]] = {instance.name: []}
        nodes = {instance.name: instance}
        over = next((group for group in eager if not _place(group, taken, nodes, copies=group.min_replicas)), None)
        if over is None:
            return tuple(settled)
        last = next((at for at in reversed(range(len(settled))) if len(settled[at].num_cores) > 1), None)
        if last is None:
            num_cores = sum(sum(group.num_cores) * group.min_replicas for group in eager)
            raise RoomError(
                f"{', '.join(group.name for group in eager)} want {num_cores} cores together, and {over.name} finds no "
                f"room on {instance.name} ({instance.cores} cores); give a model `load: on_demand`, or take a larger "
                "instance"
            )
        reason = f"{over.name} finds no room on {instance.name} beside the drafts"
        settled[last] = without_draft(settled[last], reason)


def _without(residents: Sequence[Resident], names: Sequence[str]) -> list[Resident]:
    return [resident for resident in residents if resident.name not in names]


def _fits(group: ReplicaGroupPlan, staying: Sequence[Resident], nodes: Mapping[str, Instance]) -> bool:
    taken = {node: [run for one in staying for run in one.cores.get(node, ())] for node in nodes}
    return _place(group, taken, nodes, copies=group.replicas)


def _place(
    group: ReplicaGroupPlan, taken: dict[str, list[CoreRange]], nodes: Mapping[str, Instance], *, copies: int
) -> bool:
    """Whether so many replicas find a place on the nodes; ``taken`` gains what they take."""
    for _ in range(copies):
        for node, instance in nodes.items():
            planned = _placed(group, instance, taken[node])
            if planned is not None:
                taken[node] += [item.cores for item in planned.placements]
                break
        else:
            return False
    return True


def _placed(group: ReplicaGroupPlan, instance: Instance, taken: Sequence[CoreRange]) -> Plan | None:
    models = [replace(item.model, replicas=1) for item in group.plan.placements]
    try:
        return plan(models, instance, taken=taken)
    except RoomError:
        return None
