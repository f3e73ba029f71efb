"""`NxDParallelState`: the group that is traced for. The real one also mocks torch.distributed for as long."""

from __future__ import annotations

from neuronx_distributed.parallel_layers import parallel_state


class NxDParallelState:
    def __init__(
        self, world_size=1, rank=0, tensor_model_parallel_size=1, pipeline_model_parallel_size=1,
        context_parallel_size=1, expert_model_parallel_size=1, lnc_size=None,
    ) -> None:  # fmt: skip
        if (pipeline_model_parallel_size, context_parallel_size, expert_model_parallel_size) != (1, 1, 1):
            raise NotImplementedError("the fake divides tensors only")
        if world_size % tensor_model_parallel_size:
            raise RuntimeError("`world_size` is not divisible by tensor_model_parallel_size")
        self.degree = tensor_model_parallel_size

    def __enter__(self):
        parallel_state.DEGREE.append(self.degree)
        return self

    def __exit__(self, *_error):
        parallel_state.DEGREE.pop()
