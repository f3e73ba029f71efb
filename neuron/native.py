"""TorchNeuron: AWS Trainium as a PyTorch device, whose compiler is reached through `torch.compile(backend="neuron")`.

A step is lowered to a pure graph, as for every compiler of graphs; changed state is then written back into the device's
tensors, which the compiler turns into outputs that alias inputs. Written against TorchNeuron 2.13 and 2.14 of Neuron
SDK 2.33 (October 2026, a public beta); it has run on a fake of that compiler only, never on a chip. Inferentia2 and
Trainium1, which TorchNeuron does not support, use `paceline.neuron.backend`.

In a sharded model each core has a process, with its shard of the weights and the caches. Every rank makes the same
steps, with PyTorch's functional collectives (no DTensor), and compiles them separately; the group is PyTorch's default
one, of TorchNeuron's backend ``neuron``. Written against AWS's guide "How to use torch.distributed on Neuron" (SDK
2.33, October 2026); it has run with gloo in place of that backend, never on a chip.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.core.errors import BackendError, ConfigurationError
from paceline.decoder.backends.base import Backend, Graph, Step
from paceline.decoder.backends.eager import RankedBackend
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.parallel import vocab_part
from paceline.decoder.parallel.collectives import TIMEOUT, Collectives, DeviceGroup
from paceline.neuron import environment, graph_lint, graph_product, prompt_attention
from paceline.neuron.chips import CAPABILITIES, DRAFT_LENGTHS, Chip, announcement
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import Lowered, lower, state_of
from paceline.neuron.noise_record import ChecksNoise
from paceline.neuron.prompt_attention import PromptAttention
from paceline.neuron.sdk import Stack

DEVICE = "neuron"
"""TorchNeuron's name of its device, of its compiler and of the package family's module in torch."""
PACKAGES = ("torch-neuronx", "neuronx-cc")
SETUP = (
    "install torch-neuronx 2.13 or 2.14 with the PyTorch of the same number and neuronx-cc from the AWS Neuron package "
    "index, on an instance with Trainium2 or Trainium3; docs/neuron.md has the commands. For Inferentia2 and Trainium1 "
    "use backend='neuron'"
)


@dataclass(frozen=True, slots=True)
class Runtime(Stack):
    """The device and its compiler.

    device    device of weights, caches, inputs and outputs of graphs
    compiler  backend of `torch.compile`
    """

    backend = "neuron-native"
    packages = PACKAGES

    device: torch.device
    compiler: str | Callable[..., Any]
    versions: tuple[str, ...]


@lru_cache(maxsize=1)
def runtime() -> Runtime:
    """Return this process's runtime.

    Raises:
        BackendError: TorchNeuron is missing, is the older package of the same name, or sees no core.
    """
    environment.neuron_native_defaults()
    if environment.neuron_native_compile_only():
        raise BackendError(
            "TORCH_NEURONX_COMPILE_ONLY is set, so TorchNeuron compiles graphs and runs none; unset it (`paceline "
            "export-hlo` writes graphs that compile without a chip)"
        )
    try:
        importlib.import_module("torch_neuronx")  # already done by PyTorch, unless disabled
        versions = tuple(metadata.version(name) for name in PACKAGES)
    except ImportError as error:  # a missing package's version raises one
        raise BackendError(
            f"backend='neuron-native' needs TorchNeuron, which cannot be imported ({error}); {SETUP}"
        ) from error
    if torch._C._get_privateuse1_backend_name() != DEVICE or DEVICE not in torch._dynamo.list_backends(()):
        raise BackendError(
            f"torch-neuronx {versions[0]} has no device and no compiler named {DEVICE!r}, since it is the older "
            f"package for PyTorch/XLA; {SETUP}"
        )
    if not torch.get_device_module(DEVICE).is_available():
        raise BackendError(f"TorchNeuron finds no NeuronCore; check `neuron-ls` and NEURON_RT_VISIBLE_CORES; {SETUP}")
    return Runtime(torch.device(DEVICE), DEVICE, versions)


class NeuronNativeBackend(ChecksNoise, Backend):
    """Graphs on the first NeuronCore that this process sees. TorchNeuron keeps compiled graphs in its own cache."""

    name = "neuron-native"
    device_state = True
    draft_lengths = DRAFT_LENGTHS

    def __init__(self) -> None:
        self.stack: Runtime = runtime()
        self._prompts = prompt_form()
        self.kernels: Kernels = TraceableKernels(self._prompts)

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        """Trace. The compiler runs only at the step's first call.

        Raises:
            BackendError: the graph breaks a rule of the compiler.
        """
        announce(f"{_preparation().step} {graph.name}")
        made = compiled(graph, self.stack, prompts=self._prompts, announce=announce)
        return _Prepared(graph.name, made, blank=made.blank, announce=announce)

    def prepare(self) -> AbstractContextManager[None]:
        """Context in which no graph runs; at its end their number is announced, and each is compiled."""
        return _preparation().open()

    def read_state(self, state: Tensor) -> Tensor:
        return state_on(self.stack, state)


def prompt_form() -> PromptAttention:
    """Return the form of attention over prompts: the NKI Library's kernel, which TorchNeuron supports.

    Raises:
        ConfigurationError: a variable that selects it has an unknown value.
    """
    if not environment.neuron_prompt_kernel():
        return PromptAttention("PACELINE_NEURON_PROMPTS=plain")
    return PromptAttention(cores=_logical())


def _logical() -> int:
    """Return the physical cores per logical core."""
    return environment.neuron_logical_cores() or CAPABILITIES[Chip.TRN2].logical[0]


def compiled(graph: Graph, home: Runtime, *, prompts: PromptAttention, announce: Callable[[str], None]) -> _Compiled:
    """Trace one graph for a device; it is compiled at its first call.

    ``prompts``: setting of the kernels in the graph's module.

    Raises:
        BackendError: it breaks a rule of the compiler, or a library that it calls is not installed.
    """
    lowered = lower(graph.name, graph.module, graph.example)
    if news := prompts.news():
        announce(f"{graph.name}: {news}")
    if found := graph_lint.lint(lowered):
        raise BackendError(f"{graph.name} cannot be compiled for Neuron: {'; '.join(map(str, found[:3]))}")
    return _Compiled(graph, lowered, home, cores=prompts.cores)


def state_on(home: Runtime, state: Tensor) -> Tensor:
    """Return a copy of the current value of a state on a device."""
    return _copy_of(state, home.device).cpu().clone()


def _copy_of(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the device's copy of a weight or cache, into which graphs write; the host's tensor is unchanged."""
    copies = _copies()
    if tensor not in copies:
        copies[tensor] = tensor.detach().to(device, copy=True)
    copy: Tensor = copies[tensor]
    return copy


