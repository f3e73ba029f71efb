"""Collectives of the tensor-parallel group, recorded as operations; `NxDModel` executes them between its ranks."""

from __future__ import annotations

from neuronx_distributed.parallel_layers import parallel_state
from torch_neuronx.graphs import OPERATIONS


def reduce_from_tensor_model_parallel_region(input_, process_group=None):
    parallel_state.get_tensor_model_parallel_size()
    if not input_.is_floating_point():
        raise RuntimeError("NCC_EVRF061: all-reduce of integers")
    return OPERATIONS.reduce(input_)


def gather_from_tensor_model_parallel_region(input_, process_group=None):
    return OPERATIONS.gather(input_, parallel_state.get_tensor_model_parallel_size())
