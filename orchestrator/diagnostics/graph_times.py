"""How long each graph of a decoder takes on this machine, beside what arithmetic expects of it.

For the report of `paceline selftest`. Not here: the arithmetic (`paceline.diagnostics.round_cost`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from paceline.decoder.backends.neuron import engines
from paceline.decoder.backends.neuron.sdk import instance_family
from paceline.decoder.compile.step_work import step_work
from paceline.decoder.decoder import CompiledDecoder
from paceline.diagnostics.round_cost import expected_seconds
from paceline.placement.planning.instances import INSTANCES, Instance

CALLS = 10


@dataclass(frozen=True, slots=True)
class GraphTime:
    """One graph.

    name      its key
    seconds   of a call, inputs and outputs included: the median of some
    expected  by arithmetic; None where the chip's figures are not known
    """

    name: str
    seconds: float
    expected: float | None

    def __str__(self) -> str:
        beside = "" if self.expected is None else f" ({self.expected * 1e3:.2f} by arithmetic)"
        return f"{self.name} {self.seconds * 1e3:.2f} ms{beside}"


def this_instance() -> Instance | None:
    """The machine, if it has a chip whose engines have figures."""
    found = INSTANCES.get(instance_family())
    return found if found is not None and found.name.startswith(engines.CORE_V2) else None


def measure(
    decoder: CompiledDecoder, instance: Instance | None, *, clock: Callable[[], float] = perf_counter
) -> list[GraphTime]:
    """Call every graph that the decoder has made on inputs of its shapes. What its caches hold is lost."""
    found = []
    width = -(-decoder.config.vocab_size // decoder.options.layout.degree)
    for graph, step in decoder.graphs():
        step(*graph.example)  # a first call may load something
        seconds = []
        for _ in range(CALLS):
            begin = clock()
            step(*graph.example)
            seconds.append(clock() - begin)
        expected = None
        if instance is not None:
            work = step_work(graph.module, graph.example, width, tile=int(engines.TILE.value))
            expected = expected_seconds(work, instance)
        found.append(GraphTime(graph.name, median(seconds), expected))
    return found
