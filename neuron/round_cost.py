"""Cost of a round of speculation on Neuron at real size, from the graphs it would compile: no weights, no chip.

A round of a pair is counted with one and with two layers of each model, which gives the cost of a layer and the rest.
Times are arithmetic from published figures (`paceline.neuron.chips`), of which two are fitted to AWS's published
decoding; none was measured by us.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.core.acceptance.match import Match
from paceline.core.errors import ConfigurationError
from paceline.core.types import DraftShape
from paceline.decoder.backends.base import Graph
from paceline.decoder.parallel import sharding
from paceline.neuron import chips
from paceline.neuron.round_graphs import (
    CHUNK,
    RoundSetup,
    body_of,
    model_memory,
    prefill_step,
    round_features,
    round_inputs,
)
from paceline.neuron.sdk import instance_family
from paceline.neuron.step_work import Work, step_work
from paceline.placement.planning.instances import INSTANCES, Instance
from paceline.target.steps import VerifyStep

REST = "embedding, head and sampler"


def round_cost(setup: RoundSetup, instance: Instance) -> dict[str, object]:
    """Return figures of a round, as plain values: milliseconds by part and resource, and the exceeded limits.

    Raises:
        ConfigurationError: the models cannot be sharded in this way, or the chip or the weights' format is unknown.
    """
    _check(setup, instance)
    parts = _parts(setup)
    rest = parts[REST]
    total = Work(rest.rows)
    for part in parts.values():
        total = total.plus(part)
    times = {name: _times_of(work, instance) for name, work in parts.items()}
    sampler = sum(times[REST][name] for name in ("vector", "scalar", "gather"))
    busy = sum(sum(part.values()) for part in times.values())
    collectives = sum(total.collectives.values())
    chunk, prefill = _prefill(setup, instance)
    expected = busy + collectives * chips.COLLECTIVE.value + chips.LAUNCH.value + _row_seconds(setup)
    slower = collectives * (chips.COLLECTIVE_SLOW.value - chips.COLLECTIVE.value)
    memory = model_memory(setup.target, setup) - setup.saved(setup.target.num_layers)
    memory += setup.draft.memory(setup) if setup.k else 0
    ideal = sum(max(part["memory"] * chips.BANDWIDTH_SHARE.value, part["tensor"]) for part in times.values())
    return {
        "instance": instance.name,
        "tp_degree": setup.degree,
        "k": setup.k,
        "sampling": setup.kind,
        "batch_size": setup.slots,
        "computed_slots": setup.batch or setup.slots,
        "context": setup.rows,
        "quantization": setup.quantization,
        "padding": _padding(setup),
        "round": {
            "ideal_ms": round(ideal * 1e3, 3),
            "expected_ms": round(expected * 1e3, 3),
            "worst_ms": round((expected + slower) * 1e3, 3),
            "sampler_share": round(sampler / expected, 4),
            "largest_gather": total.rows.gathered,
            "bytes_read": int(total.read),
            "bytes_widened": int(total.widened),
            "operations": int(total.operations),
            "instructions": int(total.tiles),
            "products": {name: int(count) for name, count in sorted(total.products.items())},
            "passes_over_vocabulary": round(rest.rows.passes + rest.rows.reductions, 1),
            "top_k_over_vocabulary": round(rest.rows.topk, 1),
            "collectives": _collectives(total),
            "memory_per_core": memory,
        },
        "prefill": {"chunk": chunk, "expected_ms": round(prefill * 1e3, 3)},
        "parts_ms": {
            name: {kind: round(seconds * 1e3, 3) for kind, seconds in part.items()}
            for name, part in sorted(times.items(), key=lambda item: -sum(item[1].values()))
        },
        "over_limits": _over(total, memory, instance),
        "sources": {
            "rates of the engines": chips.ENGINES[chip_in(instance)].source,
            **{figure.what: figure.source for figure in _FIGURES},
        },
    }


def _padding(setup: RoundSetup) -> dict[str, dict[str, list[int]]]:
    """Return the padding of both models: per quantity, the number of the model and the one computed."""
    target = sharding.padding(setup.target, setup.degree)
    draft = setup.draft.padding(setup.degree) if setup.k else {}
    return {
        name: {what: list(both) for what, both in filled.items()}
        for name, filled in (("target", target), ("draft", draft))
    }


def _check(setup: RoundSetup, instance: Instance) -> None:
    """Raise ConfigurationError unless the chip and the weights' format have figures, and the degree is possible."""
    chip_in(instance)
    degree = setup.degree
    if setup.quantization not in (None, "int8"):
        raise ConfigurationError(
            f"quantization: expected int8, got {setup.quantization!r}; use it, or omit it for 16 bits"
        )
    if degree not in instance.degrees:
        degrees = ", ".join(map(str, instance.degrees))
        raise ConfigurationError(
            f"tp_degree: expected one of {degrees} on {instance.name}, got {degree}; use one of them"
        )


