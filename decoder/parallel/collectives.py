"""What ranks of a divided model tell each other, as operations inside a step.

All are functional (PyTorch's traceable collectives), so that a step that calls them runs on processes and lowers to
collectives of a device. Not here: starting processes (`paceline.decoder.parallel.ranks`), and what is divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

TIMEOUT = timedelta(minutes=10)
"""After which a collective whose other side does not come has failed."""


class Collectives(Protocol):
    """Of one group of ranks."""

    @property
    def degree(self) -> int: ...

    def reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each."""

    def gather(self, x: Tensor) -> Tensor:
        """x of every rank, in the order of ranks. [...] -> [degree, ...]"""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """One rank: nobody to talk to."""

    degree: int = 1

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class GlooGroup:
    """Ranks that are processes of a machine, over gloo.

    A sum is a gather and an addition in the order of ranks: gloo's own sums in an order that depends on where in the
    buffer a number lies, and then a row's bits would depend on its place in a window.
    """

    degree: int
    name: str

    def reduce(self, x: Tensor) -> Tensor:
        every = self.gather(x)
        total = every[0]
        for one in every[1:]:
            total = total + one
        return total

    def gather(self, x: Tensor) -> Tensor:
        return _gathered(x, self.degree, self.name)


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Ranks that are cores of an accelerator: the sum is the device's own. For traced graphs only."""

    degree: int
    name: str = "paceline"

    def reduce(self, x: Tensor) -> Tensor:
        ops = torch.ops._c10d_functional
        summed: Tensor = ops.wait_tensor(ops.all_reduce(x, "sum", self.name))
        return summed

    def gather(self, x: Tensor) -> Tensor:
        return _gathered(x, self.degree, self.name)


def _gathered(x: Tensor, degree: int, name: str) -> Tensor:
    ops = torch.ops._c10d_functional
    gathered: Tensor = ops.wait_tensor(ops.all_gather_into_tensor(x.contiguous().unsqueeze(0), degree, name))
    return gathered


def join(path: str, rank: int, group: GlooGroup) -> object:
    """Enter the group that meets at the file ``path``; returns when all ranks have, what keeps the group alive.

    Sockets are on this machine's loopback, which needs no name service and no open port.
    """
    # The collectives find their group by its name; PyTorch's public way to a group makes it the process's only one.
    distributed: Any = torch._C._distributed_c10d
    store = distributed.FileStore(path, group.degree)
    options = distributed.ProcessGroupGloo._Options()
    options._devices = [distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    process_group = distributed.ProcessGroup(store, rank, group.degree)
    gloo = distributed.ProcessGroupGloo(store, rank, group.degree, options)
    kind = distributed.ProcessGroup.BackendType.GLOO
    process_group._set_default_backend(kind)
    process_group._register_backend(torch.device("cpu"), kind, gloo)
    process_group._set_group_name(group.name)
    distributed._register_process_group(group.name, process_group)
    return process_group


def leave(group: GlooGroup) -> None:
    """Give a group up. A rank that still waits in it fails."""
    distributed: Any = torch._C._distributed_c10d
    distributed._unregister_process_group(group.name)
