"""Neuron chip and SDK of this machine, and their compatibility: decided by a table, never by a successful import.

The SDK is not imported: versions are read from the installed packages' metadata. The table is in
`paceline.neuron.chips`.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import ClassVar

from paceline.core.errors import BackendError
from paceline.neuron import environment
from paceline.neuron.chips import CAPABILITIES, Capability, Chip, chip_of
from paceline.neuron.prompt_attention import PromptAttention

PACKAGES = {
    "neuronx-cc": "neuronxcc",
    "torch-neuronx": "torch_neuronx",
    "neuronx-distributed": "neuronx_distributed",
    "libneuronxla": "libneuronxla",
}
"""Packages of the SDK and the module that each of them installs; the compiler's has a different name."""

log = logging.getLogger("paceline")

_BOARD = Path("/sys/devices/virtual/dmi/id/product_name")
_SDK_OF_COMPILER = 5  # SDK 2.28 ships compiler 2.23, 2.29 ships 2.24, 2.32 ships 2.27, 2.33 ships 2.28

_OVERLAP = "--tensorizer-options='--enable-ccop-compute-overlap --cc-pipeline-tiling-factor=1 --vectorize-strided-dma'"
_E4M3 = "--internal-hlo2tensorizer-options=--experimental-unsafe-fp8e4m3fn-as-fp8e4m3"
"""Without it the compiler rejects PyTorch's e4m3 for every chip of `Chip` (its error NCC_EVRF051). It reinterprets the
bytes as the chip's own e4m3. That is unsafe only above `E4M3_LARGEST`, which `check_formats` rejects.
"""

SETUP = (
    "set up the Neuron SDK on this machine: install the driver and tools, then torch-neuronx, neuronx-cc and "
    "neuronx_distributed from the AWS Neuron package index (its address is in the SDK's installation guide; what the "
    "public index has under these names are placeholders); docs/neuron.md has the commands"
)


class Stack:
    """The software that compiles and runs a backend's graphs.

    versions  of ``packages``, in their order
    place     the machine, for messages, if its instance type is not known
    """

    __slots__ = ()
    backend: ClassVar[str]
    packages: ClassVar[Sequence[str]]
    versions: tuple[str, ...]

    @property
    def place(self) -> str:
        return "this machine"

    @property
    def described(self) -> str:
        """The instance and the packages, for messages."""
        packages = ", ".join(f"{name} {version}" for name, version in zip(self.packages, self.versions, strict=True))
        return f"{instance_family() or self.place} with {packages}"

    def facts(self) -> dict[str, object]:
        """Facts on which a compiled graph depends."""
        return {"backend": self.backend, **dict(zip(self.packages, self.versions, strict=True))}

    def flags(self, *, prompt: bool) -> str:
        """Return the compiler flags of a graph, for prefill (``prompt``) or a round; "" for the compiler's own."""
        return ""


@dataclass(frozen=True, slots=True)
class Sdk(Stack):
    """The SDK of this machine.

    chip      chip for which graphs are compiled
    minor     its line: 28 is SDK 2.28
    logical   physical cores per logical core
    """

    backend = "neuron"
    packages = tuple(PACKAGES)

    chip: Chip
    minor: int
    versions: tuple[str, ...]
    logical: int

    @property
    def place(self) -> str:
        return self.chip.value

    @property
    def capability(self) -> Capability:
        return CAPABILITIES[self.chip]

    def facts(self) -> dict[str, object]:
        return {**Stack.facts(self), "target": self.chip.value, "logical cores": self.logical}

    def flags(self, *, prompt: bool, e4m3: bool = False) -> str:
        """Return the flags; ``e4m3``: whether the graph holds fp8_e4m3.

        Rounds are worth the longer optimisation; prompts are long graphs. Overlap of collectives with matmuls, and the
        split of prompts into modules, follow NxD Inference (its model wrapper, April 2026).
        """
        flags = [f"--target={self.chip.value}", "--model-type=transformer", "--auto-cast=none", _OVERLAP]
        flags += ["-O1", "--modular-flow-mac-threshold=10"] if prompt else ["-O2"]
        if self.capability.logical[1:]:
            flags.append(f"--lnc={self.logical}")
        else:
            flags.append("--enable-saturate-infinity")
        if e4m3:
            flags.append(_E4M3)
        return " ".join(flags)

    def prompts(self) -> PromptAttention:
        """Selection of prompt chunks for the attention kernel on this machine.

        Raises:
            ConfigurationError: the variable that selects it has an unknown value.
        """
        first = self.capability.attention
        if not environment.neuron_prompt_kernel():
            return PromptAttention("PACELINE_NEURON_PROMPTS=plain")
        if first is None or self.minor < first:
            return PromptAttention(f"SDK 2.{self.minor} has no documented kernel for it on {self.chip.value}")
        return PromptAttention(cores=self.logical)

    def check_degree(self, degree: int) -> None:
        """Raise BackendError unless the chip supports this tensor-parallel degree."""
        if degree not in self.capability.degrees + self.capability.seldom:
            degrees = ", ".join(map(str, self.capability.degrees))
            raise BackendError(f"tp_degree: expected {degrees} on {self.chip.value}, got {degree}; use one of them")


