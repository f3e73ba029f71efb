"""Collectives of the tensor-parallel group, recorded as operations; `NxDModel` executes them between its ranks."""

from __future__ import annotations

import torch

from neuronx_distributed.parallel_layers import parallel_state

if not hasattr(torch.ops.neuron_double, "reduce"):

    @torch.library.custom_op("neuron_double::reduce", mutates_args=())
    def reduce(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @torch.library.custom_op("neuron_double::gather", mutates_args=())
    def gather(x: torch.Tensor, degree: int) -> torch.Tensor:
        return torch.cat([x] * degree, -1)


def reduce_from_tensor_model_parallel_region(input_, process_group=None):
    parallel_state.get_tensor_model_parallel_size()
    if not input_.is_floating_point():
        raise RuntimeError("NCC_EVRF061: all-reduce of integers")
    return torch.ops.neuron_double.reduce(input_)


def gather_from_tensor_model_parallel_region(input_, process_group=None):
    return torch.ops.neuron_double.gather(input_, parallel_state.get_tensor_model_parallel_size())
