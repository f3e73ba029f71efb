"""`torch.classes.neuron.SPMDModel`: what runs a compiled graph on the cores, for the real `NxDModel`."""

from __future__ import annotations

from types import SimpleNamespace

import torch

import torch_neuronx
from torch_neuronx.ranks import execute


class SPMDModel:
    def __init__(self, neff: bytes, metaneff: bytes, local_ranks_size: int, world_size: int) -> None:
        from torch_neuronx.xla_impl.trace import MODULES

        assert local_ranks_size == world_size and metaneff
        self._graph, self._neff = MODULES[neff], neff
        self._stores = None

    def initialize(self, states, weights, start_rank) -> None:
        assert start_rank == 0 and self._stores is None
        for rank_states, rank_weights in zip(states, weights, strict=True):
            missing = [name for name in self._graph.weights if name not in rank_states and name not in rank_weights]
            if missing or any(name not in rank_states for name in self._graph.states):
                raise RuntimeError(f"not on the device: {missing or self._graph.states}")
        torch_neuronx.RUNTIME.load_graph(f"graph {len(torch_neuronx.RUNTIME.loads)}", self._neff)
        self._stores = states, weights

    def forward(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        assert self._stores is not None, "initialize() comes first"
        out = execute("a graph", self._graph, *self._stores, inputs)
        size = [sum(x.numel() * x.element_size() for x in part) for part in (inputs, out)]
        torch_neuronx.RUNTIME.calls.append(("a graph", size[0], size[1]))
        return out


torch.classes.neuron = SimpleNamespace(SPMDModel=SPMDModel, LayoutTransformation=None)
