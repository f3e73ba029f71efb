"""AWS Neuron through PyTorch/XLA: graphs traced and compiled by neuronx_distributed, sharing weights and caches.

All graphs of a process live in one `NxDModel`, because only there do several graphs share one set of weights and one
state on the device; `torch_neuronx.trace` gives every graph a state of its own. Written against the documented
interface and the source of neuronx_distributed (2026-04); it has run on a double of it only, never on a chip.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core import reduce
from paceline.core.errors import ArtefactError, BackendError, ConfigurationError
from paceline.decoder import environment
from paceline.decoder.backends.base import Graph, Step
from paceline.decoder.backends.neuron import noise_record
from paceline.decoder.backends.neuron import ranks as neuron_ranks
from paceline.decoder.backends.neuron import sdk as neuron_sdk
from paceline.decoder.backends.neuron.layout import NEFF, Compiler, Entry
from paceline.decoder.backends.neuron.state import Names
from paceline.decoder.compile import cache, graph_lint
from paceline.decoder.compile.lowering import Lowered, lower
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.kernels.traceable import TraceableKernels
from paceline.decoder.parallel.collectives import Collectives, DeviceGroup, SingleRank

MAX_INPUTS = 16
_TOPK_MULTIPLE = 8


class NeuronBackend:
    """Graphs on the first NeuronCores that this process sees, as many as the model is divided over."""

    name = "neuron"
    device_state = True

    def __init__(self, degree: int = 1) -> None:
        self._chip = chip()
        self._chip.claim(degree)
        self.kernels: Kernels = TraceableKernels()
        self.group: Collectives = SingleRank() if degree == 1 else DeviceGroup(degree)
        self._root = environment.cache_root() / "neuron"
        self._shipped: Path | None = None
        self._folders: dict[Path, None] = {}  # of this decoder's graphs, in the order they were made or found

    def kv_buckets(self, requested: tuple[int, ...]) -> tuple[int, ...]:
        return requested

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        """Trace, and compile unless the cache has it. The device takes it in at the next call of any graph.

        Raises:
            BackendError: the graph breaks a rule of the compiler, or the compiler refuses it.
        """
        graph = replace(graph, example=tuple(x.contiguous() for x in graph.example))
        lowered = lower(graph.name, graph.module, graph.example)
        if found := graph_lint.lint(lowered):
            raise BackendError(f"{graph.name} cannot be compiled for Neuron: {'; '.join(map(str, found[:3]))}")
        traced = self._chip.trace(
            Stateful(lowered, self._chip.names.of(graph.module, lowered), self._chip.ranks), graph
        )
        flags = self._chip.sdk.flags(prompt=graph.key.is_prompt)
        facts = self._facts({**graph.facts, "hlo": _digest(traced.hlo.SerializeToString()), "flags": flags})

        def folder(more: dict[str, object], build: Callable[[Path], None]) -> Path:
            every = {**facts, **more}
            found = cache.find(self._shipped, every) if self._shipped else None
            if found is None:
                if cache.find(self._root, every) is None:
                    announce(f"compiling {graph.name} for {self._chip.sdk.chip.value}")
                found = cache.ensure(self._root, every, build)
            self._folders[found] = None
            return found

        return partial(self._chip.run, self._chip.add(Entry(graph.key, traced, flags, folder)))

    def read_state(self, state: Tensor) -> Tensor:
        return self._chip.value(state)

    def attach(self, body: nn.Module, path: str) -> None:
        """Load the other cores' parts of the model."""
        assert isinstance(body, ModelWithCache)
        if self.group.degree > 1:
            self._chip.names.divide(body, neuron_ranks.others(body, path))

    def sampling_refusal(self) -> str | None:
        """See `paceline.decoder.backends.base.ChecksNoise`."""
        return noise_record.refusal(self._chip.sdk)

    def record_noise_check(self, *, passed: bool) -> None:
        """See `paceline.decoder.backends.base.ChecksNoise`."""
        noise_record.write(self._chip.sdk, outcome=passed)

    def close(self) -> None:
        """Cores are this process's until it ends."""

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        """Copy every graph of this decoder, in every layout of weights that it was compiled for."""
        if not self._folders:
            raise ArtefactError("no graph is compiled for Neuron yet: call compile() before save()")
        for path in self._folders:
            cache.copy(path, folder)

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        """Take compiled graphs from a folder; those that do not fit are compiled."""
        if not any(folder.glob(f"*/{cache.MANIFEST}")):
            raise ArtefactError(f"{folder} holds no compiled graphs; write them with decoder.save({str(folder)!r})")
        self._shipped = folder

    def _facts(self, facts: dict[str, object]) -> dict[str, object]:
        sdk = self._chip.sdk.facts()
        return {"backend": self.name, "source": cache.source_hash(), "torch": torch.__version__, **sdk, **facts}


