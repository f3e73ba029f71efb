"""Facts about this machine's Neuron chips and SDK, found without running anything on a chip, for `paceline doctor`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

from paceline.core.errors import PacelineError
from paceline.neuron import noise_record, sdk
from paceline.neuron.chips import ENDS
from paceline.placement.planning import instances

ToolStatus = Literal["ok", "note", "FAILED"]
Seen = tuple[str, ToolStatus, str]
"""A name, a status, and the finding, as `paceline.checks.findings.Finding` has them."""


def examine() -> list[Seen]:
    """Return all findings, in reading order."""
    return [*_chips(), *_sdk()]


def _chips() -> Iterator[Seen]:
    family = sdk.instance_family()
    devices = sorted(Path("/dev").glob("neuron[0-9]*"))
    if not devices:
        yield ("Neuron chips", "note", f"none: no /dev/neuron0{f' on this {family}' if family else ''}")
        return
    shut = [str(device) for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    if shut:
        yield (
            "Neuron chips",
            "FAILED",
            f"no permission for {', '.join(shut)}; add yourself to the group that owns them",
        )
    else:
        yield ("Neuron chips", "ok", f"{len(devices)} devices{f' on {family}' if family else ''}")
    try:
        yield ("driver", "ok", noise_record.DRIVER.read_text(encoding="utf-8").strip())
    except OSError as error:
        yield ("driver", "FAILED", f"the kernel module neuron is not loaded ({error}); install aws-neuronx-dkms")
    yield from _cores()


def _cores() -> Iterator[Seen]:
    try:
        text = instances.neuron_ls()
        if text is None:
            yield ("neuron-ls", "FAILED", f"not found on PATH or at {instances.USUAL_PLACE}; install aws-neuronx-tools")
            return
        devices = json.loads(text)
        cores = sum(int(device["nc_count"]) for device in devices)
        users = {process["pid"] for device in devices for process in device.get("neuron_processes") or []}
    except (PacelineError, ValueError, KeyError, TypeError) as error:
        yield ("neuron-ls", "FAILED", f"neuron-ls -j failed ({error})")
        return
    busy = f"; used by processes {', '.join(map(str, sorted(users)))}" if users else "; none in use"
    yield ("neuron-ls", "note" if users else "ok", f"{len(devices)} devices, {cores} cores{busy}")


def _sdk() -> Iterator[Seen]:
    installed = []
    for package in sdk.PACKAGES:
        try:
            installed.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    if not installed:
        yield (
            "Neuron SDK",
            "note",
            "not installed, so there is no backend 'neuron'; see docs/neuron.md",
        )
        return
    yield ("Neuron SDK", "ok" if len(installed) == len(sdk.PACKAGES) else "FAILED", ", ".join(installed))
    try:
        found = sdk.find()
    except PacelineError as error:
        yield ("backend 'neuron'", "FAILED", str(error))
    else:
        degrees = ", ".join(map(str, found.capability.degrees))
        seen = f"SDK 2.{found.minor} for {found.chip.value}, logical cores of {found.logical}"
        yield ("backend 'neuron'", "ok", f"{seen}, the runtime takes tp {degrees}")
        if "neuron-native" in found.capability.backends:
            yield ("support of 'neuron'", "note", ENDS)
        refusal = noise_record.refusal(found)
        status: ToolStatus = "ok" if refusal is None else "note"
        yield ("sampling on 'neuron'", status, refusal or "the check of the noise has passed here")
