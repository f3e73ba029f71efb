"""A fake for TorchNeuron's compiler and for its process group, in this process and in those of other ranks.

The compiler records the graphs that it is given and runs them; the group is gloo's. Contains no tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd

from paceline.decoder import environment
from paceline.decoder.parallel.collectives import GlooGroup, join, leave
from paceline.neuron.native import NativeMember, Runtime

VERSIONS = ("2.13.3.0", "2.28.7631.0")


class Recorded:
    """The graphs that reached the compiler, after Dynamo and AOTAutograd. Without ``runs`` their results are zeros."""

    def __init__(self, *, runs: bool = True) -> None:
        self.graphs: list[fx.GraphModule] = []
        self._runs = runs
        # TorchNeuron's choice (create_neuron_backend): what is written into an input stays a write into that input.
        self.compiler: Callable[..., Any] = aot_autograd(fw_compiler=self._keep, keep_inference_input_mutations=True)

    def _keep(self, graph: fx.GraphModule, _example: list[Tensor]) -> Callable[..., Any]:
        self.graphs.append(graph)
        call: Callable[..., Any] = graph.forward
        if not self._runs:
            results = [node.meta["val"] for node in graph.graph.output_node().args[0]]  # type: ignore[union-attr]
            call = partial(_zeros, [(x.shape, x.dtype) for x in results])
        run: Callable[..., Any] = make_boxed_func(call)
        return run

    def calls(self) -> list[fx.Node]:
        return [node for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"]


def _zeros(results: list[tuple[torch.Size, torch.dtype]], *_given: Tensor) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape, dtype in results]


class StandInMember(NativeMember):
    """A rank on the CPU, whose process has to have been told its number as TorchNeuron reads it."""

    keeps_meeting = False

    def __init__(self, rank: int, degree: int, name: str) -> None:
        self.recorded = Recorded()
        super().__init__(rank, degree, name)
        assert environment.with_variables({})["LOCAL_RANK"] == str(rank)
        self._gloo, self._held = GlooGroup(degree, name), object()

    def find(self) -> Runtime:
        return Runtime(torch.device("cpu"), self.recorded.compiler, VERSIONS)

    def meet(self, folder: str) -> None:
        self._see_one_core()
        self._held = join(str(Path(folder) / "meeting"), self._rank, self._gloo)

    def _see_one_core(self) -> None:
        """The rule of `_neuron_runtime_setup` (torch_neuronx/distributed/backend.py, 2026-04-21)."""
        variables = environment.with_variables({})
        cores = variables.get("NEURON_RT_VISIBLE_CORES") or variables["LOCAL_RANK"]
        assert cores.isdigit(), f"Attempted to have more than one device per process in distributed setup: {cores}"

    def leave(self) -> None:
        leave(self._gloo)
