"""XLA: every step is lowered by torch_xla to one HLO module, compiled once and executed on the PJRT device.

The Neuron SDK (up to PyTorch 2.9) traces with torch_xla too, so its compiler gets the same modules. ``PJRT_DEVICE=CPU``
tests that the graphs are right; it is not a fast way to decode on a CPU. It requires a separate environment, with the
versions that the Neuron SDK pins: `make test-xla` builds it.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from paceline.core.errors import BackendError
from paceline.decoder.backends.base import Backend, Graph, Step
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.parallel.collectives import Collectives
from paceline.neuron import environment
from paceline.neuron.graph_product import xla_product
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import Lowered, TopK, lower, state_of


class XlaBackend(Backend):
    """Graphs compiled by XLA. Nothing is saved: XLA's CPU executables belong to the process."""

    name = "xla"
    device_state = True

    def __init__(self) -> None:
        self._device = device()
        self.kernels: Kernels = TraceableKernels()

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        announce(f"compiling {graph.name}")
        return _Executable(graph, self._device)

    def read_state(self, state: Tensor) -> Tensor:
        return self._device.copy_of(state).cpu()


class Device:
    """The process's one PJRT device, and the copies of weights and caches on it.

    A tensor of the host (weight or cache) has one copy for all graphs and decoders, as long as the tensor lives.
    """

    def __init__(self) -> None:
        self.library = _library()
        self.bridge: Any = self.library._XLAC
        self.torch: torch.device = self.library.device()
        self._copies = WeakTensorKeyDictionary()

    def copy_of(self, tensor: Tensor) -> Tensor:
        """Return the device's copy."""
        if tensor not in self._copies:
            self._copies[tensor] = tensor.detach().to(self.torch)
            self.library.sync()
        device_copy: Tensor = self._copies[tensor]
        return device_copy

    def update(self, tensor: Tensor, value: Tensor) -> None:
        """Make ``value`` the device's copy."""
        self._copies[tensor] = value

    def fallbacks(self) -> set[str]:
        """Return operations that torch_xla ran outside any graph since `reset_counters`: none is acceptable."""
        metrics = importlib.import_module("torch_xla.debug.metrics")
        return {name for name in metrics.counter_names() if name.startswith("aten::")}

    def reset_counters(self) -> None:
        """Reset the counters of fallbacks."""
        importlib.import_module("torch_xla.debug.metrics").clear_all()


@lru_cache(maxsize=1)
def device() -> Device:
    """Return this process's device: PJRT has one client.

    Raises:
        BackendError: torch_xla is missing or incompatible.
    """
    return Device()


class _Executable:
    """One compiled module: traced once, then run by its hash on the current state and inputs."""

    def __init__(self, graph: Graph, home: Device) -> None:
        self._home, self._name = home, graph.name
        self._lowered = lower(graph.name, graph.module, graph.example)
        self._host = state_of(graph.module, self._lowered)
        self._hash, self._sources = self._compile(graph.example)

    def _compile(self, example: tuple[Tensor, ...]) -> tuple[object, list[str | int | Tensor]]:
        """Compile the module -> its executable, and the source of each parameter: a state, an input, or a constant."""
        bridge = self._home.bridge
        state = {name: self._home.copy_of(tensor) for name, tensor in self._host.items()}
        inputs = [x.to(self._home.torch) for x in example]
        results = traced(self._home, self._lowered, state, inputs=inputs)
        origin: dict[int, str | int] = {bridge._xla_get_tensor_id(x): name for name, x in state.items()}
        origin |= {bridge._xla_get_tensor_id(x): place for place, x in enumerate(inputs)}
        numbers, values = bridge._get_tensors_xla_device_data_node(results)
        sources = [origin.get(number, value) for number, value in zip(numbers, values, strict=True)]
        graph_hash = bridge._get_graph_hash(results)
        bridge._xla_warm_up_cache(results, [])
        bridge._clear_pending_irs(str(self._home.torch))
        return graph_hash, sources

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        home = self._home
        here = [x.to(home.torch) for x in inputs]
        tensors = [self._value(source, here) for source in self._sources]
        results = home.bridge._run_cached_graph(self._hash, tensors)
        changed = self._lowered.changed
        for name, value in zip(changed, results, strict=False):
            home.update(self._host[name], value)
        return [x.cpu() for x in results[len(changed) :]]

    def _value(self, source: str | int | Tensor, inputs: list[Tensor]) -> Tensor:
        if isinstance(source, str):
            return self._home.copy_of(self._host[source])
        return inputs[source] if isinstance(source, int) else source


