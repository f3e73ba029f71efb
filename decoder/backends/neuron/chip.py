"""This process's part of the accelerator: every graph of its decoders over one set of weights and states.

Graphs are made first, in parallel where several are asked for at once, and weights go to the device once. A graph that
comes later is initialised alone, beside the others. One that fails is dropped, and the others stay usable. Written
against the source of neuronx_distributed (`NxDModel`, April 2026): `add` and `SPMDModel.initialize` are what its
`to_neuron` does for each graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.core.errors import BackendError, ConfigurationError
from paceline.decoder import environment
from paceline.decoder.backends.base import Graph
from paceline.decoder.backends.neuron import ranks as neuron_ranks
from paceline.decoder.backends.neuron import sdk as neuron_sdk
from paceline.decoder.backends.neuron.layout import NEFF, Arrangement, Compiler, Entry, compilers
from paceline.decoder.backends.neuron.stateful import MAX_INPUTS, Stateful, input_names
from paceline.decoder.compile.lowering import Lowered, constants_of, state_of
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.ranks import parts_of

TILE = 128


def tiled(tensor: Tensor) -> Tensor:
    """A cache [slots, G, R, D] as [slots, G, 128, R / 128, D], over the same numbers in the same order; anything else,
    and a cache whose rows are no multiple of 128, as it is.

    A hint for the compiler, which NxD Inference gives it where writes into a cache follow each other in one graph
    (`kv_cache_tiling`, release 2.29). Whether it helps here, only a chip can tell.
    """
    if tensor.dim() != 4 or tensor.shape[2] % TILE or tensor.shape[2] == TILE:
        return tensor
    return tensor.view(*tensor.shape[:2], TILE, -1, tensor.shape[3])


class Names:
    """From tensors of the host to the names they have on the device. ``tiles``: whether states are `tiled` there.

    The SDK shares by name, and two steps may reach one tensor by two paths, or two tensors by the same one. A
    tensor gets one name for as long as the process lives.
    """

    def __init__(self, *, tiles: bool = False) -> None:
        self._tiles = tiles
        self._names = WeakTensorKeyDictionary()
        self._changed: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}
        self._bodies: list[str] = []  # what each model that was registered is called
        self._parts = WeakTensorKeyDictionary()  # from rank 0's tensors to those of the other ranks, in order

    def register(self, body: nn.Module, called: str) -> None:
        """Name a model's tensors by where they are in it, whichever graph is traced first, in whichever process.

        A second model of that ``called`` has its number in the names.
        """
        number = self._bodies.count(called)
        self._bodies.append(called)
        for path, tensor in (*body.named_parameters(), *body.named_buffers()):
            if tensor not in self._names:
                self._names[tensor] = f"m{called}_{number}_{path.replace('.', '_')}"

    def of(self, module: nn.Module, lowered: Lowered) -> dict[str, tuple[str, Tensor]]:
        """For every state of a lowered step: its name on the device, and the tensor."""
        constants = constants_of(lowered)
        named: dict[str, tuple[str, Tensor]] = {}
        for inner, tensor in state_of(module, lowered).items():
            if inner in constants:
                tensor = self._same(tensor)
            if tensor not in self._names:
                self._names[tensor] = f"t{len(self._names)}"
            name: str = self._names[tensor]
            named[inner] = (name, tensor)
            here, elsewhere = self._changed, self._fixed
            if inner not in lowered.changed:
                here, elsewhere = elsewhere, here
            # To the SDK a tensor that a graph only reads is a weight, and a weight is no state of another graph.
            assert name not in elsewhere, f"{inner} is changed by one graph and only read by another"
            here[name] = tensor
        return named

    def find(self, tensor: Tensor) -> str:
        """The name of a tensor that some graph has; nothing if none has it."""
        name: str = self._names.get(tensor, "")
        return name

    def divide(self, first: nn.Module, others: Sequence[nn.Module]) -> None:
        """Know what the other ranks have in the place of rank 0's weights and states: modules of the same names."""
        for tensor, parts in parts_of(first, others):
            self._parts[tensor] = parts

    def states(self, ranks: int = 1) -> list[dict[str, Tensor]]:
        """Tensors that some graph changes, by name, for every rank. What is not divided, each rank has a copy of."""
        for tensor in self._changed.values():
            if tensor not in self._parts:
                self._parts[tensor] = [tensor.clone() for _ in range(1, ranks)]
        return [
            {name: self.laid(self._of(tensor, rank)) for name, tensor in self._changed.items()} for rank in range(ranks)
        ]

    def weights(self, ranks: int = 1) -> list[dict[str, Tensor]]:
        """Tensors that no graph changes, by name, for every rank. What is not divided, all ranks share."""
        return [{name: self._of(x, rank).detach() for name, x in self._fixed.items()} for rank in range(ranks)]

    def laid(self, state: Tensor) -> Tensor:
        """A state of the host in its shape on the device, over the same numbers."""
        return tiled(state) if self._tiles else state

    def _of(self, tensor: Tensor, rank: int) -> Tensor:
        if not rank or tensor not in self._parts:
            return tensor
        part: Tensor = self._parts[tensor][rank - 1]
        return part

    def _same(self, constant: Tensor) -> Tensor:
        """A constant of tracing that is already known, if there is one: each trace makes its own copy."""
        for known in self._fixed.values():
            if known in self._parts:
                continue  # the other ranks have something else in its place
            if known.shape == constant.shape and known.dtype == constant.dtype and bool((known == constant).all()):
                return known
        return constant


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


