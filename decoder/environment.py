"""The only place that reads and writes environment variables.

PACELINE_CACHE  folder of compiled artefacts; default ~/.cache/paceline
CXX             the C++ compiler; default g++

Written where it is not set yet, before torch_xla is imported:

    PJRT_DEVICE     CPU, the only device that torch_xla is used on here

Written only while a graph is compiled:

    TORCHINDUCTOR_CACHE_DIR  Inductor's scratch folder, put below PACELINE_CACHE
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_root() -> Path:
    """Folder of compiled artefacts. What lies in it is loaded as code: keep it writable by its owner alone."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")


def compiler() -> str:
    """The C++ compiler."""
    return os.environ.get("CXX") or "g++"


def default_pjrt_device() -> None:
    """Name torch_xla's device, unless the user did: without it, torch_xla looks for a TPU."""
    os.environ.setdefault("PJRT_DEVICE", "CPU")


@contextmanager
def inductor_scratch() -> Iterator[None]:
    """Keep Inductor's scratch files beside our artefacts, where our lock protects them from other processes."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    os.environ[name] = str(cache_root() / "scratch")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
