"""This process's part of the accelerator: every graph of its decoders over one set of weights and states.

Graphs are made first, in parallel where several are asked for at once, and weights go to the device once. A graph that
comes later is initialised alone, beside the others. One that fails is dropped, and the others stay usable. Written
against the source of neuronx_distributed (`NxDModel`, April 2026): `add` and `SPMDModel.initialize` are what its
`to_neuron` does for each graph.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import BackendError, ConfigurationError
from paceline.decoder import environment
from paceline.decoder.backends.base import Graph
from paceline.decoder.backends.neuron import ranks as neuron_ranks
from paceline.decoder.backends.neuron import sdk as neuron_sdk
from paceline.decoder.backends.neuron.layout import Arrangement, Compiler, Entry, compilers
from paceline.decoder.backends.neuron.resident import Resident
from paceline.decoder.backends.neuron.state import Names
from paceline.decoder.backends.neuron.stateful import MAX_INPUTS, Stateful, input_names
from paceline.decoder.parallel.collectives import Collectives


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
