"""TorchNeuron: AWS Trainium as a PyTorch device, whose compiler is reached through `torch.compile(backend="neuron")`.

A step is lowered to a pure graph, as for every compiler of graphs; what it changes is then written back into the
device's tensors, which the compiler turns into outputs that alias inputs. Written against TorchNeuron 2.13 and 2.14 of
Neuron SDK 2.33 (October 2026, a public beta); it has run on a stand-in for that compiler only, never on a chip. Not
here: Inferentia2 and Trainium1, which TorchNeuron does not support (`paceline.neuron.backend`).

Of a divided model each core is a process, with its part of the weights and the caches. Every rank makes the same steps,
whose sums and gathers are PyTorch's functional collectives (no DTensor), and compiles them by itself; the group is
PyTorch's default one, of TorchNeuron's backend ``neuron``. Written against AWS's guide "How to use torch.distributed on
Neuron" (SDK 2.33, October 2026); it has run with gloo in the place of that backend, never on a chip.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.core.errors import BackendError, ConfigurationError
from paceline.decoder.backends.base import Graph, LocalBackend, Step
from paceline.decoder.backends.eager import RankedBackend
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.parallel import vocab_part
from paceline.decoder.parallel.collectives import TIMEOUT, Collectives, DeviceGroup
from paceline.neuron import environment, graph_lint, graph_product, prompt_attention
from paceline.neuron.chips import CAPABILITIES, DRAFT_LENGTHS, Chip
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import Lowered, lower, state_of
from paceline.neuron.noise_record import ChecksNoise
from paceline.neuron.prompt_attention import PromptAttention
from paceline.neuron.sdk import instance_family

DEVICE = "neuron"
"""TorchNeuron's name of its device, of its compiler and of the package family's module in torch."""
PACKAGES = ("torch-neuronx", "neuronx-cc")
SETUP = (
    "install torch-neuronx 2.13 or 2.14 with the PyTorch of the same number and neuronx-cc from the AWS Neuron package "
    "index, on an instance with Trainium2 or Trainium3; docs/neuron.md has the commands. For Inferentia2 and Trainium1 "
    "use backend='neuron'"
)

Compiler = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Runtime:
    """The device and its compiler.

    device    where weights, caches, inputs and outputs of graphs are
    compiler  what `torch.compile` calls
    versions  of `PACKAGES`, in their order
    """

    device: torch.device
    compiler: Compiler
    versions: tuple[str, ...]

    @property
    def backend(self) -> str:
        """The backend that uses it."""
        return NeuronNativeBackend.name

    @property
    def described(self) -> str:
        """The instance and the packages, for people."""
        packages = ", ".join(f"{name} {version}" for name, version in zip(PACKAGES, self.versions, strict=True))
        return f"{instance_family() or 'this machine'} with {packages}"

    def facts(self) -> dict[str, object]:
        """What a compiled graph depends on."""
        return {"backend": self.backend, **dict(zip(PACKAGES, self.versions, strict=True))}

    def flags(self, *, prompt: bool) -> str:
        """Compiler flags of a graph: TorchNeuron's own defaults."""
        return ""


@lru_cache(maxsize=1)
def runtime() -> Runtime:
    """The one of this process.

    Raises:
        BackendError: TorchNeuron is missing, is the older package of the same name, or sees no core.
    """
    environment.neuron_native_defaults()
    if environment.neuron_native_compile_only():
        raise BackendError(
            "TORCH_NEURONX_COMPILE_ONLY is set: TorchNeuron compiles graphs then and runs none, and no document says "
            "where a model's tensors are meanwhile; unset it. `paceline export-hlo` writes graphs to be compiled "
            "without a chip"
        )
    try:
        importlib.import_module("torch_neuronx")  # which PyTorch has done already, unless it was told not to
        versions = tuple(metadata.version(name) for name in PACKAGES)
    except ImportError as error:  # a missing package's version is one
        raise BackendError(
            f"backend='neuron-native' needs TorchNeuron, which cannot be imported ({error}); {SETUP}"
        ) from error
    if torch._C._get_privateuse1_backend_name() != DEVICE or DEVICE not in torch._dynamo.list_backends(()):
        raise BackendError(
            f"torch-neuronx {versions[0]} has no device and no compiler named {DEVICE!r}: it is the older package, "
            f"which works through PyTorch/XLA; {SETUP}"
        )
    if not torch.get_device_module(DEVICE).is_available():
        raise BackendError(f"TorchNeuron sees no NeuronCore; check `neuron-ls` and NEURON_RT_VISIBLE_CORES; {SETUP}")
    return Runtime(torch.device(DEVICE), DEVICE, versions)


