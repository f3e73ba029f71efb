"""The contract of a backend, and what it compiles. Which there are: `paceline.decoder.backends.registry`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from paceline.core.errors import ArtefactError, ConfigurationError
from paceline.core.types import MultiRoundLimits, RoundReport
from paceline.decoder.backends.registry import BACKENDS, check, why_not_quantized
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.parallel.collectives import Collectives, SingleRank
from paceline.decoder.weights.formats import E4M3_LARGEST
from paceline.decoder.weights.quantize import QuantizedTensor, Stored

Step = Callable[..., list[Tensor]]
"""A step that is ready to run: tensors in, a list of tensors out; state (weights, caches) stays inside."""


@runtime_checkable
class MultiRoundStep(Protocol):
    """A fused step that can run several rounds in one call, each on what the one before it committed.

    Its inputs are tokens, count and first row of a commit, limits, sampling params, seeds, and features if there are
    any. Its outputs are what the host is told about a round, then tokens, count, first row and features of the next
    commit, of the same shapes. Steps without this method run one round a call.
    """

    def run_rounds(
        self, inputs: list[Tensor], seconds: float, limits: MultiRoundLimits | None
    ) -> tuple[list[RoundReport], list[Tensor]]:
        """Run one round, and further ones as long as ``limits`` allows (None: no further one) and they fit into so many
        seconds. -> a report of each round, and what the last one committed; the call after the next overwrites that.
        """


@dataclass(frozen=True, slots=True)
class Graph:
    """A step, and what it is made ready for.

    key      which graph of its decoder this is
    module   the step; its parameters and buffers are the state, shared by all graphs of a decoder
    example  inputs of the shapes and types it will always get
    facts    everything it depends on besides the source: key, model, options, shapes
    """

    key: GraphKey
    module: nn.Module
    example: tuple[Tensor, ...]
    facts: dict[str, object]

    @property
    def name(self) -> str:
        """For people."""
        return str(self.key)


class Backend(Protocol):
    """Makes steps ready to run: records or compiles them, or runs them as they are written."""

    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def group(self) -> Collectives:
        """The ranks that the graphs run on."""

    @property
    def device_state(self) -> bool:
        """Whether inputs and outputs are copied to and from a device: what only the next graph reads is then kept
        there.
        """

    @property
    def draft_lengths(self) -> tuple[int, ...]:
        """Lengths of drafts that k="auto" chooses among, 0 for rounds without one; () = the usual ones."""

    def read_state(self, state: Tensor) -> Tensor:
        """A copy of what a state of its graphs holds now."""

    def kv_buckets(self, requested: tuple[int, ...]) -> tuple[int, ...]:
        """The buckets of the cache length that this backend makes graphs for, out of the requested ones."""

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        """Make a graph ready to run, or take it from the cache. ``announce`` is called before anything slow."""

    def attach(self, body: nn.Module, path: str) -> None:
        """Called once, before the first graph, with rank 0's `ModelWithCache` and the folder of the checkpoint."""

    def divide(self, first: nn.Module, others: Sequence[nn.Module]) -> None:
        """Give ranks 1 and up what they have in the place of the tensors of rank 0's module ``first``, which is part of
        steps that come: their own modules, alike but for the numbers. A model's own body is not for here.
        """

    def close(self) -> None:
        """Give back what is held outside of this process."""

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        """Copy what was compiled for these graphs into a folder."""

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        """Take compiled graphs from a folder; ``facts`` are those of the decoder."""


@runtime_checkable
class ChecksNoise(Protocol):
    """A backend on whose machines the noise has to be seen to be right before requests may sample.

    Others compute integers as PyTorch does, and the test suite shows it.
    """

    def sampling_refusal(self) -> str | None:
        """Why requests that sample are refused on this machine, with what to do; None if they are not."""

    def record_noise_check(self, *, passed: bool) -> None:
        """Keep the outcome of the check of the noise (`paceline selftest`) for later processes."""


@runtime_checkable
class PreparesGraphs(Protocol):
    """A backend that does better where it knows all graphs before it runs one."""

    def prepare(self) -> AbstractContextManager[None]:
        """Inside, steps are made and give zeros of their shapes in place of results; at the end they are compiled and
        loaded. May be entered again inside.

        Raises:
            BackendError: at the end, if some graphs cannot be used. The others can.
        """


def compiles(backend: Backend) -> bool:
    """Whether its graphs take long to make; a backend without a row may."""
    return backend.name not in BACKENDS or BACKENDS[backend.name].compiles


def prepare(backend: Backend) -> AbstractContextManager[None]:
    """Where graphs are asked for ahead of their first use, by calls whose results mean nothing."""
    return backend.prepare() if isinstance(backend, PreparesGraphs) else nullcontext()


def sampling_refusal(backend: Backend) -> str | None:
    """Why requests that sample are refused on a backend, with what to do; None if they are not."""
    return backend.sampling_refusal() if isinstance(backend, ChecksNoise) else None


class LocalBackend:
    """Defaults: one rank, whose graphs work on this process's own tensors, and nothing to save.

    A backend on top of it has a ``name``, ``kernels`` and ``compile``.
    """

    name = "local"
    group: Collectives = SingleRank()
    device_state = False
    draft_lengths: tuple[int, ...] = ()

    def read_state(self, state: Tensor) -> Tensor:
        return state.clone()

    def kv_buckets(self, requested: tuple[int, ...]) -> tuple[int, ...]:
        return requested

    def attach(self, body: nn.Module, path: str) -> None:
        """There are no other ranks."""

    def divide(self, first: nn.Module, others: Sequence[nn.Module]) -> None:
        """There are no other ranks."""

    def close(self) -> None:
        """Nothing is held elsewhere."""

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        raise ArtefactError(f"backend={self.name!r} has no compiled graphs to save; use one that has: {_savers()}")

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        raise ArtefactError(f"backend={self.name!r} cannot load compiled graphs; use one that can: {_savers()}")


def check_formats(name: str, weights: Iterable[Stored]) -> None:
    """Raise ConfigurationError if a backend cannot run weights as they were stored, whatever was asked for."""
    row, packed = BACKENDS[name], [one for one in weights if isinstance(one, QuantizedTensor)]
    for form in {one.format.value for one in packed}:
        if reason := why_not_quantized(row, form):
            raise ConfigurationError(reason)
    if not row.e4m3 and any(one.beyond for one in packed):
        raise ConfigurationError(
            f"backend={name!r} has no numbers above {E4M3_LARGEST:.0f} in 8 bits of e4m3, and this checkpoint has: "
            "they would be infinity or NaN; load it with quantization='fp8_e4m3', which halves the numbers of such "
            "rows and doubles their scales"
        )


def make(name: str, degree: int = 1, quantization: str | None = None, *, kv_cache_dtype: str | None = None) -> Backend:
    """A new backend, for a model on so many ranks with matrices and a cache in those formats.

    Raises:
        ConfigurationError: as `registry.check`.
    """
    row = check(name, degree, quantization, kv_cache_dtype=kv_cache_dtype)
    module, _, attribute = (row.divided if degree > 1 else row.path).partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    backend: Backend = kind(degree) if degree > 1 else kind()
    return backend


def _savers() -> str:
    return ", ".join(row.name for row in BACKENDS.values() if row.saves)
