"""The record that the check of the noise has passed here: without one, requests that sample are refused on Neuron.

The noise is made of integers (`paceline.core.noise`). Where a device computes them otherwise than it should, texts are
drawn from a wrong distribution although every logit is right, and nothing else shows it. So `paceline selftest`
compares them bit by bit, and leaves a record in the cache folder, below a hash of everything the outcome may depend
on. Not here: the check itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

import torch

from paceline.decoder import environment
from paceline.decoder.compile import cache
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.neuron import sdk as neuron_sdk

DRIVER = Path("/sys/module/neuron/version")
_RUNTIME = Path("/opt/aws/neuron/lib/libnrt.so.1")  # where aws-neuronx-runtime-lib has it
_REMEDY = "make room, or set PACELINE_CACHE to a folder of yours"


class Stack(Protocol):
    """The software that graphs are compiled with and run by."""

    @property
    def backend(self) -> str:
        """Name of the backend."""

    @property
    def described(self) -> str:
        """The chip and the packages, for people."""

    def facts(self) -> dict[str, object]:
        """What a compiled graph depends on."""

    def flags(self, *, prompt: bool) -> str:
        """Compiler flags of a graph."""


def passed(sdk: Stack) -> bool:
    """Whether the check has passed with this instance type, driver, runtime, SDK and version of Paceline."""
    return cache.find(_root(), facts(sdk)) is not None


def refusal(sdk: Stack) -> str | None:
    """Why requests that sample are refused, with what to do; None where the check has passed."""
    if passed(sdk):
        return None
    return (
        f"sampling (do_sample, a temperature above 0) is refused on backend={sdk.backend!r} until the check of the "
        f"noise has passed on {sdk.described} and this version of Paceline: run `paceline selftest --backend "
        f"{sdk.backend}` there, with the same PACELINE_CACHE, and load the model again; or decode greedily"
    )


def write(sdk: Stack, *, outcome: bool) -> None:
    """Keep the outcome of a check: a record where it has passed, none where it has not.

    Raises:
        StorageError: the cache folder cannot be written.
    """
    if outcome:
        cache.ensure(_root(), facts(sdk), lambda _folder: None)
        return
    folder = _root() / cache.key(facts(sdk))
    if folder.exists():
        with atomic_write(folder, _REMEDY):
            shutil.rmtree(folder)


class ChecksNoise:
    """As `paceline.decoder.backends.base.ChecksNoise`, for a backend on this ``stack``."""

    stack: Stack

    def sampling_refusal(self) -> str | None:
        return refusal(self.stack)

    def record_noise_check(self, *, passed: bool) -> None:
        write(self.stack, outcome=passed)


def facts(sdk: Stack) -> dict[str, object]:
    """What the outcome of the check may depend on."""
    return {
        "noise check": "passed",
        "instance": neuron_sdk.instance_family(),
        "driver": _first_line(DRIVER),
        "runtime": _library(_RUNTIME),
        "flags": sdk.flags(prompt=False),
        "source": cache.source_hash(),
        "torch": torch.__version__,
        **sdk.facts(),
    }


def _root() -> Path:
    return environment.cache_root() / "neuron" / "noise"


def _first_line(path: Path) -> str:
    """Nothing where there is no such file, as on a machine that only compiles."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _library(path: Path) -> str:
    """Version of a shared library, by the name of the file behind the link and its size; nothing if it is not there."""
    try:
        return f"{path.resolve().name} {path.stat().st_size}"
    except OSError:
        return ""
