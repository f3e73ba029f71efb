"""This process's part of the accelerator: every graph of its decoders over one set of weights and states.

Graphs are compiled first, in parallel if several are requested at once, and weights are copied to the device once. A
later graph is initialised separately. One that fails is dropped, and the others stay usable. Written against the source
of neuronx_distributed (`NxDModel`, April 2026): `add` and `SPMDModel.initialize` are what its `to_neuron` does for each
graph. A lowered step gets the form that the SDK's tracer requires (`Stateful`).

One process drives all cores of a sharded model: it traces a step once, with rank 0's shard, and gives every core its
own weights and states under the same names.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.core import reduce
from paceline.core.errors import BackendError, ConfigurationError
from paceline.decoder.backends.base import Graph
from paceline.decoder.decoder import ModelWithCache, load_rank
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.ranks import parts_of
from paceline.neuron import chips, environment
from paceline.neuron import sdk as neuron_sdk
from paceline.neuron.graph_product import xla_product
from paceline.neuron.lowering import Lowered, constants_of, state_of
from paceline.neuron.prompt_attention import Attention


class Cores:
    """Collectives of a step while the SDK traces it: those of its tensor-parallel group."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._mappings: Any = importlib.import_module("neuronx_distributed.parallel_layers.mappings")

    def reduce(self, x: Tensor) -> Tensor:
        total: Tensor = self._mappings.reduce_from_tensor_model_parallel_region(
            x.clone()
        )  # it writes into its argument
        return total

    def gather(self, x: Tensor) -> Tensor:
        gathered: Tensor = self._mappings.gather_from_tensor_model_parallel_region(x.reshape(-1))
        return gathered.reshape(self.degree, *x.shape)


def tracing(degree: int) -> AbstractContextManager[Any]:
    """Context with the SDK's group of ``degree`` ranks, all in one process, for tracing."""
    if degree == 1:
        return nullcontext()
    context: Any = importlib.import_module("neuronx_distributed.trace.parallel_context")
    parallel_state: AbstractContextManager[Any] = context.NxDParallelState(
        world_size=degree, tensor_model_parallel_size=degree
    )
    return parallel_state


def others(first: ModelWithCache, path: str) -> list[ModelWithCache]:
    """Return the bodies of ranks 1 and up, in order; ``first`` is rank 0's."""
    return [
        load_rank(path, first.config, first.options, kernels=first.kernels, rank=rank, group=first.group)
        for rank in range(1, first.options.layout.degree)
    ]


MAX_INPUTS = 16
_TOPK_MULTIPLE = 8


class Stateful(nn.Module):
    """A lowered step in the tracer's form: it owns weights and states, and replaces states instead of writing.

    Its inputs are named and optional after the first, the same for all graphs: one `NxDModel` holds only graphs of one
    signature. ``tensors`` are the host's, by the names that all graphs of the process share.
    """

    def __init__(
        self,
        lowered: Lowered,
        tensors: dict[str, tuple[str, Tensor]],
        ranks: Collectives | None = None,
        *,
        attention: Attention | None = None,
    ) -> None:
        super().__init__()
        self._lowered, self._ranks, self._attention = lowered, ranks, attention
        self.shared = {inner: name for inner, (name, _) in tensors.items()}
        for inner, (name, tensor) in tensors.items():
            if hasattr(self, name):
                continue
            if inner in lowered.changed or not isinstance(tensor, nn.Parameter):
                self.register_buffer(name, tensor)
            else:
                # A separate parameter over the same numbers: the tracer moves parameters to its device in place.
                self.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))

    def step(self, inputs: list[Tensor | None]) -> tuple[Tensor, ...]:
        """Run the step on its inputs x0, x1, ...; inputs that a graph does not have are None."""
        present = [x for x in inputs if x is not None]
        state = {inner: getattr(self, name) for inner, name in self.shared.items()}
        changed, outputs = self._lowered.run(
            state, present, ranks=self._ranks, topk=device_topk, product=xla_product, attention=self._attention
        )
        for inner, value in changed.items():
            setattr(self, self.shared[inner], value)
        return tuple(outputs)


