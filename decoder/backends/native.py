"""CPU backend: steps are recorded, then replayed on the native kernels. Nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable

from paceline.decoder.backends.base import Backend, Graph, Step
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.native import build
from paceline.decoder.native.ops import Native, use_huge_pages
from paceline.decoder.native.program import Program


class NativeBackend(Backend):
    name = "native"

    def __init__(self) -> None:
        build.build_both()
        self.kernels: Kernels = Native()

    def kv_buckets(self, requested: tuple[int, ...]) -> tuple[int, ...]:
        """One bucket: the attention kernel reads only written rows, so a shorter bucket would save nothing."""
        return requested[-1:]

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        use_huge_pages(parameter.detach() for parameter in graph.module.parameters())
        return Program(graph.module, graph.example)