def hlo_results(lowered: Lowered, *, degree: int = 1) -> list[Tensor]:
    """Return a lowered step's results as lazy tensors, whose state and inputs are zeros: the Neuron compiler's input.

    ``degree``: number of replicas in its collectives.

    Raises:
        BackendError: torch_xla is missing, or an operation has no lowering, so that the step is not one graph.
    """
    home = device()
    examples = [node.meta["val"] for node in lowered.graph.graph.nodes if node.op == "placeholder"]
    zeros = [torch.zeros(x.shape, dtype=x.dtype).to(home.torch) for x in examples]
    home.library.sync()
    state = dict(zip(lowered.state, zeros, strict=False))
    ranks = XlaGroup(degree) if degree > 1 else None
    topk = partial(_custom_topk, home)
    return traced(home, lowered, state, inputs=zeros[len(lowered.state) :], ranks=ranks, topk=topk)


def hlo_module(lowered: Lowered, *, degree: int = 1) -> bytes:
    """Return `hlo_results` as the protobuf of an HLO module, before any optimisation."""
    results, home = hlo_results(lowered, degree=degree), device()
    module: bytes = home.bridge._get_xla_tensors_hlo_proto(results)
    home.bridge._clear_pending_irs(str(home.torch))
    return module


class XlaGroup:
    """XLA's collectives among replicas, for export only: as torch_xla lowers NxD's mappings."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self._bridge: Any = device().bridge
        self._groups = [list(range(degree))]

    def reduce(self, x: Tensor) -> Tensor:
        total: Tensor = self._bridge._xla_all_reduce("sum", x, 1.0, self._groups, False)
        return total

    def gather(self, x: Tensor) -> Tensor:
        every: Tensor = self._bridge._xla_all_gather(x.reshape(-1), 0, self.degree, self._groups, False, None, None)
        return every.reshape(self.degree, *x.shape)


def traced(
    home: Device,
    lowered: Lowered,
    state: dict[str, Tensor],
    *,
    inputs: list[Tensor],
    ranks: Collectives | None = None,
    topk: TopK | None = None,
) -> list[Tensor]:
    """Return changed state and outputs as lazy tensors, not yet computed.

    Raises:
        BackendError: torch_xla ran a part of the step outside the graph.
    """
    home.library.sync()
    home.reset_counters()
    with torch.no_grad():
        changed, outputs = lowered.run(state, inputs, ranks=ranks, topk=topk, product=xla_product)
    if strange := home.fallbacks():
        raise BackendError(
            f"torch_xla has no lowering for {', '.join(sorted(strange))}; rewrite it in neuron/lowering.py"
        )
    return [*changed.values(), *outputs]


def _custom_topk(home: Device, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Call the Neuron compiler's own top-k in its input module; it cannot run on a CPU."""
    shape = [*x.shape[:-1], count]
    outputs = home.bridge._xla_custom_call(
        [x], "AwsNeuronTopK", [shape, shape], [x.dtype, torch.int32], False, str(count), 0, {}
    )
    values, places = outputs
    return values, places


def _library() -> ModuleType:
    environment.default_pjrt_device()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch_xla's, about its own future
            torch_xla = importlib.import_module("torch_xla")
    except ImportError as error:
        raise BackendError(
            f"backend='xla' needs torch_xla, which cannot be imported ({error}); `make test-xla` builds an environment "
            "with torch==2.9.0 and torch_xla==2.9.0, or use backend='native'"
        ) from error
    if not hasattr(torch_xla, "device"):
        raise BackendError(
            "torch_xla: expected version 2.9.0, got an older one; install torch_xla==2.9.0 with torch==2.9.0"
        )
    return torch_xla
