"""A model divided over the NeuronCores of one process: collectives of the SDK, and the parts of the other cores.

One process drives all cores: it traces a step once, with rank 0's part, and gives every core its own weights and states
under the same names. Not here: names (`paceline.decoder.backends.neuron.chip`), and which degrees a chip takes.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.checkpoint import load_weights


class Cores:
    """What the collectives of a step become while the SDK traces it: its own, for its tensor-parallel group."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._mappings: Any = importlib.import_module("neuronx_distributed.parallel_layers.mappings")

    def reduce(self, x: Tensor) -> Tensor:
        total: Tensor = self._mappings.reduce_from_tensor_model_parallel_region(
            x.clone()
        )  # it writes into its argument
        return total

    def gather(self, x: Tensor) -> Tensor:
        gathered: Tensor = self._mappings.gather_from_tensor_model_parallel_region(x.reshape(-1))
        return gathered.reshape(self.degree, *x.shape)


def tracing(degree: int) -> AbstractContextManager[Any]:
    """The SDK's group of so many ranks, which a single process stands for while it traces."""
    if degree == 1:
        return nullcontext()
    context: Any = importlib.import_module("neuronx_distributed.trace.parallel_context")
    parallel_state: AbstractContextManager[Any] = context.NxDParallelState(
        world_size=degree, tensor_model_parallel_size=degree
    )
    return parallel_state


def others(first: ModelWithCache, path: str) -> list[ModelWithCache]:
    """The bodies of ranks 1 and up, in order; ``first`` is rank 0's. Together they hold every divided tensor once."""
    config, options, bodies = first.config, first.options, []
    for rank in range(1, options.layout.degree):
        weights = load_weights(
            path,
            config,
            options.dtype,
            shard=Shard(config, options.layout, rank),
            quantization=options.load.quantization,
            modules_to_not_convert=options.load.modules_to_not_convert,
        )
        body = ModelWithCache(config, options, weights, kernels=first.kernels, rank=rank, group=first.group)
        bodies.append(body.eval())
    return bodies