class NeuronNativeBackend(ChecksNoise, LocalBackend):
    """Graphs on the first NeuronCore that this process sees. TorchNeuron keeps what it compiled in its own cache."""

    name = "neuron-native"
    device_state = True
    draft_lengths = DRAFT_LENGTHS

    def __init__(self) -> None:
        self.stack: Runtime = runtime()
        self._prompts = prompt_form()
        self.kernels: Kernels = TraceableKernels(self._prompts)

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        """Trace. The compiler runs at the step's first call, which is the only one that it runs at.

        Raises:
            BackendError: the graph breaks a rule of the compiler.
        """
        announce(f"compiling {graph.name}")
        return compiled(graph, self.stack, prompts=self._prompts, announce=announce)

    def read_state(self, state: Tensor) -> Tensor:
        return state_on(self.stack, state)


def prompt_form() -> PromptAttention:
    """How prompts are attended to: by the NKI Library's kernel, which TorchNeuron calls on every chip that it supports.

    Raises:
        ConfigurationError: a variable that decides it holds something else than it may.
    """
    if not environment.neuron_prompt_kernel():
        return PromptAttention("PACELINE_NEURON_PROMPTS=plain")
    return PromptAttention(cores=environment.neuron_logical_cores() or CAPABILITIES[Chip.TRN2].logical[0])


def compiled(graph: Graph, home: Runtime, *, prompts: PromptAttention, announce: Callable[[str], None]) -> Step:
    """One graph on a device, traced now and compiled at its first call.

    ``prompts``: of the kernels that the graph's module has.

    Raises:
        BackendError: it breaks a rule of the compiler, or what it calls is not installed.
    """
    lowered = lower(graph.name, graph.module, graph.example)
    if news := prompts.news():
        announce(f"{graph.name}: {news}")
    if found := graph_lint.lint(lowered):
        raise BackendError(f"{graph.name} cannot be compiled for Neuron: {'; '.join(map(str, found[:3]))}")
    return _Compiled(graph, lowered, home, cores=prompts.cores)


def state_on(home: Runtime, state: Tensor) -> Tensor:
    """A copy of what a state of graphs on a device holds now."""
    return _copies().of(state, home.device).cpu().clone()