@lru_cache(maxsize=1)
def _copies() -> WeakTensorKeyDictionary:
    """Copies for all graphs and decoders, each as long as its original lives."""
    return WeakTensorKeyDictionary()


class _Compiled:
    """One graph, and the device's tensors that it reads and writes."""

    def __init__(self, graph: Graph, lowered: Lowered, home: Runtime, *, cores: int) -> None:
        self._name, self._device, self.blank = graph.name, home.device, lowered.blank
        # Weak references if the decoder owns the weight: the copies are kept alive by this object.
        self._state = [_copy_of(x, home.device) for x in state_of(graph.module, lowered).values()]
        # Each graph module has separate code, so that each key is compiled once and does not count as another's
        # recompile.
        step = in_place(lowered, home.device, cores=cores)
        self._call: Callable[..., Any] = torch.compile(step, backend=home.compiler, fullgraph=True, dynamic=False)
        self._ready = False

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        here = [x.to(self._device) for x in inputs]
        try:
            with torch.no_grad():
                outputs = self._call(*self._state, *here)
        except Exception as error:  # from Dynamo, AOTAutograd, the compiler or the runtime
            if self._ready:
                raise
            raise BackendError(
                f"{self._name}: compiling for Neuron failed ({type(error).__name__}: {error}); check that the "
                "versions of the SDK fit (`paceline doctor`)"
            ) from error
        self._ready = True
        return [x.cpu() for x in outputs]


class _Prepared:
    """One graph. While graphs are prepared it does not run: its results are zeros of their shapes."""

    def __init__(
        self, name: str, step: Step, *, blank: Callable[[], list[Tensor]], announce: Callable[[str], None]
    ) -> None:
        self.name, self.step, self.announce, self._blank = name, step, announce, blank

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        waiting = _preparation().waiting
        if waiting is None:
            return self.step(*inputs)
        waiting.setdefault(self, [x.clone() for x in inputs])
        return self._blank()


class _Preparation:
    """Graphs that are requested before one runs: their number is then known before the first is compiled.

    waiting  those with inputs of their first call; None outside
    """

    def __init__(self) -> None:
        self.waiting: dict[_Prepared, list[Tensor]] | None = None

    @property
    def step(self) -> str:
        """Word for the work on a requested graph."""
        return "compiling" if self.waiting is None else "tracing"

    @contextmanager
    def open(self) -> Iterator[None]:
        """Collect graphs, and compile them at the end, one after the other.

        Raises:
            BackendError: some do not compile. The others are usable.
        """
        if self.waiting is not None:  # nested in another decoder's preparation
            yield
            return
        self.waiting = {}
        try:
            yield
            found = self.waiting
        finally:
            self.waiting = None
        refused = []
        for done, (graph, inputs) in enumerate(found.items(), start=1):
            if done == 1:
                graph.announce(announcement(len(found), 1, _logical()))
            graph.announce(f"compiling {graph.name}, {done} of {len(found)}")
            try:
                graph.step(*inputs)
            except BackendError as error:
                refused.append(str(error))
        if refused:
            raise BackendError(
                f"{len(refused)} of {len(found)} graphs cannot be used; the others are ready. " + "; ".join(refused)
            )


