"""AWS Neuron through PyTorch/XLA: graphs traced and compiled by neuronx_distributed, sharing weights and caches.

All graphs of a process live in one `NxDModel`, because only there do several graphs share one set of weights and one
state on the device; `torch_neuronx.trace` gives every graph a separate state. Written against the documented interface
and the source of neuronx_distributed (2026-04); it has run on a fake SDK only, never on a chip. `paceline.neuron.chip`
manages the device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import ArtefactError, BackendError
from paceline.decoder import environment
from paceline.decoder.backends.base import Backend, Graph, Step
from paceline.decoder.compile import cache
from paceline.decoder.decoder import ModelWithCache
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.parallel.collectives import Collectives, DeviceGroup, SingleRank
from paceline.neuron import graph_lint, hlo_lint, prompt_attention
from paceline.neuron.chip import DeviceProcess, Entry, Stateful, chip, others
from paceline.neuron.chips import DRAFT_LENGTHS
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import Lowered, lower, state_of
from paceline.neuron.noise_record import ChecksNoise


class NeuronBackend(ChecksNoise, Backend):
    """Graphs on the first NeuronCores that this process sees, one per rank of the model."""

    name = "neuron"
    device_state = True
    draft_lengths = DRAFT_LENGTHS

    def __init__(self, degree: int = 1) -> None:
        self._chip = chip()
        self._chip.claim(degree)
        self.stack = self._chip.sdk
        self._prompts = self._chip.sdk.prompts()
        self.kernels: Kernels = TraceableKernels(self._prompts)
        self.group: Collectives = SingleRank() if degree == 1 else DeviceGroup(degree)
        self._root = environment.cache_root() / "neuron"
        self._shipped: Path | None = None
        self._folders: dict[Path, None] = {}  # folders of this decoder's graphs, in order of creation or loading

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        """Trace, and compile unless the graph is in the cache. The device loads it at its first call.

        Raises:
            BackendError: the graph breaks a rule of the compiler, as lowered or as traced by the SDK, or the compiler
                rejects it.
        """
        graph = replace(graph, example=tuple(x.contiguous() for x in graph.example))
        lowered = lower(graph.name, graph.module, graph.example)
        if news := self._prompts.news():
            announce(f"{graph.name}: {news}")
        if found := graph_lint.lint(lowered):
            raise BackendError(f"{graph.name} cannot be compiled for Neuron: {'; '.join(map(str, found[:3]))}")
        traced = self._chip.trace(
            Stateful(
                lowered,
                self._chip.names.of(graph.module, lowered),
                self._chip.ranks,
                attention=prompt_attention.through_xla(self._prompts.cores),
            ),
            graph,
        )
        _check(graph.name, traced.hlo, announce)
        e4m3 = any(state.dtype is torch.float8_e4m3fn for state in state_of(graph.module, lowered).values())
        flags = self._chip.sdk.flags(prompt=graph.key.is_prompt, e4m3=e4m3)
        facts = self._facts({**graph.facts, "hlo": _digest(traced.hlo), "flags": flags})

        def folder(build: Callable[[Path], None]) -> Path:
            found = cache.find(self._shipped, facts) if self._shipped else None
            if found is None:
                if cache.find(self._root, facts) is None:
                    announce(f"compiling {graph.name} for {self._chip.sdk.chip.value}")
                found = cache.ensure(self._root, facts, build)
            self._folders[found] = None
            return found

        return _Step(self._chip, self._chip.add(Entry(graph.key, traced, flags, folder, announce)), lowered)

    def prepare(self) -> AbstractContextManager[None]:
        """Context in which graphs are compiled in parallel, and loaded at its end."""
        return self._chip.prepare()

    def read_state(self, state: Tensor) -> Tensor:
        return self._chip.value(state)

    def attach(self, body: nn.Module, path: str) -> None:
        """Name the model's tensors, and load the other cores' shards of it."""
        assert isinstance(body, ModelWithCache)
        self._chip.names.register(body, body.config.fingerprint()[:8])
        if self.group.degree > 1:
            self._chip.names.divide(body, others(body, path))

    def divide(self, first: nn.Module, others: Sequence[nn.Module]) -> None:
        """Register the other ranks' tensors in place of rank 0's."""
        self._chip.names.divide(first, others)

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        """Copy every graph of this decoder."""
        if not self._folders:
            raise ArtefactError("save: expected graphs compiled for Neuron, got none; call compile() first")
        for path in self._folders:
            cache.copy(path, folder)

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        """Load compiled graphs from a folder; those that do not fit are compiled."""
        if not any(folder.glob(f"*/{cache.MANIFEST}")):
            raise ArtefactError(
                f"{folder}: expected compiled graphs, got none; write them with decoder.save({str(folder)!r})"
            )
        self._shipped = folder

    def _facts(self, facts: dict[str, object]) -> dict[str, object]:
        sdk = self._chip.sdk.facts()
        return {"backend": self.name, "source": cache.source_hash(), "torch": torch.__version__, **sdk, **facts}


class _Step:
    """One graph. While graphs are prepared it does not run: its results are zeros of their shapes."""

    def __init__(self, chip: DeviceProcess, key: str, lowered: Lowered) -> None:
        self._chip, self._key, self._lowered = chip, key, lowered

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        if self._chip.preparing:
            return self._lowered.blank()
        return self._chip.run(self._key, *inputs)


def _check(name: str, module: Any, announce: Callable[[str], None]) -> None:
    """Search the traced module for operations that the compiler is documented to reject, or to compute differently.

    Operations that no document mentions are only logged.
    """
    found = hlo_lint.lint(hlo_lint.module_of(module))
    if refused := [one for one in found if one.rule not in hlo_lint.UNDECIDED]:
        raise BackendError(f"{name} cannot be compiled for Neuron as it was traced: {'; '.join(map(str, refused[:3]))}")
    if found:
        announce(f"{name} may not compile for Neuron: {'; '.join(map(str, found[:3]))}")


def _digest(module: Any) -> str:
    """Return a hash of the traced module: a compiled graph takes its weights by their positions in exactly that module.

    A protobuf's maps are unordered, so they are written in a fixed order.
    """
    return hashlib.sha256(module.SerializeToString(deterministic=True)).hexdigest()