class Copies:
    """The device's copies of weights and caches: one of each, whichever graph and decoder asks, as long as it lives."""

    def __init__(self) -> None:
        self._found = WeakTensorKeyDictionary()

    def of(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The copy of a tensor of the host. Graphs write into copies of states; the host's tensor stays as it was."""
        if tensor not in self._found:
            self._found[tensor] = tensor.detach().to(device, copy=True)
        copy: Tensor = self._found[tensor]
        return copy


@lru_cache(maxsize=1)
def _copies() -> Copies:
    return Copies()


class _Compiled:
    """One graph, and the device's tensors that it reads and writes."""

    def __init__(self, graph: Graph, lowered: Lowered, home: Runtime, *, cores: int) -> None:
        self._name, self._device = graph.name, home.device
        # Weak where a weight's life is the decoder's own: the copies are kept here.
        self._state = [_copies().of(x, home.device) for x in state_of(graph.module, lowered).values()]
        # A graph module has code of its own, so that each key is compiled once and none counts as another's recompile.
        step = in_place(lowered, home.device, cores=cores)
        self._call: Callable[..., Any] = torch.compile(step, backend=home.compiler, fullgraph=True, dynamic=False)
        self._ready = False

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        here = [x.to(self._device) for x in inputs]
        with torch.no_grad():
            outputs = self._call(*self._state, *here) if self._ready else self._first(here)
        return [x.cpu() for x in outputs]

    def _first(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        try:
            outputs: Sequence[Tensor] = self._call(*self._state, *inputs)
        except Exception as error:  # of Dynamo, of AOTAutograd, of the compiler or of the runtime
            raise BackendError(f"compiling {self._name} for Neuron failed: {type(error).__name__}: {error}") from error
        self._ready = True
        return outputs


def in_place(lowered: Lowered, device: torch.device, *, cores: int = 1) -> fx.GraphModule:
    """A lowered step that takes its state and its inputs, writes into the state, and gives its outputs.

    Products and top-k become PyTorch's own, attention over a prompt the NKI Library's, what torch-mlir has no lowering
    for is rewritten, and what a step makes from nothing is made on the device. ``cores``: physical ones of a logical
    core.

    Raises:
        BackendError: the graph calls the NKI Library, which is not there.
    """
    graph = fx.Graph()
    results = graph.graph_copy(lowered.graph.graph, {})
    assert isinstance(results, (list, tuple)), "a lowered step gives several tensors"
    aten = torch.ops.aten
    own: dict[Any, Callable[..., Any]] = {graph_product.operator(): product, vocab_part.topk_operator(): topk}
    own[aten.alias.default] = _same
    own |= {one.Scalar: _typed(one.Tensor) for one in (aten.bitwise_and, aten.bitwise_or, aten.bitwise_xor)}
    for node in graph.nodes:
        if node.op == "call_function":
            if node.target == prompt_attention.operator():
                node.target = prompt_attention.native(cores)
            node.target = own.get(node.target, node.target)
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": device}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    places = dict(zip(lowered.state, placeholders, strict=False))
    for name, value in zip(lowered.changed, results, strict=False):
        graph.call_function(torch.ops.aten.copy_.default, (places[name], value))
    graph.output(list(results[len(lowered.changed) :]))
    return fx.GraphModule(lowered.graph, graph)


def product(x: Tensor, y: Tensor) -> Tensor:
    """As `graph_product.operator`. The engine sums in float32; the sums are rounded to 16 bits on their way out.

    PyTorch's products that keep float32 sums of 16-bit numbers have no lowering in torch-mlir.
    """
    return torch.matmul(x, y.transpose(-2, -1)).float()


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `vocab_part.topk`; TorchNeuron has a call of its own for the largest of a last dimension."""
    values, places = torch.topk(x, count, dim=-1)
    return values, places.to(torch.int32)


def _same(x: Tensor) -> Tensor:
    return x


def _typed(operation: Any) -> Callable[[Tensor, int], Tensor]:
    """An operation with a number as one with a tensor of that number."""

    def operate(x: Tensor, number: int) -> Tensor:
        result: Tensor = operation(x, torch.full((), number, dtype=x.dtype, device=x.device))
        return result

    return operate


class NativeMember:
    """A rank on a NeuronCore: the one whose number TorchNeuron finds in LOCAL_RANK. See `Member` for the methods."""

    keeps_meeting = True  # nothing says when the last core has read what the others left there

    def __init__(self, rank: int, degree: int, name: str) -> None:
        self.announce: Callable[[str], None] = _quiet  # on rank 0 the backend's: every rank makes the same graphs
        self.prompts = prompt_form()
        self.kernels: Kernels = TraceableKernels(self.prompts)
        self.group: Collectives = DeviceGroup(degree, name)
        self._rank = rank
        self._port = _free_port() if rank == 0 else 0
        if rank == 0:
            self.claim()
        self.runtime: Runtime = self.find()

    def claim(self) -> None:
        """Make this process rank 0, before TorchNeuron is used in it.

        Raises:
            ConfigurationError: it cannot be, because of another decoder or of who started it.
        """
        if torch.distributed.is_initialized():
            raise ConfigurationError(
                "this process has a group of ranks already: with backend='neuron-native' all divided decoders of a "
                "process have one tp_degree; close the others first, or load this one in another process"
            )
        if runtime.cache_info().currsize and not environment.is_rank():
            raise ConfigurationError(
                "a decoder of this process runs on one core already, and TorchNeuron gives a process one core; load "
                "the divided model first, or in another process"
            )
        environment.become_rank(self.variables(0))

    def find(self) -> Runtime:
        """The device and its compiler."""
        return runtime()

    def variables(self, rank: int) -> dict[str, str]:
        return environment.rank_variables(rank, self.group.degree, self._port)

    def meet(self, folder: str) -> None:
        distributed: Any = torch.distributed
        store = distributed.FileStore(str(Path(folder) / "meeting"), self.group.degree)
        distributed.init_process_group(
            backend=DEVICE, store=store, rank=self._rank, world_size=self.group.degree, timeout=TIMEOUT
        )
        self.group = DeviceGroup(self.group.degree, distributed.group.WORLD.group_name)

    def leave(self) -> None:
        with suppress(AssertionError, RuntimeError, ValueError):  # it was never there, or other ranks are gone
            torch.distributed.destroy_process_group()

    def compile(self, graph: Graph) -> Step:
        return compiled(graph, self.runtime, prompts=self.prompts, announce=self.announce)


class NeuronNativeRanks(ChecksNoise, RankedBackend):
    """As `NeuronNativeBackend`, on as many cores as the model is divided over; rank 0 is this process."""

    name = "neuron-native"
    kind = "paceline.neuron.native:NativeMember"
    stack: Runtime
    device_state = True
    draft_lengths = DRAFT_LENGTHS

    def __init__(self, degree: int) -> None:
        super().__init__(degree)
        member = self.ranks.member
        assert isinstance(member, NativeMember)
        self._member, self.stack = member, member.runtime

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        announce(f"compiling {graph.name} on {self.group.degree} cores")
        self._member.announce = announce
        return super().compile(graph, announce)

    def read_state(self, state: Tensor) -> Tensor:
        """What rank 0 has in it: states that are read are the same on all ranks."""
        return state_on(self.stack, state)


def _quiet(_said: str) -> None:
    """Tells nobody."""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
