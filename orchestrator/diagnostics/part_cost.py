"""How long the two parts of a round take on Neuron, by arithmetic: drafting, and verification, each by itself.

A part is counted with one and with two layers, as in `paceline.diagnostics.round_cost`. Depth and slots come in
linearly, so that a grid of them needs its corners alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from paceline.core.acceptance.match import Match
from paceline.core.types import DraftShape
from paceline.decoder.backends.neuron import engines
from paceline.decoder.compile.step_work import Work, step_work
from paceline.diagnostics.round_cost import check_instance, times_of
from paceline.diagnostics.round_graphs import RoundSetup, body_of, memory_of
from paceline.placement.planning.instances import Instance
from paceline.target.steps import VerifyStep


@dataclass(frozen=True, slots=True)
class PartTime:
    """Seconds of one part of a round on the device, without the host's launch.

    ideal     memory or tensor engine alone, at the full bandwidth, and no collective
    expected  all engines one after the other, with collectives as they are assumed
    worst     the same with the slowest collectives that published figures allow
    """

    ideal: float
    expected: float
    worst: float

    def plus(self, other: PartTime, times: float = 1.0) -> PartTime:
        """Both, the other one so many times."""
        return PartTime(
            self.ideal + times * other.ideal,
            self.expected + times * other.expected,
            self.worst + times * other.worst,
        )


class PartTimes:
    """Times of one part at one degree, for any depth and number of slots: linear between and beyond the corners."""

    def __init__(
        self, setup: RoundSetup, instance: Instance, *, drafts: bool, depths: Sequence[int], slots: int
    ) -> None:
        check_instance(setup.degree, instance)
        self._depths = (depths[0], max(depths[-1], depths[0] + 1))
        self._slots = (1, slots) if slots > 1 else (1,)
        self._corners: Mapping[tuple[int, int], PartTime] = {
            (k, size): _part(replace(setup, k=k, slots=size), instance, drafts=drafts)
            for k, size in product(self._depths, self._slots)
        }

    def at(self, k: int, slots: int) -> PartTime:
        """At a depth and a number of slots."""
        low, high = self._depths
        x, most = (k - low) / (high - low), self._slots[-1]
        y = (slots - 1) / (most - 1) if most > 1 else 0.0
        found = PartTime(0.0, 0.0, 0.0)
        for (depth, size), time in self._corners.items():
            across = (y if size == most else 1 - y) if most > 1 else 1.0
            found = found.plus(time, (x if depth == high else 1 - x) * across)
        return found


def fits(setup: RoundSetup, instance: Instance, *, draft: bool, target: bool) -> bool:
    """Whether weights and caches of these models fit on each core."""
    needed = memory_of(setup.target, setup) if target else 0
    return needed + (setup.draft.memory(setup) if draft else 0) <= instance.memory


def _part(setup: RoundSetup, instance: Instance, *, drafts: bool) -> PartTime:
    one, two = (_work(setup, layers, drafts=drafts) for layers in (1, 2))
    layers = setup.draft.layers if drafts else setup.target.num_layers
    total = one.plus(two.plus(one, -1), layers - 1)
    times, collectives = times_of(total, instance), sum(total.collectives.values())
    busy = sum(times.values())
    return PartTime(
        max(times["memory"] * engines.BANDWIDTH_SHARE.value, times["tensor"]),
        busy + collectives * engines.COLLECTIVE.value,
        busy + collectives * engines.COLLECTIVE_SLOW.value,
    )


def _work(setup: RoundSetup, layers: int, *, drafts: bool) -> Work:
    with FakeTensorMode(allow_non_fake_inputs=True):
        body = body_of(setup.target, 1 if drafts else layers, setup)
        if drafts:
            step: nn.Module = setup.draft.step(body, setup, layers)
        else:
            shape = DraftShape.chain(setup.k)
            step = VerifyStep(body, setup.rows, draft_shape=shape, rule=Match(), kind=setup.kind)
    width = -(-setup.target.vocab_size // setup.degree)
    return step_work(step, _inputs(setup, drafts=drafts), width, tile=int(engines.TILE.value))


def _inputs(setup: RoundSetup, *, drafts: bool) -> tuple[Tensor, ...]:
    one = torch.ones(setup.slots, dtype=torch.int32)
    tokens = torch.ones(setup.slots, setup.k + 1, dtype=torch.int32)
    sampling = (torch.zeros(setup.slots, 4), torch.zeros(setup.slots, 4, dtype=torch.int32))
    if drafts:
        return (tokens, one, one, *sampling)
    drafted = (torch.ones(setup.slots, setup.k, dtype=torch.int32),) if setup.k else ()
    return (tokens, one, one, one, *sampling, *drafted)
