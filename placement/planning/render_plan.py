"""A plan as text: the chip with each model's cores. Layout only; colours and tables belong to the command line."""

from __future__ import annotations

from paceline.placement.planning.plan import Plan

_MARKS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_FREE = "."
_DEVICES_A_LINE = 4


def marks(plan: Plan) -> dict[str, str]:
    """One letter for each placement's label; letters start again after 52."""
    return {item.label: _MARKS[index % len(_MARKS)] for index, item in enumerate(plan.placements)}


def render_plan(plan: Plan) -> str:
    """Devices as boxes of cores, four in a line, then what each letter stands for."""
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
