"""Which instance this machine is, by asking `neuron-ls`, or the system where there is none. Nothing is reserved."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.core.errors import PlanError
from paceline.placement.planning.instances import INSTANCES, Instance, instance

USUAL_PLACE = Path("/opt/aws/neuron/bin/neuron-ls")  # where the tools package puts it, often not on PATH
_TIMEOUT = 30.0


@dataclass(frozen=True, slots=True)
class Devices:
    """What `neuron-ls -j` says: devices, logical cores of each, bytes of memory of each."""

    count: int
    cores_each: int
    memory_each: int
    logical: int


def tool() -> Path | None:
    """Where `neuron-ls` is, if anywhere."""
    command = shutil.which("neuron-ls")
    if command:
        return Path(command)
    return USUAL_PLACE if USUAL_PLACE.is_file() else None


def parse(text: str) -> Devices:
    """Read the JSON array that `neuron-ls -j` prints, one object for each device.

    Raises:
        PlanError: it is not what the tool documents, or the devices differ.
    """
    try:
        rows = [
            (
                len(row.get("neuroncore_ids") or range(int(row["nc_count"]))),
                int(row["memory_size"]),
                int(row.get("logical_neuroncore_config") or 0),
            )
            for row in json.loads(text)
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PlanError(f"neuron-ls -j was not understood ({error}); name the machine with --instance") from error
    if not rows or len(set(rows)) != 1:
        raise PlanError(f"neuron-ls lists {len(rows)} devices that are not alike; name the machine with --instance")
    cores, memory, logical = rows[0]
    return Devices(len(rows), cores, memory, logical)


def matching(devices: Devices) -> Instance:
    """The instance type with these devices, with the memory that they really have.

    Types that differ only in the host (inf2.xlarge and inf2.8xlarge, trn1 and trn1n) are distinguished by --instance;
    here the smallest host is assumed.

    Raises:
        PlanError: no type has so many devices and cores.
    """
    fits = [
        item
        for item in INSTANCES.values()
        if item.sdk and (item.devices, item.cores_per_device) == (devices.count, devices.cores_each)
    ]
    fits = [item for item in fits if (item.logical > 1) == (devices.logical > 1)] or fits
    if not fits:
        raise PlanError(
            f"no known instance type has {devices.count} devices of {devices.cores_each} cores; "
            "name the nearest with --instance"
        )
    smallest = min(fits, key=lambda item: item.vcpus)
    return replace(smallest, memory=min(smallest.memory, devices.memory_each // devices.cores_each))


def detect() -> Instance | None:
    """This machine's instance; None where there is no `neuron-ls`.

    Raises:
        PlanError: the tool failed, or its output was not understood.
    """
    command = tool()
    if command is None:
        return None
    try:
        done = subprocess.run(
            [str(command), "-j"], capture_output=True, text=True, check=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise PlanError(f"{command} -j failed ({error}); name the machine with --instance") from error
    return matching(parse(done.stdout))


def host_cpus() -> Instance:
    """This machine without an accelerator: a core for each CPU that this process may use, which share its memory."""
    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(
        INSTANCES["cpu"], devices=cpus, cores_per_device=1, memory=memory // cpus, vcpus=cpus, host_memory=memory
    )


def this_machine() -> Instance:
    """What `neuron-ls` finds; else the CPUs of this machine.

    Raises:
        PlanError: `neuron-ls` failed, or its output was not understood.
    """
    return detect() or host_cpus()


def instance_named(name: str | None) -> Instance:
    """The instance type of that name; ``cpu`` and None are this machine.

    Raises:
        PlanError: there is no such type.
    """
    if name is None:
        return this_machine()
    return host_cpus() if name == "cpu" else instance(name)