@lru_cache(maxsize=1)
def _preparation() -> _Preparation:
    return _Preparation()


def in_place(lowered: Lowered, device: torch.device, *, cores: int = 1) -> fx.GraphModule:
    """Return a lowered step that takes its state and its inputs, writes into the state, and returns its outputs.

    Matmuls and top-k become PyTorch's own, and attention over a prompt the NKI Library's. Operators without a
    torch-mlir lowering are rewritten, and tensors that a step creates are created on the device. ``cores``: physical
    cores per logical core.

    Raises:
        BackendError: the graph calls the NKI Library, which is not installed.
    """
    graph = fx.Graph()
    results = graph.graph_copy(lowered.graph.graph, {})
    assert isinstance(results, (list, tuple)), "a lowered step gives several tensors"
    own: dict[Any, Callable[..., Any]] = {graph_product.operator(): product, vocab_part.topk_operator(): topk}
    own[torch.ops.aten.alias.default] = _same
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
    """Compute `graph_product.operator`. The engine sums in float32; the sums are then rounded to 16 bits.

    PyTorch's matmuls that keep float32 sums of 16-bit numbers have no lowering in torch-mlir.
    """
    return torch.matmul(x, y.transpose(-2, -1)).float()


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Compute `vocab_part.topk`; TorchNeuron has a separate call for the largest of a last dimension."""
    values, places = torch.topk(x, count, dim=-1)
    return values, places.to(torch.int32)


def _same(x: Tensor) -> Tensor:
    return x


class NativeMember:
    """A rank on a NeuronCore: the core number that TorchNeuron reads from LOCAL_RANK. See `Member` for the methods."""

    keeps_meeting = True  # no event shows that the last core has read the others' files

    def __init__(self, rank: int, degree: int, name: str) -> None:
        self.announce: Callable[[str], None] = _quiet  # on rank 0 the backend's: every rank makes the same graphs
        self.prompts = prompt_form()
        self.kernels: Kernels = TraceableKernels(self.prompts)
        self.group: Collectives = DeviceGroup(degree, name)
        self.blank: Callable[[], list[Tensor]] = list  # of the latest graph
        self._rank = rank
        self._port = _free_port() if rank == 0 else 0
        if rank == 0:
            self.claim()
        self.runtime: Runtime = self.find()

    def claim(self) -> None:
        """Make this process rank 0, before TorchNeuron is used in it.

        Raises:
            ConfigurationError: another decoder or the launcher of the process prevents it.
        """
        if torch.distributed.is_initialized():
            raise ConfigurationError(
                "tp_degree: expected the same value for all sharded decoders of a process with "
                "backend='neuron-native', got another one; close the others first, or load this one in another "
                "process"
            )
        if runtime.cache_info().currsize and not environment.is_rank():
            raise ConfigurationError(
                "tp_degree: a decoder of this process already runs on one core, and TorchNeuron gives a process one "
                "core; load the sharded model first, or in another process"
            )
        environment.become_rank(self.variables(0))

    def find(self) -> Runtime:
        """Return the device and its compiler."""
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
        with suppress(AssertionError, RuntimeError, ValueError):  # it was never created, or other ranks have ended
            torch.distributed.destroy_process_group()

    def compile(self, graph: Graph) -> Step:
        made = compiled(graph, self.runtime, prompts=self.prompts, announce=self.announce)
        self.blank = made.blank
        return made


class NeuronNativeRanks(ChecksNoise, RankedBackend):
    """`NeuronNativeBackend` on one core per rank of a sharded model; rank 0 is this process."""

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
        announce(f"{_preparation().step} {graph.name} on {self.group.degree} cores")
        self._member.announce = announce
        step = super().compile(graph, announce)
        return _Prepared(graph.name, step, blank=self._member.blank, announce=announce)

    def prepare(self) -> AbstractContextManager[None]:
        return _preparation().open()

    def read_state(self, state: Tensor) -> Tensor:
        """Return rank 0's value of a state: states that are read are the same on all ranks."""
        return state_on(self.stack, state)


def _quiet(_said: str) -> None: ...


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
