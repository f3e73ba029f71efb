"""The group of ranks that one process stands for while it traces."""

from __future__ import annotations

import threading

import torch

DEGREE: list[int] = []
"""Of the group under trace; empty outside of one."""


def get_tensor_model_parallel_size() -> int:
    assert DEGREE, "intra_layer_model parallel group is not initialized"
    return DEGREE[-1]


class Meeting:
    """Ranks as threads, which exchange tensors in a collective."""

    def __init__(self, degree: int) -> None:
        self._barrier, self._given = threading.Barrier(degree, timeout=60), [torch.empty(0)] * degree

    def exchange(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = x
        self._barrier.wait()
        every = list(self._given)
        self._barrier.wait()
        return every

    def abort(self) -> None:
        self._barrier.abort()