def chip_in(instance: Instance) -> chips.Chip:
    """Return an instance's chip.

    Raises:
        ConfigurationError: it has no Neuron chip.
    """
    if chip := chips.chip_of(instance.name):
        return chip
    known = ", ".join(chip.value for chip in chips.Chip)
    raise ConfigurationError(f"instance: expected one of {known}, got {instance.name}; use one of them")


_FIGURES = (
    chips.GATHERED,
    chips.COLLECTIVE,
    chips.COLLECTIVE_SLOW,
    chips.LAUNCH,
    chips.ROW,
    chips.BANDWIDTH_SHARE,
    chips.MAX_INSTRUCTIONS,
    chips.TILE,
)


def _row_seconds(setup: RoundSetup) -> float:
    return setup.k * (setup.batch or setup.slots) * chips.ROW.value


def expected_seconds(work: Work, instance: Instance) -> float:
    """Return the seconds of one call: engines one after the other, collectives, and the host."""
    busy = sum(_times_of(work, instance).values())
    return busy + sum(work.collectives.values()) * chips.COLLECTIVE.value + chips.LAUNCH.value


def expected_here() -> Callable[[Graph, int], float] | None:
    """Return `expected_seconds` of a graph on this machine; None if its chip has no figures."""
    here = INSTANCES.get(instance_family())
    if here is None or chips.chip_of(here.name) is None:
        return None

    def expected(graph: Graph, width: int) -> float:
        return expected_seconds(_counted(graph.module, graph.example, width), here)

    return expected


def _times_of(work: Work, instance: Instance) -> dict[str, float]:
    """Return seconds by resource, each separately; a widened weight is read twice and written at twice its size."""
    narrow = sum(count for name, count in work.products.items() if name != "float32")
    engines = chips.ENGINES[chip_in(instance)]
    return {
        "memory": (work.read + 4 * work.widened) / instance.bandwidth / chips.BANDWIDTH_SHARE.value,
        "tensor": narrow / engines.tensor_16 + work.products["float32"] / engines.tensor_32,
        "vector": work.vector / engines.vector,
        "scalar": work.scalar / engines.scalar,
        "gather": work.gathered / chips.GATHERED.value,
    }


def _over(work: Work, memory: int, instance: Instance) -> list[str]:
    found = []
    if memory > instance.memory:
        found.append(f"memory: {memory / 2**30:.1f} GiB a core of {instance.memory / 2**30:.0f}")
    if work.tiles > chips.MAX_INSTRUCTIONS.value:
        found.append(f"instructions: about {work.tiles:.0f} of {chips.MAX_INSTRUCTIONS.value:.0f}")
    if work.widened:
        found.append(f"widened weights: {work.widened:.0f} bytes per round")
    return found


def _collectives(work: Work) -> list[dict[str, object]]:
    """Return collectives by name and size, the most frequent first."""
    return [
        {"name": name, "bytes": size, "count": int(count)} for (name, size), count in work.collectives.most_common()
    ]


def _parts(setup: RoundSetup) -> dict[str, Work]:
    """Split a round's work by part. Layers are alike: one and two of them give the cost of each."""
    target, rest = _layers(setup, drafts=False)
    parts = {"target layers": target, REST: rest}
    if setup.k and setup.draft.layers == 1:
        parts["draft head"] = _work(setup, 1, drafts=True)
    elif setup.k:
        parts["draft layers"], more = _layers(setup, drafts=True)
        parts[REST] = rest.plus(more)
    return parts


def _layers(setup: RoundSetup, *, drafts: bool) -> tuple[Work, Work]:
    """Return the work of all layers of the draft, or of the target in a verification, and of what else there is."""
    one, two = (_work(setup, layers, drafts=drafts) for layers in (1, 2))
    layer = two.plus(one, -1)
    layers = setup.draft.layers if drafts else setup.target.num_layers
    return one.plus(one, -1).plus(layer, layers), one.plus(layer, -1)


