"""The group of ranks that one process stands for while it traces."""

from __future__ import annotations

DEGREE: list[int] = []
"""Of the group under trace; empty outside of one."""


def get_tensor_model_parallel_size() -> int:
    assert DEGREE, "intra_layer_model parallel group is not initialized"
    return DEGREE[-1]
