"""Replica groups: a target with the drafts that serve it alone, planned once and placed wherever there is room.

A server scales a model by groups, so each target has draft processes of its own here, where a plan of a whole machine
lets targets share one. A group has to fit one instance; how many groups there are does not matter to its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import PlanError
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.model_specs import ModelSpec
from paceline.placement.planning.plan import Plan
from paceline.placement.planning.planner import plan


@dataclass(frozen=True, slots=True)
class ReplicaGroupPlan:
    """What one replica of a model is.

    name      of the target
    replicas  how many the models file asks for
    plan      of one of them, on an instance that is otherwise empty; the cores are those it prefers
    """

    name: str
    replicas: int
    plan: Plan

    @property
    def num_cores(self) -> tuple[int, ...]:
        """Cores of the target, then of each draft."""
        return tuple(len(item.cores) for item in self.plan.placements)


def plan_groups(models: Sequence[ModelSpec], instance: Instance) -> tuple[ReplicaGroupPlan, ...]:
    """One group for each target of a models file.

    Raises:
        PlanError: a group does not fit the instance.
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
        planned = plan([replace(target, replicas=1), *drafts], instance)
        ordered = sorted(planned.placements, key=lambda item: item.role == "draft")
        groups.append(ReplicaGroupPlan(target.name, target.replicas, Plan(instance, tuple(ordered))))
    if not groups:
        raise PlanError("the models file has no target: every model in it has draft_of")
    return tuple(groups)
