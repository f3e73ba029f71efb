"""`paceline doctor`: what of this machine and its Neuron SDK can be seen without running anything on a chip.

Every line is a fact that was looked up, or why it could not be; a machine without Neuron is no failure. What a chip
really computes is `paceline selftest`.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

import torch

from paceline.core.errors import PacelineError
from paceline.decoder import environment
from paceline.decoder.native import build

Level = Literal["good", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Line:
    """One thing looked at. ``bad`` is what keeps a backend from working that could work here."""

    subject: str
    level: Level
    text: str


def examine() -> list[Line]:
    """All lines, in the order to read them."""
    from paceline.neuron import machine

    return [*_machine(), *_cache(), *(Line(*one) for one in machine.examine())]


def healthy(lines: list[Line]) -> bool:
    """Whether nothing is bad."""
    return all(line.level != "bad" for line in lines)


def _machine() -> Iterator[Line]:
    system = f"{platform.system()} {platform.machine()}, Python {platform.python_version()}, {os.cpu_count()} CPUs"
    yield Line("machine", "good", system)
    yield Line("torch", "good", torch.__version__)
    try:
        yield Line("native", "good", build.origin())
    except PacelineError as error:
        yield Line("native", "bad", str(error))
    try:
        yield Line("xla", "good", f"torch_xla {metadata.version('torch-xla')}")
    except metadata.PackageNotFoundError:
        yield Line("xla", "note", "torch_xla is not installed: backend 'xla' needs an environment of its own")


def _cache() -> Iterator[Line]:
    try:
        root = environment.cache_root()
    except PacelineError as error:
        yield Line("cache", "bad", str(error))
        return
    above = next(folder for folder in (root, *root.parents) if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        yield Line("cache", "bad", f"{root} cannot be written; set PACELINE_CACHE to a folder of yours")
        return
    free = shutil.disk_usage(above).free / 2**30
    built = sum(1 for _ in root.glob("*/*/manifest.json"))
    yield Line("cache", "good" if free > 5 else "note", f"{root}: {built} kernels and graphs, {free:.0f} GiB free")