Versions = Callable[[str], str]


def find(version: Versions = metadata.version) -> Sdk:
    """Return the chip and the SDK of this machine.

    Raises:
        BackendError: a package is missing or a placeholder, the chip is unknown, or the two are incompatible.
    """
    versions = tuple(_version(name, module, version) for name, module in PACKAGES.items())
    minor = _line(versions[0])
    chip = this_chip()
    able = CAPABILITIES[chip]
    if not versions[1].startswith("2.9."):
        raise BackendError(
            f"torch-neuronx: expected 2.9, the last one over PyTorch/XLA, got {versions[1]}; install the extra "
            "paceline[neuron], or use backend='neuron-native' on Trn2 and Trn3"
        )
    if minor not in able.lines:
        examined = ", ".join(f"2.{line}" for line in able.lines)
        log.warning(
            "neuronx-cc %s belongs to SDK 2.%d; on %s releases %s were examined, and this one may work or not",
            versions[0], minor, chip.value, examined,
        )  # fmt: skip
    logical = environment.neuron_logical_cores() or able.logical[0]
    if logical not in able.logical:
        raise BackendError(f"NEURON_LOGICAL_NC_CONFIG: {logical} is not possible on {chip.value}; unset it")
    return Sdk(chip, minor, versions, logical)


def this_chip() -> Chip:
    """Return the chip for which graphs are compiled: the one named by the environment, or this machine's.

    Raises:
        BackendError: no chip is found, or it is not supported.
    """
    named = environment.neuron_target() or instance_family()
    chip = chip_of(named)
    if chip is not None:
        if "neuron" not in CAPABILITIES[chip].backends:
            raise BackendError(f"{chip.value} is driven by TorchNeuron alone; use backend='neuron-native'")
        return chip
    known = ", ".join(chip.value for chip, able in CAPABILITIES.items() if "neuron" in able.backends)
    raise BackendError(
        "this machine has no Neuron chip"
        + (f" ({named})" if named else "")
        + f"; to compile for one elsewhere, set NEURON_PLATFORM_TARGET_OVERRIDE to one of {known}; otherwise use "
        "backend='native'"
    )


def instance_family() -> str:
    """Return the machine's instance type, as "inf2.48xlarge"; "" if unknown."""
    try:
        return _BOARD.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _version(package: str, module: str, version: Versions) -> str:
    try:
        installed = version(package)
    except metadata.PackageNotFoundError as error:
        raise BackendError(f"backend='neuron' needs {package}, which is not installed; {SETUP}") from error
    # The public index has empty packages of the same names, which reserve the names.
    if (
        importlib.util.find_spec(module) is None
        or not re.match(r"[0-2]\.\d+\.\d", installed)
        or installed.startswith("0.0")
    ):
        raise BackendError(f"{package} {installed} is an empty placeholder; uninstall it and {SETUP}")
    return installed


def _line(compiler: str) -> int:
    match = re.match(r"2\.(\d+)\.", compiler)
    if match is None:
        raise BackendError(f"neuronx-cc {compiler} does not belong to a known SDK; {SETUP}")
    return int(match.group(1)) + _SDK_OF_COMPILER
