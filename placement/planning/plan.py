"""Plans: the model, cores and environment of each process. Values, and the plan as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.placement.host.environment import EXECUTION_TIMEOUT_S
from paceline.placement.planning.core_range import CoreRange, Fragmentation, fragmentation
from paceline.placement.planning.footprint import Footprint
from paceline.placement.planning.instances import Instance
from paceline.placement.planning.model_specs import ModelSpec

Role = Literal["target", "draft"]


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of one process.

    drafts_for  (name, replica) of the target that it serves; empty for a target
    env         variables that must be set before the process starts
    affinity    CPUs of the host it may use: first and last
    why         reason for the degree, if `auto` chose it
    """

    model: ModelSpec
    replica: int
    cores: CoreRange
    footprint: Footprint
    env: tuple[tuple[str, str], ...]
    affinity: tuple[int, int]
    drafts_for: tuple[tuple[str, int], ...] = ()
    why: str = ""

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def role(self) -> Role:
        return "draft" if self.model.draft_of else "target"

    @property
    def label(self) -> str:
        """Unique name in a plan: the model's, plus the replica's number unless it is the first."""
        return self.name if not self.replica else f"{self.name}.{self.replica}"

    def to_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "replica": self.replica,
            "role": self.role,
            "drafts_for": [list(target) for target in self.drafts_for],
            "cores": [self.cores.first, self.cores.last],
            "tp_degree": len(self.cores),
            "bytes": self.footprint.total,
            "weight_bytes": self.footprint.weights,
            "cache_bytes": self.footprint.cache,
            "scratch_bytes": self.footprint.scratch,
            "cpus": list(self.affinity),
            "timeout": EXECUTION_TIMEOUT_S,
            "why": self.why,
            "env": dict(self.env),
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements on one instance, in the order of their cores."""

    instance: Instance
    placements: tuple[Placement, ...]

    @property
    def fragmentation(self) -> Fragmentation:
        return fragmentation(self.instance, [item.cores for item in self.placements])

    def to_dict(self) -> dict[str, object]:
        left = self.fragmentation
        return {
            "instance": self.instance.name,
            "sdk": self.instance.sdk,
            "placements": [item.to_dict() for item in self.placements],
            "free": {"cores": left.free, "runs": [list(run) for run in left.runs], "stranded": left.stranded},
        }


_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_FREE = "."
_DEVICES_A_LINE = 4


def marks(plan: Plan) -> dict[str, str]:
    """Return one letter for each placement's label; letters repeat after 52."""
    return {item.label: _MARKS[index % len(_MARKS)] for index, item in enumerate(plan.placements)}


def render_plan(plan: Plan) -> str:
    """Draw devices as boxes of cores, four in a line, then the label of each letter."""
    instance, letters = plan.instance, marks(plan)
    owner = [_FREE] * instance.cores
    for item in plan.placements:
        for core in item.cores.cores:
            owner[core] = letters[item.label]
    each = instance.cores_per_device
    boxes = []
    for device in range(instance.devices):
        cores = owner[device * each : (device + 1) * each]
        boxes.append(f"{device * each:>3} [{' '.join(cores)}]")
    lines = [" ".join(boxes[at : at + _DEVICES_A_LINE]) for at in range(0, len(boxes), _DEVICES_A_LINE)]
    shape = f"{instance.name}: {instance.devices} devices of {each} cores"
    named = [f"{letters[item.label]}  {item.label}, cores {item.cores}" for item in plan.placements]
    return "\n".join([shape, *lines, "", *named])
