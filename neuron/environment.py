"""Environment variables of a process that decodes on Neuron or XLA; others are in `paceline.decoder.environment`.

PACELINE_NEURON_PROMPTS  "plain": prompts are never attended to by the SDK's kernel; default "kernel"

Written if not set yet, before torch_xla is imported:

    PJRT_DEVICE     CPU, the only device on which Paceline uses torch_xla

Neuron's variables that are read:

    NEURON_PLATFORM_TARGET_OVERRIDE  chip to compile for, on a machine without one
    NEURON_LOGICAL_NC_CONFIG         physical cores of a logical core
    TORCH_NEURONX_COMPILE_ONLY       graphs are compiled and not run, which backend='neuron-native' rejects

Written for Neuron if not set yet, before its SDK is imported:

    NEURON_RT_EXEC_TIMEOUT            seconds an execution may take; the documents name three defaults
    NEURON_RT_STOCHASTIC_ROUNDING_EN  0: the same tokens every time
    NEURON_COMPILE_CACHE_URL          the compiler's own cache, below PACELINE_CACHE

Written for backend='neuron-native' if not set yet, before a graph is compiled (PyTorch itself imports
TorchNeuron, which reads them when it is used):

    TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION   1: a graph that fails is an error, and never runs on the CPU
    TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY  1: a tensor that was left on the CPU is an error, and never copied
    NEURON_RT_STOCHASTIC_ROUNDING_EN           as above

Written for it if a model is sharded over cores, with one process per core, as `torchrun` does:

    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT
    NEURON_RT_VISIBLE_CORES  the rank's own core of the process's range; TorchNeuron sets it to LOCAL_RANK only if it is
                             unset, and refuses a process with more than one core (its distributed/backend.py)
    PACELINE_RANK_CORES      the range that rank 0 had
"""

from __future__ import annotations

import os
import sys

from paceline.core.errors import BackendError, ConfigurationError
from paceline.decoder.environment import cache_root

_ON = ("1", "true", "yes", "on")


def default_pjrt_device() -> None:
    """Set torch_xla's device, unless the user did: otherwise torch_xla searches for a TPU."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")


def neuron_target() -> str:
    """Return the chip that the user names, or ""."""
    return os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "")


def neuron_logical_cores() -> int | None:
    """Return the user's number of physical cores per logical core, if set.

    Raises:
        ConfigurationError: it is not a number.
    """
    cores = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
    if not cores:
        return None
    if not cores.isdigit():
        raise ConfigurationError(f"NEURON_LOGICAL_NC_CONFIG: expected 1 or 2, got {cores!r}; correct or unset it")
    return int(cores)


def neuron_prompt_kernel() -> bool:
    """Return whether the SDK's kernel computes attention over prompts, if it has one.

    Raises:
        ConfigurationError: the variable has an unknown value.
    """
    prompts = os.environ.get("PACELINE_NEURON_PROMPTS") or "kernel"
    if prompts not in ("kernel", "plain"):
        raise ConfigurationError(
            f"PACELINE_NEURON_PROMPTS: expected kernel or plain, got {prompts!r}; correct or unset it"
        )
    return prompts == "kernel"


def neuron_defaults() -> None:
    """Set the variables that the Neuron runtime reads once, at import.

    Raises:
        BackendError: it was already imported, with a variable unset.
    """
    defaults = {
        "NEURON_RT_EXEC_TIMEOUT": "60",
        "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0",
        "NEURON_COMPILE_CACHE_URL": str(cache_root() / "neuron" / "compiler"),
    }
    missing = {name: value for name, value in defaults.items() if name not in os.environ}
    if missing and "torch_neuronx" in sys.modules:
        raise BackendError(
            f"torch_neuronx was imported before {', '.join(missing)} could be set; load the decoder first, or set "
            "them in the environment of the process"
        )
    os.environ.update(missing)


def neuron_native_defaults() -> None:
    """Set the variables that TorchNeuron reads when it is used."""
    for name, value in (
        ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0"),
        ("TORCH_NEURONX_DISABLE_FALLBACK_EXECUTION", "1"),
        ("TORCH_NEURONX_DYNAMO_DISABLE_CPU_AUTOCOPY", "1"),
    ):
        os.environ.setdefault(name, value)


def neuron_native_compile_only() -> bool:
    """Return whether TorchNeuron is set to compile graphs and to run none."""
    return os.environ.get("TORCH_NEURONX_COMPILE_ONLY", "0").lower() in _ON


_CORES = "NEURON_RT_VISIBLE_CORES"
_RANGE = "PACELINE_RANK_CORES"


def rank_variables(rank: int, degree: int, port: int) -> dict[str, str]:
    """Return the variables that `torchrun` sets in a process of this machine's ranks, which meet at a port of the
    loopback. Of a range of cores that this process was given, the rank gets its own one.

    Raises:
        ConfigurationError: the range has fewer cores, or is not a range.
    """
    given = os.environ.get(_RANGE) or os.environ.get(_CORES, "")
    cores = _numbers(given)
    if cores and len(cores) < degree:
        raise ConfigurationError(
            f"{_CORES}: expected {degree} cores for tp_degree={degree}, got {given!r}; give the process as many, or "
            "unset it"
        )
    own = {_CORES: str(cores[rank]), _RANGE: given} if cores else {}
    return {
        **own,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(degree),
        "LOCAL_WORLD_SIZE": str(degree),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _numbers(cores: str) -> list[int]:
    """Return the cores of a list of numbers and ranges, as "0-3" or "4,5"."""
    found: list[int] = []
    try:
        for part in cores.split(",") if cores else ():
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    except ValueError as error:
        raise ConfigurationError(f"{_CORES}: expected cores such as 0-3, got {cores!r}; correct or unset it") from error
    return found


def is_rank() -> bool:
    """Return whether this process is or was rank 0 of sharded models."""
    return "LOCAL_RANK" in os.environ


def become_rank(variables: dict[str, str]) -> None:
    """Set `rank_variables` in this process.

    Raises:
        ConfigurationError: `torchrun`, or a similar launcher, has made this process one of its ranks.
    """
    for name in ("RANK", "WORLD_SIZE"):
        if os.environ.get(name, variables[name]) != variables[name]:
            raise ConfigurationError(
                f"tp_degree: this process is already rank {os.environ.get('RANK')} of "
                f"{os.environ.get('WORLD_SIZE')}, started by torchrun or for another sharded model; load this model "
                "in a separate process, without torchrun, since it starts its other ranks itself"
            )
    os.environ.update(variables)
