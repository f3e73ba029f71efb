"""The environment variables of a process that decodes: all that are read, and all that are written.

Workers and their cores have theirs in `paceline.placement.host.environment`, Neuron and XLA in
`paceline.neuron.environment`.

PACELINE_CACHE  folder of CPU kernels, Neuron's graphs and fetched models; default ~/.cache/paceline
CXX             the C++ compiler; default g++

Read by the client of the Hugging Face hub, whose names they are, where a model is given by its id:

    HF_HOME, HF_HUB_CACHE  where models lie; HF_HUB_OFFLINE: nothing is fetched; HF_ENDPOINT: another hub; HF_TOKEN

Which cores a process sees is set by whoever starts it (`paceline.placement`), never here.
"""

from __future__ import annotations

import os
from pathlib import Path

from paceline.core.errors import ConfigurationError


def cache_root() -> Path:
    """Folder of CPU kernels, compiled graphs and fetched models. It is loaded as code: keep it writable by its owner
    alone.

    Raises:
        ConfigurationError: it is not named, and the user has no home folder (as some in containers).
    """
    try:
        return Path(os.environ.get("PACELINE_CACHE") or "~/.cache/paceline").expanduser()
    except RuntimeError as error:
        raise ConfigurationError(f"no folder for the cache ({error}); set PACELINE_CACHE to one") from error


def compiler() -> str:
    """The C++ compiler."""
    return os.environ.get("CXX") or "g++"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def with_variables(variables: dict[str, str]) -> dict[str, str]:
    """This process's environment with these in it, for another process."""
    return {**os.environ, **variables}
