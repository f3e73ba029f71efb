"""The eager backend of a divided model: every step runs on all ranks, which are processes of this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor

from paceline.core.errors import ArtefactError
from paceline.decoder.backends.base import Graph, OnHost, Step
from paceline.decoder.decoder import CompiledDecoder
from paceline.decoder.kernels.torch_kernels import Kernels, TorchKernels
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.ranks import shared


class RankedBackend(OnHost):
    """As `EagerBackend`, on several ranks, for one decoder."""

    name = "eager"

    def __init__(self, degree: int) -> None:
        self.ranks, self._number = shared(degree), 0
        self.kernels: Kernels = TorchKernels()
        self.group: Collectives = self.ranks.group

    def attach(self, decoder: CompiledDecoder, path: str) -> None:
        """Have the other ranks load their parts of the decoder's model."""
        self._number = self.ranks.adopt(decoder.body, path, config=decoder.config, options=decoder.options)

    def kv_buckets(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return wanted

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        number = self.ranks.make(self._number, graph.name, graph.module)

        def run(*inputs: Tensor) -> list[Tensor]:
            return self.ranks.run(number, graph.module, inputs)

        return run

    def close(self) -> None:
        """End the other ranks' part in this decoder, and their processes with the last decoder of this degree."""
        self.ranks.release(self._number)

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        raise ArtefactError("backend='eager' compiles nothing, so there is nothing to save")

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        raise ArtefactError("backend='eager' compiles nothing, so there is nothing to load")
