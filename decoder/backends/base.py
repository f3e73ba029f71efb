"""The contract of a backend and what it compiles; `make` picks one by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor, nn

from paceline.core.errors import ConfigurationError
from paceline.core.types import MultiRoundLimits, RoundReport
from paceline.decoder.graph_key import GraphKey
from paceline.decoder.kernels.torch_kernels import Kernels
from paceline.decoder.parallel.collectives import Collectives, SingleRank

if TYPE_CHECKING:
    from paceline.decoder.decoder import CompiledDecoder

BACKENDS = {
    "eager": ("paceline.decoder.backends.eager", "EagerBackend"),
    "inductor": ("paceline.decoder.backends.inductor", "InductorBackend"),
    "xla": ("paceline.decoder.backends.xla", "XlaBackend"),
    "neuron": ("paceline.decoder.backends.neuron.backend", "NeuronBackend"),
}
DIVIDED = {
    "eager": ("paceline.decoder.backends.ranked", "RankedBackend"),
    "neuron": ("paceline.decoder.backends.neuron.backend", "NeuronBackend"),
}
"""Backends that can run a model divided over ranks, of which they are told the number."""

Step = Callable[..., list[Tensor]]
"""A compiled step: tensors in, a list of tensors out; state (weights, caches) stays inside."""


Again = Callable[[list[Tensor], float, MultiRoundLimits | None], tuple[list[RoundReport], list[Tensor]]]
"""Rounds of a fused step one behind the other: its inputs, seconds that they have to fit into (the first runs anyway),
and what lets another one follow (None: nothing) -> what each of them did, and what the last one made.
"""


@runtime_checkable
class Repeats(Protocol):
    """A step that can run again on what it made without coming back in between, if it is a fused one.

    Its inputs are tokens, count and start of a commit, limits, knobs, keys, and features if there are any; its outputs
    what the host is told of a round, then tokens, count, start and features of the next commit, of the same shapes.
    """

    def again(
        self, inputs: list[Tensor], seconds: float, room: MultiRoundLimits | None
    ) -> tuple[list[RoundReport], list[Tensor]]:
        """An `Again`. What the last round makes is overwritten by the call after the next."""


@dataclass(frozen=True, slots=True)
class Graph:
    """One thing to compile.

    key      which graph of its decoder this is
    module   the step; its parameters and buffers are the state, shared by all graphs of a decoder
    example  inputs of the shapes and types it will always get
    facts    all it depends on besides the source: model, options, shapes
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
    """Compiles steps."""

    @property
    def name(self) -> str: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def group(self) -> Collectives:
        """The ranks that the graphs run on."""

    @property
    def device_state(self) -> bool:
        """Whether inputs and outputs are copied, so that what only the next graph reads had better be a state."""

    def read_state(self, state: Tensor) -> Tensor:
        """What a state of its graphs holds now, copied."""

    def kv_buckets(self, wanted: tuple[int, ...]) -> tuple[int, ...]:
        """The buckets of the cache length this backend makes graphs for, out of those wanted."""

    def compile(self, graph: Graph, announce: Callable[[str], None]) -> Step:
        """Compile, or take from the cache. ``announce`` is called before anything slow."""

    def attach(self, decoder: CompiledDecoder, path: str) -> None:
        """Told once, before the first graph, whose graphs it compiles, and where the other ranks find their parts."""

    def close(self) -> None:
        """Give back what is held outside of this process."""

    def save(self, graphs: Sequence[Graph], folder: Path) -> None:
        """Copy what was compiled for these graphs into a folder."""

    def load(self, folder: Path, facts: dict[str, object]) -> None:
        """Take compiled graphs from a folder; ``facts`` are those of the decoder."""


class OnHost:
    """What a backend has to say whose graphs work on the host's own tensors."""

    device_state = False

    def read_state(self, state: Tensor) -> Tensor:
        return state.clone()


class OneRank:
    """What a backend of one rank has to say about ranks."""

    group: Collectives = SingleRank()

    def attach(self, decoder: CompiledDecoder, path: str) -> None:
        """There are no others."""

    def close(self) -> None:
        """Nothing is held elsewhere."""


def make(name: str, degree: int = 1) -> Backend:
    """A new backend, for a model on so many ranks.

    Raises:
        ConfigurationError: no backend has this name, or it has one rank only.
    """
    if not isinstance(name, str) or name not in BACKENDS:
        raise ConfigurationError(f"backend={name!r} is unknown; use one of {', '.join(BACKENDS)}")
    if degree > 1 and name not in DIVIDED:
        raise ConfigurationError(
            f"backend={name!r} runs on one rank: its compiled graphs call kernels that know no other; for tp_degree="
            f"{degree} use one of {', '.join(DIVIDED)}"
        )
    module, attribute = BACKENDS[name] if degree == 1 else DIVIDED[name]
    kind = getattr(importlib.import_module(module), attribute)
    made: Backend = kind() if degree == 1 else kind(degree)
    return made
