"""What one rank of a divided model is made of: how it meets the others, and what runs its steps.

Rank 0 and the processes of the other ranks each make a member of the same kind. Not here: processes and orders
(`paceline.decoder.parallel.ranks`).
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from paceline.decoder.backends.base import Graph, Step
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.parallel.collectives import Collectives, GlooGroup, join, leave

EAGER = "paceline.decoder.parallel.members:EagerMember"


class Member(Protocol):
    """One rank; made with its ``rank``, the ``degree`` and a ``name`` that no other group of ranks has.

    keeps_meeting  whether the folder of the meeting has to stay as long as the group
    """

    keeps_meeting: bool

    def __init__(self, rank: int, degree: int, name: str) -> None: ...

    @property
    def kernels(self) -> Kernels:
        """Those that the rank's steps are made with."""

    @property
    def group(self) -> Collectives:
        """All the ranks; final once they have met."""

    def variables(self, rank: int) -> dict[str, str]:
        """What the process of another rank has to find in its environment. Asked of rank 0."""

    def meet(self, folder: str) -> None:
        """Enter the group that meets in a folder; returns when all have."""

    def leave(self) -> None:
        """Give the group up. A rank that still waits in it fails."""

    def compile(self, graph: Graph) -> Step:
        """What runs a step on this rank."""


class EagerMember:
    """A process of this machine: PyTorch as it is, and gloo."""

    keeps_meeting = False

    def __init__(self, rank: int, degree: int, name: str) -> None:
        self.kernels: Kernels = TorchKernels()
        self.group = GlooGroup(degree, name)
        self._rank = rank
        self._held: object = None

    def variables(self, rank: int) -> dict[str, str]:
        """See `Member`."""
        return {}

    def meet(self, folder: str) -> None:
        """See `Member`."""
        self._held = join(str(Path(folder) / "meeting"), self._rank, self.group)

    def leave(self) -> None:
        """See `Member`."""
        leave(self.group)

    def compile(self, graph: Graph) -> Step:
        """See `Member`."""

        def run(*inputs: Tensor) -> list[Tensor]:
            with torch.no_grad():
                return list(graph.module(*inputs))

        return run


def make_member(path: str, rank: int, degree: int, *, name: str) -> Member:
    """A member of a kind, "module:Class"."""
    module, _, attribute = path.partition(":")
    made: Member = getattr(importlib.import_module(module), attribute)(rank, degree, name)
    return made
