"""A fake for torch_neuronx: the runtime's cores, and what crossed between host and device.

The environment is read once, here, as the real runtime reads it when it is initialised.
"""

from __future__ import annotations

import fcntl
import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch

__version__ = "2.9.0.2.12.0"
LEGAL_DEGREES = {"inf2": (1, 2, 4, 8, 24), "trn1": (1, 2, 8, 16, 32), "trn2": (1, 2, 4, 8, 16, 32, 64)}
"""Of each chip, from the feature guide of NxD Inference."""
CORE_MEMORY = 16 * 2**30
"""Bytes of a core of Inferentia2 and Trainium1: 32 GiB a chip of two cores."""


def visible_cores(text: str) -> list[int]:
    """``NEURON_RT_VISIBLE_CORES``: numbers and ranges, which must be contiguous and ascending."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    if found != list(range(found[0], found[0] + len(found))):
        raise RuntimeError("Neuron cores are not contiguous")
    return found


@dataclass
class Runtime:
    """State of one process."""

    cores: list[int] = field(default_factory=lambda: visible_cores(os.environ.get("NEURON_RT_VISIBLE_CORES", "0-23")))
    chip: str = field(default_factory=lambda: os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE", "inf2"))
    timeout: str | None = field(default_factory=lambda: os.environ.get("NEURON_RT_EXEC_TIMEOUT"))
    rounding: str | None = field(default_factory=lambda: os.environ.get("NEURON_RT_STOCHASTIC_ROUNDING_EN"))
    locks: list[int] = field(default_factory=list)
    calls: list[tuple[str, int, int]] = field(default_factory=list)  # graph, bytes in, bytes out
    fetched: list[tuple[str, int]] = field(default_factory=list)  # states that were read by the host: name, bytes
    compiled: list[str] = field(default_factory=list)  # flags of each compilation
    loads: list[tuple[str, int]] = field(default_factory=list)  # what went to the device: kind, bytes of all ranks
    capacity: int = CORE_MEMORY  # bytes of a core
    meeting: threading.Barrier | None = None  # compilations wait here for each other
    refused: set[str] = field(default_factory=set)  # keys of graphs that it refuses to load
    used: dict[int, int] = field(default_factory=dict)  # bytes by core

    def hold(self, kind: str, ranks: list[dict[str, torch.Tensor]]) -> None:
        """Room for tensors of every rank, for as long as they live."""
        sizes = [sum(x.numel() * x.element_size() for x in rank.values()) for rank in ranks]
        for core, size in enumerate(sizes):
            if self.used.get(core, 0) + size > self.capacity:
                raise RuntimeError(f"nrt_tensor_allocate status=4 message=Allocation Failure on nc{core}: {size} bytes")
        if sum(sizes):
            self.loads.append((kind, sum(sizes)))
        for core, rank in enumerate(ranks):
            for x in rank.values():
                size = x.numel() * x.element_size()
                self.used[core] = self.used.get(core, 0) + size
                weakref.finalize(x, self._give_back, core, size)

    def compile(self, flags: str) -> None:
        """Note a compilation. It lasts until as many run as a test waits for."""
        if self.meeting is not None:
            self.meeting.wait()
        self.compiled.append(flags)

    def load_graph(self, key: str, neff: bytes) -> None:
        """A graph, which a test may have the device refuse."""
        if key in self.refused:
            raise RuntimeError(f"nrt_load status=1 message=Failed to load the model {key}")
        self.loads.append((key, len(neff)))

    def _give_back(self, core: int, size: int) -> None:
        self.used[core] -= size

    def reserve(self, degree: int) -> None:
        """Take the process's cores 0 to degree - 1, as long as the process lives."""
        if degree not in LEGAL_DEGREES[self.chip]:
            raise RuntimeError(f"nrt_load_collectives Unsupported topology: {degree}")
        if degree > len(self.cores):
            raise RuntimeError("Could not open the nd1")
        for core in self.cores[len(self.locks) : degree]:
            place = Path(os.environ["NEURON_DOUBLE_CORES"]) / f"core{core}"
            descriptor = os.open(place, os.O_CREAT | os.O_RDWR)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(descriptor)
                wanted = f"nc{core}-nc{core}"
                raise RuntimeError(f"NeuronCore(s) not available - Requested:{wanted} Available:0") from error
            self.locks.append(descriptor)

    def close(self) -> None:
        """Reset, as by the end of the process."""
        for descriptor in self.locks:
            os.close(descriptor)
        self.locks.clear()


RUNTIME = Runtime()


def _parallel_load(sharded: list[dict[str, torch.Tensor]]) -> list[dict[str, torch.Tensor]]:
    made = [{name: x.clone() for name, x in rank.items()} for rank in sharded]
    RUNTIME.hold("weights", made)
    return made


torch.ops.neuron._parallel_load = _parallel_load