class Stateful(nn.Module):
    """A lowered step as the tracer wants it: weights and states of its own, and states replaced, never written into.

    Its inputs are named and optional behind the first, the same for all graphs: one `NxDModel` holds only graphs of one
    signature. ``tensors`` are the host's, by the names that all graphs of the process share.
    """

    def __init__(
        self, lowered: Lowered, tensors: dict[str, tuple[str, Tensor]], ranks: Collectives | None = None
    ) -> None:
        super().__init__()
        self._lowered, self._ranks = lowered, ranks
        self.shared = {inner: name for inner, (name, _) in tensors.items()}
        for inner, (name, tensor) in tensors.items():
            if hasattr(self, name):
                continue
            if inner in lowered.changed or not isinstance(tensor, nn.Parameter):
                self.register_buffer(name, tensor)
            else:
                # A parameter of its own, over the same numbers: the tracer moves parameters to its device in place.
                self.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))

    def forward(self, **inputs: Tensor | None) -> tuple[Tensor, ...]:
        """The step's inputs as x0, x1, ... -> its outputs."""
        given = [x for name in input_names() if (x := inputs.get(name)) is not None]
        state = {inner: getattr(self, name) for inner, name in self.shared.items()}
        changed, outputs = self._lowered.run(state, given, ranks=self._ranks, topk=device_topk)
        for inner, value in changed.items():
            setattr(self, self.shared[inner], value)
        return tuple(outputs)

    forward.__signature__ = Signature(  # type: ignore[attr-defined]  # the tracer refuses **inputs
        [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), Parameter("x0", Parameter.POSITIONAL_OR_KEYWORD)]
        + [Parameter(f"x{i}", Parameter.POSITIONAL_OR_KEYWORD, default=None) for i in range(1, MAX_INPUTS)]
    )


def device_topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The SDK's top-k (custom call AwsNeuronTopK) in place of `paceline.decoder.kernels.graph_topk.topk`.

    It takes rows [n, width] whose width is a multiple of 8; its order among equals is not documented, and nothing here
    depends on it.
    """
    operators = importlib.import_module("torch_neuronx.xla_impl.ops")
    width, rows = x.shape[-1], x.reshape(-1, x.shape[-1])
    if missing := -width % _TOPK_MULTIPLE:
        rows = nn.functional.pad(rows, (0, missing), value=2 * reduce.NEGATIVE)
    values, places = operators.TopK.apply(rows, count, dim=1)
    shape = (*x.shape[:-1], count)
    return values.reshape(shape), places.to(torch.int32).clamp(max=width - 1).reshape(shape)


def input_names() -> list[str]:
    """Names of a traced graph's inputs, in order."""
    return [f"x{place}" for place in range(MAX_INPUTS)]


