"""Models divided over NeuronCores by TorchNeuron: each core is a process, with its part of the weights and the caches.

Every rank makes the same steps, whose sums and gathers are PyTorch's functional collectives (no DTensor), and compiles
them by itself; the group is PyTorch's default one, of TorchNeuron's backend ``neuron``. Written against AWS's guide
"How to use torch.distributed on Neuron" (SDK 2.33, October 2026); it has run with a stand-in for the compiler and
gloo in the place of that backend, never on a chip. Not here: one core (`paceline.decoder.backends.neuron_native`).
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder import environment
from paceline.decoder.backends import neuron_native
from paceline.decoder.backends.base import Graph, Step
from paceline.decoder.backends.neuron import noise_record
from paceline.decoder.backends.neuron.engines import DRAFT_LENGTHS
from paceline.decoder.backends.neuron_native import DEVICE, Runtime
from paceline.decoder.backends.ranked import RankedBackend
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.kernels.traceable import TraceableKernels
from paceline.decoder.parallel.collectives import TIMEOUT, Collectives, DeviceGroup


class NativeMember:
    """A rank on a NeuronCore: the one whose number TorchNeuron finds in LOCAL_RANK. See `Member` for the methods."""

    keeps_meeting = True  # nothing says when the last core has read what the others left there

    def __init__(self, rank: int, degree: int, name: str) -> None:
        self.announce: Callable[[str], None] = _quiet  # on rank 0 the backend's: every rank makes the same graphs
        self.prompts = neuron_native.prompt_form()
        self.kernels: Kernels = TraceableKernels(self.prompts)
        self.group: Collectives = DeviceGroup(degree, name)
        self._rank = rank
        self._port = _free_port() if rank == 0 else 0
        if rank == 0:
            self.claim()
        self.runtime: Runtime = self.find()

    def claim(self) -> None:
        """Make this process rank 0, before TorchNeuron is used in it.

        Raises:
            ConfigurationError: it cannot be, because of another decoder or of who started it.
        """
        if torch.distributed.is_initialized():
            raise ConfigurationError(
                "this process has a group of ranks already: with backend='neuron-native' all divided decoders of a "
                "process have one tp_degree; close the others first, or load this one in another process"
            )
        if neuron_native.runtime.cache_info().currsize and not environment.is_rank():
            raise ConfigurationError(
                "a decoder of this process runs on one core already, and TorchNeuron gives a process one core; load "
                "the divided model first, or in another process"
            )
        environment.become_rank(self.variables(0))

    def find(self) -> Runtime:
        """The device and its compiler."""
        return neuron_native.runtime()

    def variables(self, rank: int) -> dict[str, str]:
        return environment.rank_variables(rank, self.group.degree, self._port)

    def meet(self, folder: str) -> None:
        distributed: Any = torch.distributed
        store = distributed.FileStore(str(Path(folder) / "meeting"), self.group.degree)
        distributed.init_process_group(
            backend=DEVICE, store=store, rank=self._rank, world_size=self.group.degree, timeout=TIMEOUT
        )
        self.group = DeviceGroup(self.group.degree, distributed.group.WORLD.group_name)

    def leave(self) -> None:
        with suppress(AssertionError, RuntimeError, ValueError):  # it was never there, or other ranks are gone
            torch.distributed.destroy_process_group()

    def compile(self, graph: Graph) -> Step:
        return neuron_native.compiled(graph, self.runtime, prompts=self.prompts, announce=self.announce)


class NeuronNativeRanks(RankedBackend):
    """As `NeuronNativeBackend`, on as many cores as the model is divided over; rank 0 is this process."""

    name = "neuron-native"
    kind = "paceline.decoder.backends.neuron_native_ranks:NativeMember"
    device_state = True
    draft_lengths = DRAFT_LENGTHS

    def __init__(self, degree: int) -> None:
        self.rounds_in_graph = environment.neuron_rounds()
        super().__init__(degree)
        member = self.ranks.member
        assert isinstance(member, NativeMember)
        self._member, self._runtime = member, member.runtime

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        announce(f"compiling {graph.name} on {self.group.degree} cores")
        self._member.announce = announce
        return super().compile(graph, announce)

    def read_state(self, state: Tensor) -> Tensor:
        """What rank 0 has in it: states that are read are the same on all ranks."""
        return neuron_native.state_on(self._runtime, state)

    def sampling_refusal(self) -> str | None:
        """See `paceline.decoder.backends.base.ChecksNoise`."""
        return noise_record.refusal(self._runtime)

    def record_noise_check(self, *, passed: bool) -> None:
        """See `paceline.decoder.backends.base.ChecksNoise`."""
        noise_record.write(self._runtime, outcome=passed)


def _quiet(_said: str) -> None:
    """Tells nobody."""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
