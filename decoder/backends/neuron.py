"""AWS Neuron through PyTorch/XLA: graphs traced and compiled by neuronx_distributed, sharing weights and caches.

All graphs of a process live in one `NxDModel`, because only there do several graphs share one set of weights and one
state on the device; `torch_neuronx.trace` gives every graph a state of its own. Written against the documented
interface and the source of neuronx_distributed (2026-04); it has run on a double of it only, never on a chip.
"""

from __future__ import annotations

import hashlib
import importlib
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ArtefactError, BackendError
from paceline.decoder import artefacts, environment, graph_lint
from paceline.decoder.backends import neuron_sdk
from paceline.decoder.backends.base import Graph, Step
from paceline.decoder.backends.neuron_state import Names
from paceline.decoder.collectives import Alone, Collectives
from paceline.decoder.graph_kernels import GraphKernels
from paceline.decoder.kernels import Kernels
from paceline.decoder.lowering import Lowered, lower

MAX_INPUTS = 16
_NEFF = "graph.neff"


class NeuronBackend:
    """Graphs on the first NeuronCore that this process sees."""

    name = "neuron"

    def __init__(self) -> None:
        self._chip = chip()
        self.kernels: Kernels = GraphKernels()
        self.group: Collectives = Alone()
        self._root = environment.cache_root() / "neuron"
        self._shipped: Path | None = None

    def reaches(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        return wanted

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        """Trace, and compile unless the cache has it. The device takes it in at the next call of any graph.

        Raises:
            BackendError: the graph breaks a rule of the compiler, or the compiler refuses it.
        """
        lowered = lower(graph.name, graph.module, graph.example)
        if found := graph_lint.lint(lowered):
            raise BackendError(f"{graph.name} cannot be compiled for Neuron: {'; '.join(map(str, found[:3]))}")
        key = f"g{len(self._chip.graphs)}"
        traced = self._chip.trace(Stateful(lowered, self._chip.names.of(graph.module, lowered)), graph)
        flags = self._chip.sdk.flags(prompt=graph.name.startswith("prefill"))
        facts = self._facts({**graph.facts, "hlo": _digest(traced.hlo.SerializeToString()), "flags": flags})
        folder = artefacts.find(self._shipped, facts) if self._shipped else None
        if folder is None:
            if artefacts.find(self._root, facts) is None:
                announce(f"compiling {graph.name} for {self._chip.sdk.chip.value}")
            build = partial(self._chip.compile, traced, flags=flags, name=graph.name)
            folder = artefacts.ensure(self._root, facts, build)
        self._chip.add(key, traced, folder / _NEFF)
        return partial(self._chip.run, key)

    def close(self) -> None:
        """Nothing is held elsewhere."""

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        """Copy every graph this machine compiled for its chip: the cache has no other."""
        found = [path.parent for path in self._root.glob(f"*/{artefacts.MANIFEST}")]
        if not found:
            raise ArtefactError("no graph is compiled for Neuron yet: call compile() before save()")
        for path in found:
            artefacts.copy(path, folder)

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        """Take compiled graphs from a folder; those that do not fit are compiled."""
        if not any(folder.glob(f"*/{artefacts.MANIFEST}")):
            raise ArtefactError(f"{folder} holds no compiled graphs; write them with decoder.save({str(folder)!r})")
        self._shipped = folder

    def _facts(self, facts: dict[str, object]) -> dict[str, object]:
        sdk = self._chip.sdk.facts()
        return {"backend": self.name, "source": artefacts.source_hash(), "torch": torch.__version__, **sdk, **facts}


class Stateful(nn.Module):
    """A lowered step as the tracer wants it: weights and states of its own, and states replaced, never written into.

    Its inputs are named and optional behind the first, the same for all graphs: one `NxDModel` holds only graphs of one
    signature. ``tensors`` are the host's, by the names that all graphs of the process share.
    """

    def __init__(self, lowered: Lowered, tensors: dict[str, tuple[str, Tensor]]) -> None:
        super().__init__()
        self._lowered = lowered
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
        changed, outputs = self._lowered.run(state, given)
        for inner, value in changed.items():
            setattr(self, self.shared[inner], value)
        return tuple(outputs)

    forward.__signature__ = Signature(  # type: ignore[attr-defined]  # the tracer refuses **inputs
        [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), Parameter("x0", Parameter.POSITIONAL_OR_KEYWORD)]
        + [Parameter(f"x{i}", Parameter.POSITIONAL_OR_KEYWORD, default=None) for i in range(1, MAX_INPUTS)]
    )