def input_names() -> list[str]:
    """Return names of a traced graph's inputs, in order."""
    return [f"x{place}" for place in range(MAX_INPUTS)]


def _forward() -> Callable[..., tuple[Tensor, ...]]:
    """Create the method from which the tracer reads the inputs: one parameter each, all but the first optional.

    It is generated because its signature declares the inputs: the tracer rejects ``**inputs``.
    """
    first, *more = input_names()
    parameters = ", ".join([first, *(f"{name}=None" for name in more)])
    namespace: dict[str, Callable[..., tuple[Tensor, ...]]] = {}
    text = f"def forward(self, {parameters}):\n    return self.step([{', '.join([first, *more])}])\n"
    exec(compile(text, "<inputs of a traced graph>", "exec"), namespace)  # uses names from this file only
    return namespace["forward"]


Stateful.forward = _forward()


def device_topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Run the SDK's top-k (custom call AwsNeuronTopK) in place of `paceline.decoder.parallel.vocab_part.topk`.

    It takes rows [n, width] whose width is a multiple of 8; its order among equals is not documented, and Paceline does
    not depend on it.
    """
    operators = importlib.import_module("torch_neuronx.xla_impl.ops")
    width, rows = x.shape[-1], x.reshape(-1, x.shape[-1])
    if missing := -width % _TOPK_MULTIPLE:
        rows = nn.functional.pad(rows, (0, missing), value=2 * reduce.NEGATIVE)
    values, places = operators.TopK.apply(rows, count, dim=1)
    shape = (*x.shape[:-1], count)
    return values.reshape(shape), places.to(torch.int32).clamp(max=width - 1).reshape(shape)


NEFF = "graph.neff"
_MAX_COMPILERS = 8  # each is a process of several GB


@dataclass(frozen=True, slots=True)
class Entry:
    """A traced graph.

    traced    the SDK's record of it
    folder    its folder in the cache; compiled into if absent
    announce  reports progress to the caller
    """

    key: GraphKey
    traced: Any
    flags: str
    folder: Callable[[Callable[[Path], None]], Path]
    announce: Callable[[str], None]


class DeviceNames:
    """Maps tensors of the host to their names on the device.

    The SDK shares by name, and two steps may reach one tensor by two paths, or two tensors by the same one. A
    tensor gets one name for as long as the process lives.
    """

    def __init__(self) -> None:
        self._names = WeakTensorKeyDictionary()
        self._changed: dict[str, Tensor] = {}
        self._fixed: dict[str, Tensor] = {}
        self._bodies: list[str] = []  # names of the registered models
        self._parts = WeakTensorKeyDictionary()  # rank 0's tensors -> those of the other ranks, in order

    def register(self, body: nn.Module, called: str) -> None:
        """Name a model's tensors by their paths in it, independent of the order of traces and of the process.

        A second model of that ``called`` has its number in the names.
        """
        number = self._bodies.count(called)
        self._bodies.append(called)
        for path, tensor in (*body.named_parameters(), *body.named_buffers()):
            if tensor not in self._names:
                self._names[tensor] = f"m{called}_{number}_{path.replace('.', '_')}"

    def of(self, module: nn.Module, lowered: Lowered) -> dict[str, tuple[str, Tensor]]:
        """Return, for every state of a lowered step, its name on the device and the tensor."""
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
            # To the SDK a tensor that a graph only reads is a weight, and a weight is not a state of another graph.
            assert name not in elsewhere, f"{inner} is changed by one graph and only read by another"
            here[name] = tensor
        return named

    def find(self, tensor: Tensor) -> str:
        """Return the name of a tensor that a graph has; "" if none has it."""
        name: str = self._names.get(tensor, "")
        return name

    def divide(self, first: nn.Module, others: Sequence[nn.Module]) -> None:
        """Register the other ranks' tensors in place of rank 0's weights and states: modules of the same names."""
        for tensor, parts in parts_of(first, others):
            self._parts[tensor] = parts

    def states(self, ranks: int = 1) -> list[dict[str, Tensor]]:
        """Return tensors that some graph changes, by name, for every rank; those that are not sharded are copied."""
        for tensor in self._changed.values():
            if tensor not in self._parts:
                self._parts[tensor] = [tensor.clone() for _ in range(1, ranks)]
        return [{name: self._of(tensor, rank) for name, tensor in self._changed.items()} for rank in range(ranks)]

    def weights(self, ranks: int = 1) -> list[dict[str, Tensor]]:
        """Return tensors that no graph changes, by name, for every rank; those that are not sharded are shared."""
        return [{name: self._of(x, rank).detach() for name, x in self._fixed.items()} for rank in range(ranks)]

    def _of(self, tensor: Tensor, rank: int) -> Tensor:
        if not rank or tensor not in self._parts:
            return tensor
        part: Tensor = self._parts[tensor][rank - 1]
        return part

    def _same(self, constant: Tensor) -> Tensor:
        """Return a known constant of tracing with the same values, if any: each trace makes its own copy."""
        for known in self._fixed.values():
            if known in self._parts:
                continue  # the other ranks have another tensor in its place
            if known.shape == constant.shape and known.dtype == constant.dtype and bool((known == constant).all()):
                return known
        return constant


Ranks = list[dict[str, Tensor]]
"""Tensors by their names, for every rank."""


class LoadedGraphs:
    """One `NxDModel`, to which weights, states and graphs may be added while it is on the device.

    states  names of the loaded states
    keys    keys of the loaded graphs
    """

    def __init__(self, degree: int) -> None:
        self._base: Any = importlib.import_module("neuronx_distributed.trace.nxd_model.base_nxd_model")
        models: Any = importlib.import_module("neuronx_distributed.trace.nxd_model.nxd_model")
        self._parts: Any = importlib.import_module("neuronx_distributed.trace.model_builder_utils")
        self._degree = degree
        self._model: Any = models.NxDModel(world_size=degree, state_initializer=self._zeros({}))
        self._weights: set[str] = set()
        self.states: set[str] = set()
        self.keys: set[str] = set()

    def add_weights(self, weights: Ranks) -> None:
        """Copy the weights that are not yet on the device.

        Raises:
            BackendError: the device rejects them.
        """
        new = [{name: x for name, x in rank.items() if name not in self._weights} for rank in weights]
        if not new[0] and self._model.loaded_on_neuron:
            return
        with _room("weights", new):
            if not self._model.loaded_on_neuron:
                self._model.set_weights(new)
                self._model.to_neuron()  # without graphs: it creates the states and opens the cores
            else:  # same as `set_weights`, which fails once the model is loaded
                for rank, held in enumerate(torch.ops.neuron._parallel_load(new)):
                    self._model.weights[rank].update(held)
        self._weights |= set(new[0])

    def add_states(self, states: Ranks) -> None:
        """Create the missing states, with the host's values.

        Raises:
            BackendError: the device memory is too small.
        """
        new = [{name: x for name, x in rank.items() if name not in self.states} for rank in states]
        if not new[0]:
            return
        with _room("states", new):
            for rank, zeros in enumerate(self._zeros(new[0])()):
                self._model.states[rank].update(zeros)
        for rank, held in enumerate(new):
            for name, tensor in held.items():
                self._model.write_to_neuron_buffer(tensor, name, rank)
        self.states |= set(new[0])

    def add_graph(self, key: str, traced: Any, folder: Path) -> None:
        """Initialise one graph over the loaded weights and states. Its error does not affect the others."""
        try:
            self._model.add(key, traced, self._parts.CompilationArtifacts(str(folder / NEFF)))
            self._model.spmd_models[key].initialize(self._model.states, self._model.weights, self._model.start_rank)
        except Exception:
            self._model.spmd_models.pop(key, None)
            raise
        self.keys.add(key)

    def run(self, key: str, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Execute one graph."""
        # Graphs require inputs contiguous in the order of their shape; outputs of an earlier graph may have another
        # order.
        out = self._model(*(x.contiguous() for x in inputs), model_name=key)
        return [out] if isinstance(out, Tensor) else list(out)

    def read(self, name: str) -> Tensor:
        """Return the current value of rank 0's state of that name."""
        state: Tensor = self._model.read_from_neuron_buffer(name, 0)
        return state

    def _zeros(self, states: dict[str, Tensor]) -> Any:
        shapes = {name: list(x.shape) for name, x in states.items()}
        return self._base.StateInitializer(shapes, {name: x.dtype for name, x in states.items()}, self._degree)


