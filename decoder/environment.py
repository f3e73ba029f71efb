"""Environment of a decoding process: all variables that are read, all that are written, and its threads.

PACELINE_CACHE  folder of CPU kernels, Neuron's graphs and fetched models; default ~/.cache/paceline
CXX             the C++ compiler; default g++
OMP_NUM_THREADS threads of the CPU kernels; default: the physical cores of the process's affinity

The Hugging Face hub client reads HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN. The cores of a
process are set by its parent (`paceline.placement.host.environment`).
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
    """Return the number of threads for CPU kernels: the physical cores, whose hardware threads share their arithmetic,
    if ``usual``, OpenMP's number, is that of all hardware threads and OMP_NUM_THREADS does not set it.
    """
    if usual != cores() or "OMP_NUM_THREADS" in os.environ or not hasattr(os, "sched_getaffinity"):
        return usual
    siblings = (topology / f"cpu{one}" / "topology" / "thread_siblings_list" for one in os.sched_getaffinity(0))
    try:
        return len({path.read_text() for path in siblings})
    except OSError:
        return usual


def threads_are_set(num_threads: int) -> bool:
    """Return whether this process has called `torch.set_num_threads` with that number: then a new thread has it,
    whatever it asks of OpenMP itself (seen in PyTorch 2.13).
    """
    import torch

    def in_thread() -> int:
        ctypes.CDLL(None).omp_set_num_threads(1)
        return torch.get_num_threads()

    with suppress(AttributeError), ThreadPoolExecutor(1) as pool:  # no OpenMP
        return num_threads > 1 and pool.submit(in_thread).result() == num_threads
    return False


def with_variables(variables: dict[str, str]) -> dict[str, str]:
    """Return this process's environment with these variables added, for another process."""
    return {**os.environ, **variables}