class Chip:
    """This process's part of the accelerator: one `NxDModel` of every graph, on the process's cores from 0 on."""

    def __init__(self) -> None:
        self.sdk = neuron_sdk.find()
        environment.neuron_defaults()
        try:
            importlib.import_module("torch_neuronx")
            self._functions: Any = importlib.import_module("neuronx_distributed.trace.functions")
            self._parts: Any = importlib.import_module("neuronx_distributed.trace.model_builder_utils")
            self._compiler = Compiler(layout=environment.neuron_layout(), logical=self.sdk.logical)
            self._models: Any = importlib.import_module("neuronx_distributed.trace.nxd_model.nxd_model")
        except ImportError as error:
            raise BackendError(f"the Neuron SDK cannot be imported ({error}); {neuron_sdk.SETUP}") from error
        self.names = Names()
        self.graphs: dict[str, Entry] = {}
        self._loaded: Any = None
        self._away: list[dict[str, Tensor]] = []  # states of every rank, whose values are on the device
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

    def add(self, entry: Entry) -> str:
        """Take a graph in, compiled; the device is loaded again before the next call. -> its key

        Where a graph chooses the layout of the weights, compiling has to wait until then.

        Raises:
            BackendError: the compiler refuses it.
        """
        if not self._compiler.layout:
            self._compiler.plain(entry)
        key = f"g{len(self.graphs)}"
        self.graphs[key] = entry
        self._unload()
        return key

    def run(self, key: str, *inputs: Tensor) -> list[Tensor]:
        """Execute one graph. Inputs and outputs are the host's."""
        if self._loaded is None:
            self._load()
        # Graphs are made for inputs in the order of their shape; what an earlier graph gave may have another.
        out = self._loaded(*(x.contiguous() for x in inputs), model_name=key)
        return [out] if isinstance(out, Tensor) else list(out)

    def value(self, state: Tensor) -> Tensor:
        """What rank 0's state is now; it is here, or on the device."""
        if self._loaded is None:
            return state.clone()
        found: Tensor = self._loaded.read_from_neuron_buffer(self.names.known(state), 0)
        return found

    def _load(self) -> None:
        states, weights = self.names.states(self.degree), self.names.weights(self.degree)
        shapes = {name: list(tensor.shape) for name, tensor in states[0].items()}
        kinds = {name: tensor.dtype for name, tensor in states[0].items()}
        base = importlib.import_module("neuronx_distributed.trace.nxd_model.base_nxd_model")
        model = self._models.NxDModel(
            world_size=self.degree, state_initializer=base.StateInitializer(shapes, kinds, self.degree)
        )
        made = self._compiler.arrange(self.graphs)
        for key, (traced, folder) in made.parts.items():
            model.add(key, traced, self._parts.CompilationArtifacts(str(folder / NEFF)))
        model.set_weights([{name: x for name, x in rank.items() if name not in made.moved} for rank in weights])
        if made.transformer is not None:
            # What the model would do by itself with all weights; nothing says how it treats those of other graphs.
            own = [{name: rank[name] for name in rank if name in made.moved} for rank in weights]
            moved = made.transformer.construct_layout_transformer_object(self.degree).forward(own, False)
            for rank, laid in enumerate(moved):
                model.weights[rank].update(laid)
        model.to_neuron()
        for rank, held in enumerate(states):
            for name, tensor in held.items():
                model.write_to_neuron_buffer(tensor, name, rank)
        self._loaded, self._away = model, states

    def _unload(self) -> None:
        """Bring the state home, so that a graph may come in the middle of a text without losing any."""
        for rank, held in enumerate(self._away):
            for name, tensor in held.items():
                tensor.copy_(self._loaded.read_from_neuron_buffer(name, rank))
        self._loaded, self._away = None, []


@lru_cache(maxsize=1)
def chip() -> Chip:
    """The one of this process: its cores and its runtime cannot be given back before it ends.

    Raises:
        BackendError: the SDK is missing or does not fit the chip.
    """
    return Chip()


def _digest(module: bytes) -> str:
    """Of the traced module itself: a compiled graph takes its weights by their places in exactly that module."""
    return hashlib.sha256(module).hexdigest()
