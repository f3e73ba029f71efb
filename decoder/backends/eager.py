"""No compiler: steps run as they are written, on plain PyTorch operations. For tests, debugging and comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import ArtefactError
from paceline.decoder.backends.base import Graph, OneRank, OnHost, Step
from paceline.decoder.kernels.torch_kernels import Kernels, TorchKernels


class EagerBackend(OneRank, OnHost):
    """Runs steps directly; there is nothing to save."""

    name = "eager"

    def __init__(self) -> None:
        self.kernels: Kernels = TorchKernels()

    def kv_buckets(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return wanted

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        def run(*inputs: Tensor) -> list[Tensor]:
            with torch.no_grad():  # not inference_mode: the host writes into commits
                return list(graph.module(*inputs))

        return run

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        raise ArtefactError("backend='eager' compiles nothing, so there is nothing to save; use 'inductor'")

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        raise ArtefactError("backend='eager' compiles nothing, so there is nothing to load; use 'inductor'")
