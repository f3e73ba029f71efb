"""What is on the device: weights and states of every rank, each brought there once, and the graphs over them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import BackendError
from paceline.decoder.backends.neuron.layout import NEFF, Arrangement

Ranks = list[dict[str, Tensor]]
"""Tensors by their names, for every rank."""


class Resident:
    """One `NxDModel`, to which weights, states and graphs may be added while it is on the device.

    leader  the graph whose layout of weights everything has; None = they lie as they came
    states  names of the states that are there
    keys    of the graphs that are there
    """

    def __init__(self, degree: int, arrangement: Arrangement) -> None:
        self._base: Any = importlib.import_module("neuronx_distributed.trace.nxd_model.base_nxd_model")
        models: Any = importlib.import_module("neuronx_distributed.trace.nxd_model.nxd_model")
        self._parts: Any = importlib.import_module("neuronx_distributed.trace.model_builder_utils")
        self._degree = degree
        self._model: Any = models.NxDModel(world_size=degree, state_initializer=self._zeros({}))
        self._home: Ranks = [{} for _ in range(degree)]  # the host's states whose values are on the device
        self._weights: set[str] = set()
        self.leader = arrangement.leader
        self.keys: set[str] = set()

    @property
    def states(self) -> set[str]:
        return set(self._home[0])

    def add_weights(self, weights: Ranks, arrangement: Arrangement) -> None:
        """Bring those that are not there yet.

        Raises:
            BackendError: the device refuses them.
        """
        new = [{name: x for name, x in rank.items() if name not in self._weights} for rank in weights]
        if not new[0] and self._model.loaded_on_neuron:
            return
        plain = [{name: x for name, x in rank.items() if name not in arrangement.moved} for rank in new]
        try:
            if not self._model.loaded_on_neuron:
                self._model.set_weights(plain)
                self._model.to_neuron()  # without graphs: it makes the states and opens the cores
            elif plain[0]:
                self._update(self._load(plain))
            if arrangement.transformer is not None and (moved := arrangement.moved & set(new[0])):
                # What the model would do by itself with all weights; nothing says how it treats those of other graphs.
                own = [{name: rank[name] for name in rank if name in moved} for rank in new]
                self._update(
                    arrangement.transformer.construct_layout_transformer_object(self._degree).forward(own, False)
                )
        except RuntimeError as error:
            raise BackendError(f"the device does not take {_size(new)}: {error}") from error
        self._weights |= set(new[0])

    def add_states(self, states: Ranks) -> None:
        """Make those that are not there yet, with the values that the host has.

        Raises:
            BackendError: the device has no room for them.
        """
        new = [{name: x for name, x in rank.items() if name not in self.states} for rank in states]
        if not new[0]:
            return
        try:
            for rank, zeros in enumerate(self._zeros(new[0])()):
                self._model.states[rank].update(zeros)
        except RuntimeError as error:
            raise BackendError(f"the device does not take states of {_size(new)}: {error}") from error
        for rank, held in enumerate(new):
            for name, tensor in held.items():
                self._model.write_to_neuron_buffer(tensor, name, rank)
            self._home[rank] |= held

    def add_graph(self, key: str, part: tuple[Any, Path]) -> None:
        """Initialise one graph over the weights and states that are there. Its error leaves the others as they are."""
        traced, folder = part
        try:
            self._model.add(key, traced, self._parts.CompilationArtifacts(str(folder / NEFF)))
            self._model.spmd_models[key].initialize(self._model.states, self._model.weights, self._model.start_rank)
        except Exception:
            self._model.spmd_models.pop(key, None)
            raise
        self.keys.add(key)

    def run(self, key: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Execute one graph."""
        # Graphs are made for inputs in the order of their shape; what an earlier graph gave may have another.
        out = self._model(*(x.contiguous() for x in inputs), model_name=key)
        return [out] if isinstance(out, Tensor) else list(out)

    def read(self, name: str) -> Tensor:
        """Rank 0's state of that name, as it is now."""
        state: Tensor = self._model.read_from_neuron_buffer(name, 0)
        return state

    def unload(self) -> None:
        """Bring the states home, so that nothing of a text is lost."""
        for rank, held in enumerate(self._home):
            for name, tensor in held.items():
                tensor.copy_(self._model.read_from_neuron_buffer(name, rank))

    def _load(self, weights: Ranks) -> Ranks:
        """What `NxDModel.set_weights` does, which refuses once the model is loaded."""
        loaded: Ranks = torch.ops.neuron._parallel_load(weights)
        return loaded

    def _update(self, weights: Ranks) -> None:
        for rank, held in enumerate(weights):
            self._model.weights[rank].update(held)

    def _zeros(self, states: dict[str, Tensor]) -> Any:
        shapes = {name: list(x.shape) for name, x in states.items()}
        return self._base.StateInitializer(shapes, {name: x.dtype for name, x in states.items()}, self._degree)


def _size(ranks: Ranks) -> str:
    most = max(sum(x.numel() * x.element_size() for x in rank.values()) for rank in ranks)
    return f"{len(ranks[0])} tensors of {most / 2**30:.2f} GiB a core"