def input_names() -> list[str]:
    """Names of a traced graph's inputs, in order."""
    return [f"x{place}" for place in range(MAX_INPUTS)]


class Chip:
    """This process's part of the accelerator: one `NxDModel` of every graph, on the process's own core 0."""

    def __init__(self) -> None:
        self.sdk = neuron_sdk.find()
        environment.neuron_defaults()
        try:
            importlib.import_module("torch_neuronx")
            self._functions: Any = importlib.import_module("neuronx_distributed.trace.functions")
            self._parts: Any = importlib.import_module("neuronx_distributed.trace.model_builder_utils")
            self._models: Any = importlib.import_module("neuronx_distributed.trace.nxd_model.nxd_model")
        except ImportError as error:
            raise BackendError(f"the Neuron SDK cannot be imported ({error}); {neuron_sdk.SETUP}") from error
        self.names = Names()
        self.graphs: dict[str, tuple[Any, Path]] = {}
        self._loaded: Any = None
        self._away: dict[str, Tensor] = {}  # states whose values are on the device

    def trace(self, module: Stateful, graph: Graph) -> Any:
        """The SDK's traced form of a step."""
        if len(graph.example) > MAX_INPUTS:
            raise BackendError(f"{graph.name} has {len(graph.example)} inputs; a graph takes {MAX_INPUTS}")
        inputs = dict(zip(input_names(), graph.example, strict=False))
        try:
            with torch.no_grad():
                return self._functions.trace(module, args=None, kwargs=inputs, spmd=True, preserve_parameters=True)
        except Exception as error:
            raise BackendError(f"tracing {graph.name} for Neuron failed: {error}") from error

    def compile(self, traced: Any, folder: Path, *, flags: str, name: str) -> None:
        """Compile into a folder of the cache: the SDK itself caches nothing on this way."""
        work = folder / "work"
        try:
            made = self._functions.compile(traced.hlo, traced.metaneff, str(work), flags, "graph")
            shutil.copyfile(made.neff_filepath, folder / _NEFF)
        except Exception as error:
            raise BackendError(f"neuronx-cc refused {name} ({flags}): {error}") from error
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def add(self, key: str, traced: Any, neff: Path) -> None:
        """Take a graph in; the device is loaded again before the next call."""
        self.graphs[key] = (traced, neff)
        self._unload()

    def run(self, key: str, *inputs: Tensor) -> list[Tensor]:
        """Execute one graph. Inputs and outputs are the host's."""
        if self._loaded is None:
            self._load()
        out = self._loaded(*inputs, model_name=key)
        return [out] if isinstance(out, Tensor) else list(out)

    def _load(self) -> None:
        states, weights = self.names.states(), self.names.weights()
        shapes = {name: list(tensor.shape) for name, tensor in states.items()}
        kinds = {name: tensor.dtype for name, tensor in states.items()}
        base = importlib.import_module("neuronx_distributed.trace.nxd_model.base_nxd_model")
        model = self._models.NxDModel(world_size=1, state_initializer=base.StateInitializer(shapes, kinds, 1))
        for key, (traced, neff) in self.graphs.items():
            model.add(key, traced, self._parts.CompilationArtifacts(str(neff)))
        model.set_weights([weights])
        model.to_neuron()
        for name, tensor in states.items():
            model.write_to_neuron_buffer(tensor, name, 0)
        self._loaded, self._away = model, states

    def _unload(self) -> None:
        """Bring the state home, so that a graph may come in the middle of a text without losing any."""
        for name, tensor in self._away.items():
            tensor.copy_(self._loaded.read_from_neuron_buffer(name, 0))
        self._loaded, self._away = None, {}


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
