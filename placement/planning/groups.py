"""Replica groups: a target with its own draft processes, planned once and placed wherever there is capacity.

A server scales a model by groups, so each target has its own draft processes; in a plan for one machine, targets may
share one. A group must fit on one instance; its plan does not depend on the number of groups.

Also which models fit together: which ones to unload for a model, and which ones run without a draft. If capacity is too
small for a model and its draft, only the draft is dropped: the context keeps its length. Pure; the planner decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from paceline.config import SpeculativeConfig
from paceline.core.errors import PlanError, RoomError
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.model_specs import ModelSpec
from paceline.placement.planning.plan import Plan
from paceline.placement.planning.planner import plan, settled
from paceline.placement.planning.residency import Residency


@dataclass(frozen=True, slots=True)
class ReplicaGroupPlan:
    """Plan of one replica of a model.

    name      of the target
    replicas  number of replicas in the models file
    plan      of one of them, on an otherwise empty instance; the cores are the preferred ones
    undrafted why it runs without the requested draft: capacity is too small for both; empty: it has its draft, if any
    """

    name: str
    replicas: int
    plan: Plan
    undrafted: str = ""

    @property
    def residency(self) -> Residency:
        return self.plan.placements[0].model.residency

    @property
    def is_on_demand(self) -> bool:
        return self.residency.load == "on_demand"

    @property
    def min_replicas(self) -> int:
        """Number of replicas that are loaded from the start."""
        scaling = self.residency.autoscaling
        if scaling is not None:
            return scaling.min_replicas
        return 0 if self.is_on_demand else self.replicas

    @property
    def num_cores(self) -> tuple[int, ...]:
        """Cores of the target, then of each draft."""
        return tuple(len(item.cores) for item in self.plan.placements)


def plan_groups(models: Sequence[ModelSpec], instance: Instance) -> tuple[ReplicaGroupPlan, ...]:
    """Return one group for each target of a models file; PlanError if one does not fit, even without its draft. The
    context is never cut.
    """
    groups = []
    with suppress(RoomError):  # one does not fit even alone: it is told below, or runs without its draft
        degrees = settled(models, instance)  # of all models together, so that a group leaves room for the others
        models = [replace(model, degree=degrees[model.name]) for model in models]
    for target in models:
        if target.draft_of:
            continue
        drafts = [
            replace(model, draft_of=(target.name,), replicas=1) for model in models if target.name in model.draft_of
        ]
        try:
            planned = plan([replace(target, replicas=1), *drafts], instance)
        except RoomError as error:
            if not drafts and not target.drafts:
                raise
            groups.append(_bare(target, instance, str(error)))
            continue
        ordered = sorted(planned.placements, key=lambda item: item.role == "draft")
        groups.append(ReplicaGroupPlan(target.name, target.replicas, Plan(instance, tuple(ordered))))
    if not groups:
        raise PlanError("models: expected at least one target, got only models with draft_of; add a target")
    return tuple(groups)


def without_draft(group: ReplicaGroupPlan, reason: str) -> ReplicaGroupPlan:
    """Return the same model without speculation. ``reason``: as in `ReplicaGroupPlan.undrafted`."""
    target = group.plan.placements[0].model
    return _bare(replace(target, replicas=group.replicas), group.plan.instance, reason)


def _bare(target: ModelSpec, instance: Instance, reason: str) -> ReplicaGroupPlan:
    """Return a group of the target only. Its rounds keep their options except those for drafting."""
    plain = replace(target, replicas=1, drafts=(), speculative=SpeculativeConfig(exact=target.speculative.exact))
    return ReplicaGroupPlan(target.name, target.replicas, plan([plain], instance), reason)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Loaded model.

    cores    node -> its cores on that node
    movable  whether it may be unloaded: it is not pinned, and serves no request now
    """

    name: str
    cores: Mapping[str, Sequence[CoreRange]]
    movable: bool = False


def to_unload(
    group: ReplicaGroupPlan, residents: Sequence[LoadedModel], nodes: Mapping[str, Instance]
) -> tuple[str, ...]:
    """Return the residents to unload for ``group``: the first ones of the list, and as few as possible.

    residents  in the order in which they may be unloaded, such as by last use
    nodes      living nodes and their instance types

    Raises:
        RoomError: it does not fit, even if all movable ones are unloaded; the message names those that stay.
    """
    movable = [resident.name for resident in residents if resident.movable]
    for count in range(len(movable) + 1):
        leaving = movable[:count]
        if not _fits(group, _without(residents, leaving), nodes):
            continue
        for name in reversed(movable[:count]):  # one that does not have to be unloaded stays, the last used first
            spared = [other for other in leaving if other != name]
            if _fits(group, _without(residents, spared), nodes):
                leaving = spared
        return tuple(leaving)
    stay = ", ".join(resident.name for resident in residents if not resident.movable) or "none"
    raise RoomError(
        f"{group.name}: {' + '.join(map(str, group.num_cores))} cores are needed for each of {group.replicas} "
        f"replicas, and no node has them free (pinned or busy: {stay}); unpin or unload a model, or add a node"
    )


def fit_together(groups: Sequence[ReplicaGroupPlan], instance: Instance) -> tuple[ReplicaGroupPlan, ...]:
    """Return the groups loaded from the start, on one instance. If they do not fit together, the last ones run without
    drafts.

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
                f"{', '.join(group.name for group in eager)}: {num_cores} cores are needed together, and "
                f"{over.name} does not fit {instance.name} ({instance.cores} cores); give a model `load: "
                "on_demand`, or use a larger instance"
            )
        reason = f"{over.name} does not fit {instance.name} next to the drafts"
        settled[last] = without_draft(settled[last], reason)


def _without(residents: Sequence[LoadedModel], names: Sequence[str]) -> list[LoadedModel]:
    return [resident for resident in residents if resident.name not in names]


def _fits(group: ReplicaGroupPlan, staying: Sequence[LoadedModel], nodes: Mapping[str, Instance]) -> bool:
    taken = {node: [run for one in staying for run in one.cores.get(node, ())] for node in nodes}
    return _place(group, taken, nodes, copies=group.replicas)


def _place(
    group: ReplicaGroupPlan, taken: dict[str, list[CoreRange]], nodes: Mapping[str, Instance], *, copies: int
) -> bool:
    """Whether ``copies`` replicas fit on the nodes; their cores are added to ``taken``."""
    models = [replace(item.model, replicas=1) for item in group.plan.placements]
    for _ in range(copies):
        for node, instance in nodes.items():
            with suppress(RoomError):
                taken[node] += [item.cores for item in plan(models, instance, taken=taken[node]).placements]
                break
        else:
            return False
    return True
