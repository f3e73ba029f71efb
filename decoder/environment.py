"""Environment variables of a decoding process: all that are read, and all that are written.

Variables of workers and their cores are in `paceline.placement.host.environment`, those of Neuron and XLA in
`paceline.neuron.environment`.

PACELINE_CACHE  folder of CPU kernels, Neuron's graphs and fetched models; default ~/.cache/paceline
CXX             the C++ compiler; default g++
OMP_NUM_THREADS threads of the CPU kernels; default: the physical cores of the process's affinity

Read by the Hugging Face hub client if a model is given by its id:

    HF_HOME, HF_HUB_CACHE  folder of models; HF_HUB_OFFLINE: no downloads; HF_ENDPOINT: another hub; HF_TOKEN

The cores of a process are set by its parent (`paceline.placement`), never by this module.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.errors import ConfigurationError


def cache_root() -> Path:
    """Return the folder of CPU kernels, graphs and models. It is loaded as code: only its owner may write to it."""
    try:
        return Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser()
    except RuntimeError as error:
        raise ConfigurationError(
            f"PACELINE_CACHE: expected a folder for the cache, got none ({error}); set it to one"
        ) from error


def compiler() -> str:
    return os.environ.get("CXX") or "g++"


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(usual: int, topology: Path = Path("/sys/devices/system/cpu")) -> int:
    """Return the number of threads for CPU kernels: the physical cores, if ``usual``, OpenMP's number, is that of all
    hardware threads and OMP_NUM_THREADS does not set it. The threads of a core share its arithmetic and its caches.
    """
    if usual != cores() or "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return usual
    siblings = (topology / f"cpu{one}" / "topology" / "thread_siblings_list" for one in os.sched_getaffinity(0))
    try:
        return len({path.read_text() for path in siblings})
    except OSError:
        return usual


def with_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with these variables added, for another process."""
    return {**os.environ, **variables}
