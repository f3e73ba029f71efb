"""Collectives between the ranks of a sharded model, as operations inside a step.

All are functional (PyTorch's traceable collectives), so that a step that calls them runs on processes and lowers to
collectives of a device. Processes are started by `paceline.decoder.parallel.ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

TIMEOUT = timedelta(minutes=10)
"""Time after which a collective fails if another rank does not take part."""


class Collectives(Protocol):
    """Collectives of one group of ranks."""

    @property
    def degree(self) -> int: ...

    def reduce(self, x: Tensor) -> Tensor:
        """Return the sum over all ranks, bitwise identical on each."""

    def gather(self, x: Tensor) -> Tensor:
        """Return x of every rank, in the order of ranks. [...] -> [degree, ...]"""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """One rank: collectives return their input."""

    degree: int = 1

    def reduce(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class GlooGroup:
    """Ranks as processes of one machine, over gloo.

    A sum is a gather and an addition in the order of ranks: gloo's own sum has an order that depends on a number's
    offset in the buffer, so a row's bits would depend on its position in a window.
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
    """Ranks as cores of an accelerator: the sum is the device's own. For traced graphs only."""

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
    """Join the group that meets at the file ``path``, on this machine's loopback; keep what is returned as long as the
    group.
    """
    # The collectives find their group by its name; PyTorch's public call for a group makes it the process's only one.
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
    """Leave a group. A rank that still waits in it fails."""
    distributed: Any = torch._C._distributed_c10d
    distributed._unregister_process_group(group.name)
