"""No compiler: steps run eagerly, on plain PyTorch operations. For tests, debugging and comparison.

`RankedBackend` is for backends of a sharded model whose ranks are processes: every step runs on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from paceline.decoder.backends.base import Backend, Graph, Step
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.parallel.ranks import EAGER, eager_step, shared


class EagerBackend(Backend):
    name = "eager"

    def __init__(self) -> None:
        self.kernels: Kernels = TorchKernels()

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        return eager_step(graph)


class RankedBackend(Backend):
    """`EagerBackend` on several ranks, for one decoder. ``kind``: class of the members."""

    name = "eager"
    kind = EAGER

    def __init__(self, degree: int) -> None:
        self.ranks, self._number = shared(degree, self.kind), 0
        self.kernels: Kernels = self.ranks.member.kernels
        self.group = self.ranks.member.group

    def attach(self, body: nn.Module, path: str) -> None:
        assert isinstance(body, ModelWithCache)
        self._number = self.ranks.adopt(body, path, config=body.config, options=body.options)

    def divide(self, first: nn.Module, others: Sequence[nn.Module]) -> None:
        self.ranks.divide(self._number, first, others)

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        step = self.ranks.member.compile(graph)
        number = self.ranks.make(self._number, graph)

        def run(*inputs: Tensor) -> list[Tensor]:
            return self.ranks.run(number, step, inputs)

        return run

    def close(self) -> None:
        self.ranks.release(self._number)