class Chip:
    """One `NxDModel` of every graph, on the process's cores from 0 on."""

    def __init__(self) -> None:
        self.sdk = neuron_sdk.find()
        environment.neuron_defaults()
        try:
            importlib.import_module("torch_neuronx")
            self._functions: Any = importlib.import_module("neuronx_distributed.trace.functions")
            self._compiler = Compiler(layout=environment.neuron_layout(), logical=self.sdk.logical)
        except ImportError as error:
            raise BackendError(f"the Neuron SDK cannot be imported ({error}); {neuron_sdk.SETUP}") from error
        self.names = Names(tiles=environment.neuron_tiled_caches())
        self.graphs: dict[str, Entry] = {}  # that are compiled, and loaded unless nothing is
        self.failed: dict[str, BackendError] = {}
        self.resident: Resident | None = None
        self._made = 0
        self._pool: ThreadPoolExecutor | None = None  # while graphs are prepared
        self._waiting: dict[Future[object], str] = {}
        self.degree = 0  # of every decoder here; 0 = there is none yet
        self.ranks: Collectives | None = None

    def claim(self, degree: int) -> None:
        """Use so many cores.

        Raises:
            BackendError: the chip does not take this degree.
            ConfigurationError: a decoder of this process uses another number of cores.
        """
        self.sdk.check_degree(degree)
        if self.degree not in (0, degree):
            raise ConfigurationError(
                f"a decoder of this process has tp_degree={self.degree}, and all its graphs run on the same cores; "
                f"load this one with tp_degree={self.degree} too, or in another process"
            )
        if degree > 1 and not self.degree:
            self.ranks = neuron_ranks.Cores(degree)
        self.degree = degree

    def trace(self, module: Stateful, graph: Graph) -> Any:
        """The SDK's traced form of a step."""
        if len(graph.example) > MAX_INPUTS:
            raise BackendError(f"{graph.name} has {len(graph.example)} inputs; a graph takes {MAX_INPUTS}")
        inputs = dict(zip(input_names(), graph.example, strict=False))
        try:
            with torch.no_grad(), neuron_ranks.tracing(self.degree):
                return self._functions.trace(module, args=None, kwargs=inputs, spmd=True, preserve_parameters=True)
        except Exception as error:
            raise BackendError(f"tracing {graph.name} for Neuron failed: {error}") from error

    @property
    def preparing(self) -> bool:
        """Whether graphs are being made ahead of their first use, and none is run."""
        return self._pool is not None

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Graphs that are added inside are compiled in parallel, and all together are loaded at the end.

        Raises:
            BackendError: some do not compile or load. The others are there all the same.
        """
        if self._pool is not None:  # another decoder's preparation, around this one
            yield
            return
        before = set(self.failed)
        with ThreadPoolExecutor(compilers()) as pool:
            self._pool = pool
            try:
                yield
                self._wait()
            finally:
                self._pool = None
                self._waiting.clear()
                pool.shutdown(cancel_futures=True)
        if self.graphs:
            self._load()
        if new := [str(error) for key, error in self.failed.items() if key not in before]:
            raise BackendError(
                f"{len(new)} of {len(new) + len(self.graphs)} graphs cannot be used; the others are ready. "
                + "; ".join(new)
            )

    def add(self, entry: Entry) -> str:
        """Take a graph in, compiled; it is loaded at its first call, or at the end of `prepare`. -> its key

        Where a graph chooses the layout of the weights, compiling has to wait until then.

        Raises:
            BackendError: the compiler refuses it. While graphs are prepared, `prepare` says so at its end.
        """
        key, self._made = f"g{self._made}", self._made + 1
        if self._pool is not None and not self._compiler.layout:
            self._waiting[self._pool.submit(self._compiler.plain, entry)] = key
        elif not self._compiler.layout:
            self._compiler.plain(entry)
        self.graphs[key] = entry
        return key

    def run(self, key: str, *inputs: Tensor) -> list[Tensor]:
        """Execute one graph. Inputs and outputs are the host's.

        Raises:
            BackendError: this graph, or the weights of all, did not go to the device.
        """
        if self.resident is None or (key in self.graphs and key not in self.resident.keys):
            self._load()
        if key in self.failed:
            raise self.failed[key]
        assert self.resident is not None
        return self.resident.run(key, inputs)

    def value(self, state: Tensor) -> Tensor:
        """What rank 0's state is now; it is here, or on the device."""
        name = self.names.find(state)
        if self.resident is None or name not in self.resident.states:
            return state.clone()
        return self.resident.read(name).reshape(state.shape)

    def _wait(self) -> None:
        """For the compilers, telling who asked for a graph when it is there; what fails is dropped."""
        total = len(self._waiting)
        for done, future in enumerate(as_completed(self._waiting), start=1):
            key = self._waiting[future]
            error = future.exception()
            if isinstance(error, BackendError):
                self.graphs[key].announce(f"{done} of {total} graphs done; the compiler refused {self.graphs[key].key}")
                self._drop(key, error)
            elif error is not None:
                raise error
            else:
                self.graphs[key].announce(f"{done} of {total} graphs done: {self.graphs[key].key}")

    def _load(self) -> None:
        """Bring what is not on the device there; everything again only if weights are to lie otherwise."""
        arrangement = self._compiler.arrange(self.graphs)
        for key, error in arrangement.failed.items():
            self._drop(key, error)
        if self.resident is not None and self.resident.leader != arrangement.leader:
            self.resident.unload()
            self.resident = None
        if self.resident is None:
            self.resident = Resident(self.degree, arrangement)
        self._bring(self.resident, arrangement)

    def _bring(self, resident: Resident, arrangement: Arrangement) -> None:
        resident.add_weights(self.names.weights(self.degree), arrangement)
        resident.add_states(self.names.states(self.degree))
        for key, part in arrangement.parts.items():
            if key not in resident.keys:
                try:
                    resident.add_graph(key, part)
                except Exception as error:
                    refused = BackendError(f"{self.graphs[key].key} is compiled, and the device refuses it: {error}")
                    refused.__cause__ = error
                    self._drop(key, refused)

    def _drop(self, key: str, error: BackendError) -> None:
        self.graphs.pop(key)
        self.failed[key] = error


@lru_cache(maxsize=1)
def chip() -> Chip:
    """The one of this process: its cores and its runtime cannot be given back before it ends.

    Raises:
        BackendError: the SDK is missing or does not fit the chip.
    """
    return Chip()
