"""No compiler: steps run as they are written, on plain PyTorch operations. For tests, debugging and comparison.

`RankedBackend` is for backends of a divided model whose ranks are processes: every step runs on all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.decoder.backends.base import Graph, LocalBackend, Step
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.parallel.ranks import EAGER, shared


class EagerBackend(LocalBackend):
    """Runs steps directly."""

    name = "eager"

    def __init__(self) -> None:
        self.kernels: Kernels = TorchKernels()

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        def run(*inputs: Tensor) -> list[Tensor]:
            with torch.no_grad():  # not inference_mode: the host writes into commits
                return list(graph.module(*inputs))

        return run


class RankedBackend(LocalBackend):
    """As `EagerBackend`, on several ranks, for one decoder. ``kind``: of their `paceline.decoder.parallel.ranks`."""

    name = "eager"
    kind = EAGER

    def __init__(self, degree: int) -> None:
        self.ranks, self._number = shared(degree, self.kind), 0
        self.kernels: Kernels = self.ranks.member.kernels
        self.group = self.ranks.member.group

    def attach(self, body: nn.Module, path: str) -> None:
        """Have the other ranks load their parts of the model."""
        assert isinstance(body, ModelWithCache)
        self._number = self.ranks.adopt(body, path, config=body.config, options=body.options)

    def divide(self, first: nn.Module, others: Sequence[nn.Module]) -> None:
        """See `paceline.decoder.backends.base.Backend`."""
        self.ranks.divide(self._number, first, others)

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        step = self.ranks.member.compile(graph)
        number = self.ranks.make(self._number, graph)

        def run(*inputs: Tensor) -> list[Tensor]:
            return self.ranks.run(number, step, inputs)

        return run

    def close(self) -> None:
        """End the other ranks' part in this decoder, and their processes with the last decoder of this degree."""
        self.ranks.release(self._number)
