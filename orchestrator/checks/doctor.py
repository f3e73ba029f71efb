"""`paceline doctor`: facts about this machine and its Neuron SDK, without running anything on a chip.

Every line is a fact, or why it could not be found; a machine without Neuron is not a failure. `paceline selftest`
checks what a chip computes.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib import metadata

import torch

from paceline.checks.findings import Finding
from paceline.core.errors import PacelineError
from paceline.decoder import environment
from paceline.decoder.native import build


def examine() -> list[Finding]:
    """Return all findings, in reading order. Whatever prevents a possible backend from running has failed."""
    from paceline.neuron import machine

    return [*_machine(), *_cache(), *(Finding(*one) for one in machine.examine())]


def _machine() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} CPUs"
    yield Finding("machine", "ok", system)
    yield Finding("torch", "ok", torch.__version__)
    try:
        yield Finding("native", "ok", build.origin())
    except PacelineError as error:
        yield Finding("native", "FAILED", str(error))
    try:
        yield Finding("xla", "ok", f"torch_xla {metadata.version('torch-xla')}")
    except metadata.PackageNotFoundError:
        yield Finding("xla", "note", "torch_xla is not installed: backend 'xla' needs an environment of its own")


def _cache() -> Iterator[Finding]:
    try:
        root = environment.cache_root()
    except PacelineError as error:
        yield Finding("cache", "FAILED", str(error))
        return
    above = next(folder for folder in (root, *root.parents) if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        yield Finding("cache", "FAILED", f"{root} cannot be written; set PACELINE_CACHE to a folder of yours")
        return
    free = shutil.disk_usage(above).free / 2**30
    built = sum(1 for _ in root.glob("*/*/manifest.json"))
    yield Finding("cache", "ok" if free > 5 else "note", f"{root}: {built} kernels and graphs, {free:.0f} GiB free")
