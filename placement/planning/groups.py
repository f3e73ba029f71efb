"""Replica groups: a target with the drafts that serve it alone, planned once and placed wherever there is room.

A server scales a model by groups, so each target has draft processes of its own here, where a plan of a whole machine
lets targets share one. A group has to fit one instance; how many groups there are does not matter to its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.config import SpeculativeConfig
from paceline.core.errors import PlanError, RoomError
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.model_specs import ModelSpec
from paceline.placement.planning.plan import Plan
from paceline.placement.planning.planner import plan
from paceline.placement.planning.residency import Residency


@dataclass(frozen=True, slots=True)
class ReplicaGroupPlan:
    """What one replica of a model is.

    name      of the target
    replicas  how many the models file asks for
    plan      of one of them, on an instance that is otherwise empty; the cores are those it prefers
    undrafted why it decodes without the draft that was asked for: there is no room for both; empty: it has one, if any
    """

    name: str
    replicas: int
    plan: Plan
    undrafted: str = ""

    @property
    def residency(self) -> Residency:
        """When it is in memory."""
        return self.plan.placements[0].model.residency

    @property
    def is_on_demand(self) -> bool:
        """Whether its first request loads it."""
        return self.residency.load == "on_demand"

    @property
    def min_replicas(self) -> int:
        """Replicas that are loaded from the start on."""
        scaling = self.residency.autoscaling
        if scaling is not None:
            return scaling.min_replicas
        return 0 if self.is_on_demand else self.replicas

    @property
    def num_cores(self) -> tuple[int, ...]:
        """Cores of the target, then of each draft."""
        return tuple(len(item.cores) for item in self.plan.placements)


def plan_groups(models: Sequence[ModelSpec], instance: Instance) -> tuple[ReplicaGroupPlan, ...]:
    """One group for each target of a models file. Where there is no room for a target and its draft, the draft stays
    away (``undrafted``); the context is never cut.

    Raises:
        PlanError: a group does not fit the instance, even without its draft.
    """
    groups = []
    for target in models:
        if target.draft_of:
            continue
        drafts = [
            replace(model, draft_of=(target.name,), replicas=1, num_targets=1)
            for model in models
            if target.name in model.draft_of
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
        raise PlanError("the models file has no target: every model in it has draft_of")
    return tuple(groups)


def without_draft(group: ReplicaGroupPlan, reason: str) -> ReplicaGroupPlan:
    """The same model, decoding plainly. ``reason``: as in `ReplicaGroupPlan.undrafted`."""
    target = group.plan.placements[0].model
    return _bare(replace(target, replicas=group.replicas), group.plan.instance, reason)


def _bare(target: ModelSpec, instance: Instance, reason: str) -> ReplicaGroupPlan:
    """A target alone. Its rounds keep their options, but for those of drafting."""
    plain = replace(target, replicas=1, drafts=(), speculative=SpeculativeConfig(exact=target.speculative.exact))
    return ReplicaGroupPlan(target.name, target.replicas, plan([plain], instance), reason)
