"""No compiler: steps run as they are written, on plain PyTorch operations. For tests, debugging and comparison."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from paceline.decoder.backends.base import Graph, LocalBackend, Step
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.kernels.torch_kernels import TorchKernels


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