@contextmanager
def _room(what: str, ranks: Ranks) -> Iterator[None]:
    """Raise BackendError for the runtime's error if these tensors have no room."""
    try:
        yield
    except RuntimeError as error:
        most = max(sum(x.numel() * x.element_size() for x in rank.values()) for rank in ranks)
        raise BackendError(
            f"the {what} ({len(ranks[0])} tensors of {most / 2**30:.2f} GiB a core) could not be allocated on the "
            f"NeuronCores ({error}); reduce n_positions or batch_size, or raise tp_degree"
        ) from error


class DeviceProcess:
    """One `NxDModel` of every graph, on the process's cores from 0 on."""

    def __init__(self) -> None:
        self.sdk = neuron_sdk.find()
        environment.neuron_defaults()
        try:
            importlib.import_module("torch_neuronx")
            self._functions: Any = importlib.import_module("neuronx_distributed.trace.functions")
        except ImportError as error:
            raise BackendError(f"the Neuron SDK cannot be imported ({error}); {neuron_sdk.SETUP}") from error
        self.names = DeviceNames()
        self.graphs: dict[str, Entry] = {}  # compiled; loaded unless preparation is under way
        self.failed: dict[str, BackendError] = {}
        self.resident: LoadedGraphs | None = None
        self._made = 0
        self._pool: ThreadPoolExecutor | None = None  # exists while graphs are prepared
        self._waiting: dict[str, Entry] = {}
        self.degree = 0  # of every decoder on this chip; 0 = no decoder yet
        self.ranks: Collectives | None = None

    def claim(self, degree: int) -> None:
        """Reserve ``degree`` cores.

        Raises:
            BackendError: the chip does not support this degree.
            ConfigurationError: a decoder of this process uses another number of cores.
        """
        self.sdk.check_degree(degree)
        if self.degree not in (0, degree):
            raise ConfigurationError(
                f"tp_degree: expected {self.degree}, as the other decoder of this process, whose cores it shares, "
                f"got another one; load it with tp_degree={self.degree}, or in another process"
            )
        if degree > 1 and not self.degree:
            self.ranks = Cores(degree)
        self.degree = degree

    def trace(self, module: Stateful, graph: Graph) -> Any:
        """Return the SDK's traced form of a step."""
        if len(graph.example) > MAX_INPUTS:
            raise BackendError(
                f"{graph.name}: expected at most {MAX_INPUTS} inputs, got {len(graph.example)}; use fewer"
            )
        inputs = dict(zip(input_names(), graph.example, strict=False))
        try:
            with torch.no_grad(), tracing(self.degree):
                return self._functions.trace(module, args=None, kwargs=inputs, spmd=True, preserve_parameters=True)
        except Exception as error:
            raise BackendError(
                f"{graph.name}: tracing for Neuron failed ({error}); check that the versions of the SDK fit "
                "(`paceline doctor`)"
            ) from error

    @property
    def preparing(self) -> bool:
        """Whether graphs are being prepared before their first use, and none runs."""
        return self._pool is not None

    @contextmanager
    def prepare(self) -> Iterator[None]:
        """Context in which added graphs are compiled in parallel; all are loaded at its end.

        Raises:
            BackendError: some do not compile or load. The others are usable.
        """
        if self._pool is not None:  # nested in another decoder's preparation
            yield
            return
        before = set(self.failed)
        compilers = min(_MAX_COMPILERS, os.cpu_count() or 1)
        with ThreadPoolExecutor(compilers) as pool:
            self._pool = pool
            try:
                yield
                self._compile_waiting(pool, compilers)
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
        """Add a compiled graph; it is loaded at its first call, or at the end of `prepare`. -> its key

        Raises:
            BackendError: the compiler rejects it. While graphs are prepared, `prepare` raises this at its end.
        """
        key, self._made = f"g{self._made}", self._made + 1
        if self._pool is None:
            self._compiled(entry)
        else:
            self._waiting[key] = entry
        self.graphs[key] = entry
        return key

    def run(self, key: str, *inputs: Tensor) -> list[Tensor]:
        """Execute one graph. Inputs and outputs are the host's.

        Raises:
            BackendError: this graph, or the common weights, could not be loaded.
        """
        if self.resident is None or (key in self.graphs and key not in self.resident.keys):
            self._load()
        if key in self.failed:
            raise self.failed[key]
        assert self.resident is not None
        return self.resident.run(key, inputs)

    def value(self, state: Tensor) -> Tensor:
        """Return the current value of rank 0's state, from the host or the device."""
        name = self.names.find(state)
        if self.resident is None or name not in self.resident.states:
            return state.clone()
        return self.resident.read(name)

    def _compiled(self, entry: Entry) -> Path:
        """Return the folder of a graph in the cache; compile it if absent."""
        return entry.folder(partial(self._compile, entry))

    def _compile(self, entry: Entry, folder: Path) -> None:
        """Compile into a folder of the cache: the SDK caches nothing in this mode."""
        work, traced = folder / "work", entry.traced
        try:
            compiled = self._functions.compile(traced.hlo, traced.metaneff, str(work), entry.flags, "graph")
            shutil.copyfile(compiled.neff_filepath, folder / NEFF)
        except Exception as error:
            raise BackendError(
                f"{entry.key}: neuronx-cc failed with {entry.flags} ({error}); read its log, or try another SDK"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _compile_waiting(self, pool: ThreadPoolExecutor, compilers: int) -> None:
        """Say what is to be compiled, compile it, and report each finished graph; failed graphs are dropped."""
        total = len(self._waiting)
        if total:
            first = next(iter(self._waiting.values()))
            first.announce(chips.announcement(total, compilers, self.sdk.logical))
        futures = {pool.submit(self._compiled, entry): key for key, entry in self._waiting.items()}
        for done, future in enumerate(as_completed(futures), start=1):
            key = futures[future]
            error = future.exception()
            if isinstance(error, BackendError):
                self.graphs[key].announce(f"{done} of {total} graphs done; the compiler refused {self.graphs[key].key}")
                self._drop(key, error)
            elif error is not None:
                raise error
            else:
                self.graphs[key].announce(f"{done} of {total} graphs done: {self.graphs[key].key}")

    def _load(self) -> None:
        """Load everything that is not yet on the device."""
        if self.resident is None:
            self.resident = LoadedGraphs(self.degree)
        self.resident.add_weights(self.names.weights(self.degree))
        self.resident.add_states(self.names.states(self.degree))
        for key, entry in [*self.graphs.items()]:
            if key not in self.resident.keys:
                try:
                    self.resident.add_graph(key, entry.traced, self._compiled(entry))
                except BackendError as error:  # of an aborted preparation
                    self._drop(key, error)
                except Exception as error:
                    refused = BackendError(
                        f"{entry.key}: the compiled graph cannot be loaded on the device ({error}); check "
                        "`neuron-ls` and the driver's version"
                    )
                    refused.__cause__ = error
                    self._drop(key, refused)

    def _drop(self, key: str, error: BackendError) -> None:
        self.graphs.pop(key)
        self.failed[key] = error


@lru_cache(maxsize=1)
def chip() -> DeviceProcess:
    """Return this process's chip: its cores and its runtime cannot be released before the process ends.

    Raises:
        BackendError: the SDK is missing or does not fit the chip.
    """
    return DeviceProcess()