def _prefill(setup: RoundSetup, instance: Instance) -> tuple[int, float]:
    """Return the tokens of a prompt's chunk, and the seconds of the target's graph for it."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        made = [prefill_step(setup, layers) for layers in (1, 2)]
    one, two = (counted(setup, *each) for each in made)
    total = one.plus(two.plus(one, -1), setup.target.num_layers - 1)
    total.read -= setup.saved(setup.target.num_layers)
    return min(CHUNK, setup.rows), expected_seconds(total, instance)


def counted(setup: RoundSetup, step: nn.Module, inputs: Sequence[Tensor]) -> Work:
    """Count the work of one step of this round on one core."""
    return _counted(step, inputs, -(-setup.target.vocab_size // setup.degree))


def _counted(step: nn.Module, inputs: Sequence[Tensor], width: int) -> Work:
    return step_work(step, inputs, width, tile=int(chips.TILE.value))


def to_json(found: Mapping[str, object]) -> str:
    """Return one line of JSON."""
    return json.dumps(found)


@dataclass(frozen=True, slots=True)
class PartTime:
    """Seconds of one part of a round on the device, without the host's launch.

    ideal     memory or tensor engine only, at the full bandwidth, and no collective
    expected  all engines one after the other, with the assumed collectives
    worst     the same with the slowest collectives that published figures allow
    """

    ideal: float
    expected: float
    worst: float

    def plus(self, other: PartTime, times: float = 1.0) -> PartTime:
        """Add ``times`` times another part."""
        return PartTime(
            self.ideal + times * other.ideal,
            self.expected + times * other.expected,
            self.worst + times * other.worst,
        )


class PartTimes:
    """Times of one part of a round at one degree: drafting only, or verification only.

    For any depth and number of slots: linear between and beyond the corners, so that a grid needs only these. A part is
    counted with one and with two layers, like a round.
    """

    def __init__(
        self, setup: RoundSetup, instance: Instance, *, drafts: bool, depths: Sequence[int], slots: int
    ) -> None:
        _check(setup, instance)
        self._depths = (depths[0], max(depths[-1], depths[0] + 1))
        self._slots = (1, slots) if slots > 1 else (1,)
        self._corners: Mapping[tuple[int, int], PartTime] = {
            (k, size): _part(replace(setup, k=k, slots=size), instance, drafts=drafts)
            for k, size in product(self._depths, self._slots)
        }

    def at(self, k: int, slots: int) -> PartTime:
        """Return the time at a depth and a number of slots."""
        low, high = self._depths
        x, most = (k - low) / (high - low), self._slots[-1]
        y = (slots - 1) / (most - 1) if most > 1 else 0.0
        found = PartTime(0.0, 0.0, 0.0)
        for (depth, size), time in self._corners.items():
            across = (y if size == most else 1 - y) if most > 1 else 1.0
            found = found.plus(time, (x if depth == high else 1 - x) * across)
        return found


def fits(setup: RoundSetup, instance: Instance, *, draft: bool, target: bool) -> bool:
    """Return whether weights and caches of these models fit on each core."""
    needed = model_memory(setup.target, setup) - setup.saved(setup.target.num_layers) if target else 0
    return needed + (setup.draft.memory(setup) if draft else 0) <= instance.memory


def _part(setup: RoundSetup, instance: Instance, *, drafts: bool) -> PartTime:
    if drafts and setup.draft.layers == 1:
        total = _work(setup, 1, drafts=True)
    else:
        layers, rest = _layers(setup, drafts=drafts)
        total = layers.plus(rest)
    times, collectives = _times_of(total, instance), sum(total.collectives.values())
    busy = sum(times.values()) + (0.0 if drafts else _row_seconds(setup))
    return PartTime(
        max(times["memory"] * chips.BANDWIDTH_SHARE.value, times["tensor"]),
        busy + collectives * chips.COLLECTIVE.value,
        busy + collectives * chips.COLLECTIVE_SLOW.value,
    )


def _work(setup: RoundSetup, layers: int, *, drafts: bool) -> Work:
    """Count drafting with ``layers`` layers, or verification by as many."""
    reads = setup.draft.features if setup.k else None
    tokens, count, row, limit, *sampling = round_inputs(setup)
    with FakeTensorMode(allow_non_fake_inputs=True):
        body = body_of(setup.target, 1 if drafts else layers, setup)
        if drafts:
            step: nn.Module = setup.draft.step(body, setup, layers)
            given = (tokens, count, row, *sampling, *((round_features(setup, reads),) if reads else ()))
        else:
            shape = DraftShape.chain(setup.k)
            step = VerifyStep(body, setup.rows, draft_shape=shape, rule=Match(), kind=setup.kind, reads=reads)
            given = (tokens, count, row, limit, *sampling, *((tokens[:, 1:],) if setup.k else ()))
    work = counted(setup, step, given)
    work.read -= 0 if drafts else setup.saved(layers)
    return work
