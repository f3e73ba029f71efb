"""Instance types: devices, logical cores, memory, and the tensor-parallel degrees the runtime accepts.

Figures are from the Neuron SDK's hardware pages (release 2.32). Not here: which models go where (`planner`), and what
the machine at hand really has (`detect`).

A *core* is what the runtime numbers: a logical NeuronCore (on Trn2 two physical ones, "LNC 2").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from paceline.core.errors import PlanError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Instance:
    """One machine.

    cores_per_device  logical cores of a device (chip)
    memory            bytes of device memory a core can plan with
    bandwidth         bytes per second a core reads from that memory
    vcpus             of the host; host_memory in bytes
    degrees           tensor-parallel degrees, ascending; each divides the next, so that aligned runs nest
    links             how the devices are connected: "ring", "torus" or "none"
    sdk               last line of the Neuron SDK whose ModelBuilder drives this family; "" = no Neuron hardware
    logical           physical cores in a logical one (NEURON_LOGICAL_NC_CONFIG); 0 = the family does not know it
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

    @property
    def cores(self) -> int:
        """Logical cores in all."""
        return self.devices * self.cores_per_device

    def starts(self, degree: int) -> range:
        """First cores a run of ``degree`` may begin at: multiples of itself.

        Trn2 requires this (a misaligned slice loads and then fails in its first collective); on Inf2 and Trn1, where
        no document says so, it is a rule of caution that also keeps a run on connected devices.
        """
        return range(0, self.cores - degree + 1, degree)


def _inf2(name: str, devices: int, vcpus: int, *, host: int, degrees: tuple[int, ...]) -> Instance:
    return Instance(name, devices, 2, 16 * GIB, 410 * GIB, vcpus, host * GIB, degrees, "ring", "2.28")


def _trn1(name: str, devices: int, vcpus: int, *, host: int, degrees: tuple[int, ...]) -> Instance:
    return Instance(name, devices, 2, 16 * GIB, 410 * GIB, vcpus, host * GIB, degrees, "torus", "2.28")


def _trn2(name: str, devices: int, vcpus: int, *, host: int, degrees: tuple[int, ...]) -> Instance:
    return Instance(name, devices, 4, 24 * GIB, 725 * 10**9, vcpus, host * GIB, degrees, "torus", "2.31", 2)


_ALL = (
    _inf2("inf2.xlarge", 1, 4, host=16, degrees=(1, 2)),
    _inf2("inf2.8xlarge", 1, 32, host=128, degrees=(1, 2)),
    _inf2("inf2.24xlarge", 6, 96, host=384, degrees=(1, 2, 4, 8)),
    _inf2("inf2.48xlarge", 12, 192, host=768, degrees=(1, 2, 4, 8, 24)),
    _trn1("trn1.2xlarge", 1, 8, host=32, degrees=(1, 2)),
    _trn1("trn1.32xlarge", 16, 128, host=512, degrees=(1, 2, 8, 16, 32)),
    _trn1("trn1n.32xlarge", 16, 128, host=512, degrees=(1, 2, 8, 16, 32)),
    # Degree 2 is said to fail on the small one, and its vCPUs and host memory are not in the SDK's pages.
    _trn2("trn2.3xlarge", 1, 12, host=128, degrees=(1, 4)),
    _trn2("trn2.48xlarge", 16, 192, host=2048, degrees=(1, 2, 4, 8, 16, 32, 64)),
    _trn2("trn2u.48xlarge", 16, 192, host=2048, degrees=(1, 2, 4, 8, 16, 32, 64)),
    # No accelerator: eight "cores" that are processes on the host, to plan and to simulate with.
    Instance("cpu", 8, 1, 2 * GIB, 10 * GIB, 8, 16 * GIB, (1,), "none", ""),
)

INSTANCES: Mapping[str, Instance] = MappingProxyType({item.name: item for item in _ALL})


def instance(name: str) -> Instance:
    """The instance type of that name.

    Raises:
        PlanError: there is no such type.
    """
    if name not in INSTANCES:
        raise PlanError(f"instance {name!r} is unknown; use one of {', '.join(INSTANCES)}")
    return INSTANCES[name]
