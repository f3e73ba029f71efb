"""The contract of a backend, and the graph that it compiles. Table of backends:
`paceline.decoder.backends.registry`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from paceline.core.errors import ArtefactError, ConfigurationError
from paceline.core.types import RoundLimits, RoundReport
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
    """A fused step that can run several rounds in one call, each on the commit of the one before it.

    Its inputs are tokens, count and first row of a commit, limits, sampling params, seeds, and features if any. Its
    outputs are the report of a round to the host, then tokens, count, first row and features of the next commit, of the
    same shapes. Steps without this method run one round per call.
    """

    def run_rounds(
        self, inputs: list[Tensor], seconds: float, limits: RoundLimits
    ) -> tuple[list[RoundReport], list[Tensor]]:
        """Run one round, then further rounds while ``limits`` allow them and they fit into ``seconds``.

        Returns the report of each round and the commit of the last one, which the next call but one overwrites.
        """


@dataclass(frozen=True, slots=True)
class Graph:
    """A step, with what a backend needs to compile it.

    key      identity of the graph within its decoder
    module   the step; its parameters and buffers are the state, shared by all graphs of a decoder
    example  inputs of the shapes and types of every call
    facts    everything it depends on except the source: key, model, options, shapes
    """

    key: GraphKey
    module: nn.Module
    example: tuple[Tensor, ...]
    facts: dict[str, object]

    @property
    def name(self) -> str:
        """Name for messages."""
        return str(self.key)


class Backend:
    """Compiles steps, records them, or runs them as they are written.

    The defaults are those of one rank whose graphs work on this process's own tensors, with nothing to save. A backend
    adds ``name``, ``kernels`` and `compile`.

    group          the ranks that the graphs run on
    device_state   whether inputs and outputs are copied to and from a device: data that only the next graph reads is
                   then kept on it
    draft_lengths  draft lengths among which k="auto" chooses, 0 for rounds without a draft; () = the default lengths
    """

    name: str
    kernels: Kernels
    group: Collectives = SingleRank()
    device_state = False
    draft_lengths: tuple[int, ...] = ()

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        """Compile a graph, or load it from the cache. ``announce`` is called before anything slow."""
        raise NotImplementedError

    def prepare(self) -> AbstractContextManager[None]:
        """Context for requesting graphs before their first use; results of calls in it are meaningless. May be nested.

        A backend that compiles better if it knows all graphs compiles and loads them at its end.

        Raises:
            BackendError: at the end, if some graphs cannot be used. The other graphs can.
        """
        return nullcontext()

    def read_state(self, state: Tensor) -> Tensor:
        """Return a copy of the current value of a state of its graphs."""
        return state.clone()

    def kv_buckets(self, requested: tuple[int, ...]) -> tuple[int, ...]:
        """Return the buckets of the cache length for which this backend makes graphs, out of the requested ones."""
        return requested

    def attach(self, body: nn.Module, path: str) -> None:
        """Accept rank 0's `ModelWithCache` and the checkpoint folder; called once, before the first graph."""

    def divide(self, first: nn.Module, others: Sequence[nn.Module]) -> None:
        """Give ranks 1 and up ``others`` in place of rank 0's ``first``, a module of later steps and not the model's
        body.
        """

    def close(self) -> None:
        """Release resources held outside this process."""

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        """Copy the compiled files of these graphs into a folder."""
        raise ArtefactError(f"backend: expected one that saves compiled graphs, got {self.name!r}; use {_savers()}")

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        """Load compiled graphs from a folder; ``facts`` are those of the decoder."""
        raise ArtefactError(f"backend: expected one that loads compiled graphs, got {self.name!r}; use {_savers()}")

    def sampling_refusal(self) -> str | None:
        """Return why sampling requests are rejected on this machine, with a remedy; None if they are accepted.

        A backend whose device may compute the noise's integers otherwise rejects them until that was checked.
        """
        return None

    def record_noise_check(self, *, passed: bool) -> bool:
        """Store the result of the noise check (`paceline selftest`) for later processes; return whether it matters."""
        return False


def compiles(backend: Backend) -> bool:
    """Return whether graphs take long to compile; assumed for a backend without a row."""
    return backend.name not in BACKENDS or BACKENDS[backend.name].compiles


def check_formats(name: str, weights: Iterable[Stored]) -> None:
    """Raise ConfigurationError if a backend cannot run the stored format of the weights, regardless of options."""
    row, packed = BACKENDS[name], [one for one in weights if isinstance(one, QuantizedTensor)]
    for form in {one.format.value for one in packed}:
        if reason := why_not_quantized(row, form):
            raise ConfigurationError(reason)
    if not row.e4m3 and any(one.beyond for one in packed):
        raise ConfigurationError(
            f"backend: expected weights of at most {E4M3_LARGEST:.0f} in fp8_e4m3, got larger ones, which {name!r} "
            "reads as infinity or NaN; load with quantization='fp8_e4m3', which halves the values of such rows and "
            "doubles their scales"
        )


def make(name: str, degree: int = 1, quantization: str | None = None, *, kv_cache_dtype: str | None = None) -> Backend:
    """Create a backend for a model on ``degree`` ranks with matrices and cache in the given formats; errors as `check`."""
    row = check(name, degree, quantization, kv_cache_dtype=kv_cache_dtype)
    module, _, attribute = (row.divided if degree > 1 else row.path).partition(":")
    kind = getattr(importlib.import_module(module), attribute)
    backend: Backend = kind(degree) if degree > 1 else kind()
    return backend


def _savers() -> str:
    return ", ".join(row.name for row in BACKENDS.values() if row.saves)
