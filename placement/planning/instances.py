"""Instance types: devices, logical cores, memory, and the tensor-parallel degrees the runtime accepts.

The values of a core are its chip's (`paceline.neuron.chips`). Those of this machine come from `neuron-ls`, or without
it from the system (`detect`). See also: placement of models (`planner`).

A *core* is a core in the runtime's numbering: a logical NeuronCore (on Trn2 two physical ones, "LNC 2").
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from paceline.core.errors import PlanError
from paceline.neuron.chips import CAPABILITIES, MICRO_CODE, Chip

GIB = 1 << 30
CODE_BYTES = int(MICRO_CODE.value)
"""A footprint counts one core's; programs add their own, and all stay resident."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Instance type of a machine.

    cores_per_device  logical cores of a device (chip)
    memory            bytes of device memory per core for planning
    bandwidth         bytes per second that a core reads from that memory
    vcpus             number of the host's vCPUs; host_memory in bytes
    degrees           tensor-parallel degrees, ascending; each divides the next, so that aligned runs nest
    seldom            further ones, which one document names; taken where a model asks for one
    links             how the devices are connected: "ring", "torus", "switch" or "none"
    sdk               last version of the Neuron SDK that was examined for this family; "": no Neuron hardware
    logical           physical cores in a logical one (NEURON_LOGICAL_NC_CONFIG); 0: the family has no such setting
    """

    name: str
    devices: int
    cores_per_device: int
    memory: int
    bandwidth: int
    vcpus: int
    host_memory: int
    degrees: tuple[int, ...]
    links: str
    sdk: str
    logical: int = 0
    seldom: tuple[int, ...] = ()

    @property
    def cores(self) -> int:
        return self.devices * self.cores_per_device

    def starts(self, degree: int) -> range:
        """Return the first cores at which a run of ``degree`` may begin: multiples of itself.

        Trn2 requires this (a misaligned slice loads and then fails in its first collective). For Inf2 and Trn1 no
        document says so; the rule is a precaution that also keeps a run on connected devices.
        """
        return range(0, self.cores - degree + 1, degree)


def _with(chip: Chip, size: str, devices: int, *, vcpus: int, host: int, degrees: tuple[int, ...] = ()) -> Instance:
    """Return a type with ``devices`` chips. ``degrees``: if not all that chip and cores allow."""
    able = CAPABILITIES[chip]
    return Instance(
        name=f"{chip.value}{size}",
        devices=devices,
        cores_per_device=able.cores,
        memory=able.memory - (able.logical[0] - 1) * CODE_BYTES,
        bandwidth=able.bandwidth,
        vcpus=vcpus,
        host_memory=host * GIB,
        degrees=degrees or tuple(degree for degree in able.degrees if degree <= devices * able.cores),
        links={Chip.INF2: "ring", Chip.TRN3: "switch"}.get(chip, "torus"),
        sdk=f"2.{able.lines[-1]}",
        logical=able.logical[0] if len(able.logical) > 1 else 0,
        seldom=tuple(degree for degree in able.seldom if degree <= devices * able.cores),
    )


_ALL = (
    _with(Chip.INF2, ".xlarge", 1, vcpus=4, host=16),
    _with(Chip.INF2, ".8xlarge", 1, vcpus=32, host=128),
    _with(Chip.INF2, ".24xlarge", 6, vcpus=96, host=384),
    _with(Chip.INF2, ".48xlarge", 12, vcpus=192, host=768),
    _with(Chip.TRN1, ".2xlarge", 1, vcpus=8, host=32),
    _with(Chip.TRN1, ".32xlarge", 16, vcpus=128, host=512),
    _with(Chip.TRN1, "n.32xlarge", 16, vcpus=128, host=512),
    # Degree 2 is reported to fail on the small one, whose vCPUs and host memory are not in the SDK's pages.
    _with(Chip.TRN2, ".3xlarge", 1, vcpus=12, host=128, degrees=(1, 4)),
    _with(Chip.TRN2, ".48xlarge", 16, vcpus=192, host=2048),
    _with(Chip.TRN2, "u.48xlarge", 16, vcpus=192, host=2048),
    # One server of an UltraServer (trn3-arch, SDK 2.32); names of EC2's types are not in the SDK's pages.
    _with(Chip.TRN3, ".gen1", 16, vcpus=192, host=2048),
    _with(Chip.TRN3, ".gen2", 4, vcpus=64, host=768),
    # No accelerator: eight "cores" that are processes on the host, for planning and simulation.
    Instance("cpu", 8, 1, 2 * GIB, 10 * GIB, 8, 16 * GIB, (1,), "none", ""),
)

INSTANCES: Mapping[str, Instance] = MappingProxyType({item.name: item for item in _ALL})


def instance(name: str) -> Instance:
    """Return the instance type of that name; raise PlanError if there is none."""
    if name not in INSTANCES:
        raise PlanError(f"instance: expected one of {', '.join(INSTANCES)}, got {name!r}; use one of them")
    return INSTANCES[name]


USUAL_PLACE = Path("/opt/aws/neuron/bin/neuron-ls")  # path in the tools package, often not on PATH
_TIMEOUT = 30.0


def neuron_ls() -> str | None:
    """Return what `neuron-ls -j` prints: a JSON array with an object for each device; None without the tool."""
    command = shutil.which("neuron-ls") or (USUAL_PLACE if USUAL_PLACE.is_file() else None)
    if command is None:
        return None
    try:
        return subprocess.run(
            [command, "-j"], capture_output=True, text=True, check=True, timeout=_TIMEOUT, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise PlanError(f"{command} -j failed ({error}); set --instance") from error


def matching(text: str) -> Instance:
    """Return the instance type with the devices in the output of `neuron-ls -j`, with their actual memory.

    Types that differ only in the host (inf2.xlarge and inf2.8xlarge, trn1 and trn1n) are distinguished by --instance;
    this function assumes the smallest host.

    Raises:
        PlanError: it is not the documented format, the devices differ, or no type has these.
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
        raise PlanError(f"neuron-ls -j: the output could not be parsed ({error}); set --instance") from error
    if not rows or len(set(rows)) != 1:
        raise PlanError(f"instance: expected equal devices from neuron-ls, got {len(rows)} that differ; set --instance")
    cores, memory, logical = rows[0]
    fits = [
        item for item in INSTANCES.values() if item.sdk and (item.devices, item.cores_per_device) == (len(rows), cores)
    ]
    fits = [item for item in fits if (item.logical > 1) == (logical > 1)] or fits
    if not fits:
        raise PlanError(
            f"instance: no known type has {len(rows)} devices of {cores} cores; set --instance to the nearest"
        )
    # Of Trn2 and Trn3, whose servers look alike otherwise, the one with that memory.
    each = memory // cores
    smallest = min(fits, key=lambda item: (abs(item.memory - each), item.vcpus))
    return replace(smallest, memory=min(smallest.memory, each))


def detect() -> Instance | None:
    """Return this machine's instance; None without `neuron-ls`."""
    text = neuron_ls()
    return None if text is None else matching(text)


def host_cpus() -> Instance:
    """Return this machine without an accelerator: one core for each CPU that this process may use; they share its
    memory.
    """
    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return replace(
        INSTANCES["cpu"], devices=cpus, cores_per_device=1, memory=memory // cpus, vcpus=cpus, host_memory=memory
    )


def instance_named(name: str | None) -> Instance:
    """Return the instance type of that name; None is this machine, and ``cpu`` its CPUs."""
    if name is None:
        return detect() or host_cpus()
    return host_cpus() if name == "cpu" else instance(name)
