"""`paceline doctor`: what of this machine and its Neuron SDK can be seen without running anything on a chip.

Every line is a fact that was looked up, or why it could not be; a machine without Neuron is no failure. What a chip
really computes is `paceline selftest`.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch

from paceline.core.errors import PacelineError
from paceline.decoder import environment
from paceline.decoder.native import build
from paceline.neuron import noise_record
from paceline.neuron import sdk as neuron_sdk
from paceline.placement.planning import instances

Level = Literal["good", "note", "bad"]
_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Line:
    """One thing looked at. ``bad`` is what keeps a backend from working that could work here."""

    subject: str
    level: Level
    text: str


def examine() -> list[Line]:
    """All lines, in the order to read them."""
    return [*_machine(), *_cache(), *_chips(), *_sdk()]


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


def _chips() -> Iterator[Line]:
    family = neuron_sdk.instance_family()
    devices = sorted(Path("/dev").glob("neuron[0-9]*"))
    if not devices:
        yield Line("Neuron chips", "note", f"none: no /dev/neuron0{f' on this {family}' if family else ''}")
        return
    shut = [str(device) for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    if shut:
        yield Line(
            "Neuron chips", "bad", f"no permission for {', '.join(shut)}; add yourself to the group that owns them"
        )
    else:
        yield Line("Neuron chips", "good", f"{len(devices)} devices{f' on {family}' if family else ''}")
    try:
        yield Line("driver", "good", noise_record.DRIVER.read_text(encoding="utf-8").strip())
    except OSError as error:
        yield Line("driver", "bad", f"the kernel module neuron is not loaded ({error}); install aws-neuronx-dkms")
    yield from _cores()


def _cores() -> Iterator[Line]:
    program = instances.tool()
    if program is None:
        yield Line("neuron-ls", "bad", f"not found on PATH or at {instances.USUAL_PLACE}; install aws-neuronx-tools")
        return
    try:
        done = subprocess.run([str(program), "-j"], capture_output=True, text=True, timeout=_SECONDS, check=True)
        devices = json.loads(done.stdout)
        cores = sum(int(device["nc_count"]) for device in devices)
        users = {process["pid"] for device in devices for process in device.get("neuron_processes") or []}
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError) as error:
        yield Line("neuron-ls", "bad", f"{program} -j failed ({error})")
        return
    busy = f"; used by processes {', '.join(map(str, sorted(users)))}" if users else "; none in use"
    yield Line("neuron-ls", "note" if users else "good", f"{len(devices)} devices, {cores} cores{busy}")


def _sdk() -> Iterator[Line]:
    installed = []
    for package in neuron_sdk.PACKAGES:
        try:
            installed.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    if not installed:
        yield Line(
            "Neuron SDK",
            "note",
            "not installed, so there is no backend 'neuron'; see docs/neuron.md",
        )
        return
    yield Line("Neuron SDK", "good" if len(installed) == len(neuron_sdk.PACKAGES) else "bad", ", ".join(installed))
    try:
        sdk = neuron_sdk.find()
    except PacelineError as error:
        yield Line("backend 'neuron'", "bad", str(error))
    else:
        degrees = ", ".join(map(str, sdk.capability.degrees))
        text = f"SDK 2.{sdk.minor} for {sdk.chip.value}, logical cores of {sdk.logical}, the runtime takes tp {degrees}"
        yield Line("backend 'neuron'", "good", text)
        refusal = noise_record.refusal(sdk)
        level: Level = "good" if refusal is None else "note"
        yield Line("sampling on 'neuron'", level, refusal or "the check of the noise has passed here")
