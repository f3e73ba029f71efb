"""Record that the noise check has passed on this machine: without it, sampling requests are rejected on Neuron.

The noise is made of integers (`paceline.core.noise`). If a device computes them differently, sequences are sampled from
a wrong distribution although every logit is right, and no other test detects it. So `paceline selftest` compares them
bitwise, and stores a record in the cache folder, under a hash of everything on which the outcome may depend.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from paceline.decoder import environment
from paceline.decoder.compile import cache
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.neuron import sdk as neuron_sdk
from paceline.neuron.sdk import Stack

DRIVER = Path("/sys/module/neuron/version")
_RUNTIME = Path("/opt/aws/neuron/lib/libnrt.so.1")  # path of the package aws-neuronx-runtime-lib
_REMEDY = "make room, or set PACELINE_CACHE to a folder of yours"


def passed(sdk: Stack) -> bool:
    """Return whether the check has passed with this instance type, driver, runtime, SDK and version of Paceline."""
    return cache.find(_root(), facts(sdk)) is not None


def refusal(sdk: Stack) -> str | None:
    """Return why sampling requests are rejected, with a remedy; None if the check has passed."""
    if passed(sdk):
        return None
    return (
        f"sampling (do_sample, a temperature above 0) is refused on backend={sdk.backend!r} until the check of the "
        f"noise has passed on {sdk.described} and this version of Paceline: run `paceline selftest --backend "
        f"{sdk.backend}` there, with the same PACELINE_CACHE, and load the model again; or decode greedily"
    )


def write(sdk: Stack, *, outcome: bool) -> None:
    """Store the outcome of a check: a record if it has passed, none if it has not.

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
    """A `paceline.decoder.backends.base.Backend` on this ``stack``, whose noise must be checked on each machine."""

    stack: Stack

    def sampling_refusal(self) -> str | None:
        return refusal(self.stack)

    def record_noise_check(self, *, passed: bool) -> bool:
        write(self.stack, outcome=passed)
        return True


def facts(sdk: Stack) -> dict[str, object]:
    """Facts that invalidate a recorded noise check: driver, runtime, SDK, compiler flags."""
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
    """Return the first line of a file; "" if it does not exist, as on a machine that only compiles."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _library(path: Path) -> str:
    """Return the name of the shared library that a link points to, and its size; "" if it does not exist."""
    try:
        return f"{path.resolve().name} {path.stat().st_size}"
    except OSError:
        return ""
