"""Fused rounds, one in a graph or several, where commits stay on the device and the host looks once for all.

Several are for backends where a call of a graph costs more than the rounds that may be in vain
(`Backend.rounds_in_graph`). Such a graph ends no text, so it runs only where no text can reach a length that ends it,
or that needs another graph. A text that ends with an id goes on in its slot until the last of the rounds, and nobody
reads what it gains. Not here: rounds in a row that the host's processor runs (`paceline.decoder.native.rounds`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor, nn

from paceline.core.types import MultiRoundLimits, RoundReport, SamplingTensors
from paceline.decoder.backends.base import Step
from paceline.decoder.batch_buckets import first_slots, for_all_slots, idle_tokens
from paceline.decoder.graph_key import GraphKey
from paceline.target.steps import FusedStep

RunRounds = Callable[[list[Tensor], float, MultiRoundLimits | None], tuple[list[RoundReport], list[Tensor]]]
"""`paceline.decoder.backends.base.MultiRoundStep.run_rounds`."""


class ConsecutiveStep(nn.Module):
    """``rounds`` times a `FusedStep`, each round on what the one before it committed, unrolled."""

    def __init__(self, fused: FusedStep, rounds: int) -> None:
        super().__init__()
        self.fused, self._rounds = fused, rounds

    def forward(
        self, tokens: Tensor, count: Tensor, start: Tensor, limit: Tensor, params: Tensor, seeds: Tensor
    ) -> tuple[Tensor]:
        """The fields of a Commit; limit [B] int32 of every round; params [B, 4], seeds [B, 4].

        -> what a `FusedStep` reports, of every round: [rounds, B, W + 2] int32. Slots without a request stay where they
        are, as they do where the host looks at each round.
        """
        carry = self.fused.carry
        read = [] if carry is None else [carry.features]
        seated = SamplingTensors(params, seeds).seated
        reports = []
        for _ in range(self._rounds):
            report, following, accepted, *read = self.fused.round(tokens, count, start, limit, params, seeds, *read)
            tokens, count, start = following, accepted, start + count * seated
            reports.append(report.unsqueeze(0))
        if carry is not None:
            carry.features.copy_(read[0])
        return (torch.cat(reports),)


class ConsecutiveRounds:
    """Runs one round a call, or ``rounds`` where the host can do without a look. A `MultiRoundStep`.

    one      runs one round
    several  gives the graph of `ConsecutiveStep` for such inputs, compiled when it is first needed
    width    W of the commits
    lines    as in `GraphKey`; inputs and what comes out have a line for every slot
    """

    def __init__(
        self, one: RunRounds, several: Callable[[list[Tensor]], Step], *, rounds: int, width: int, lines: int = 0
    ) -> None:
        self._one, self._several, self._rounds, self._lines = one, several, rounds, lines
        # What the last round starts from has room for all that it may accept, whatever those before it accept.
        self._room = rounds * width - 1

    def run_rounds(
        self, inputs: list[Tensor], seconds: float, limits: MultiRoundLimits | None
    ) -> tuple[list[RoundReport], list[Tensor]]:
        """See `paceline.decoder.backends.base.MultiRoundStep`. The number of rounds does not depend on the time."""
        if limits is None or limits.max_rounds < self._rounds or min(limits.remaining) < self._room:
            return self._one(inputs, seconds, None)
        begin = perf_counter()
        given = [first_slots(x, self._lines) for x in inputs]
        packed = self._several(given)(*given)[0].transpose(0, 1)
        idle = [_idle_report(packed.shape[-1] - 2)] * self._rounds
        packed = for_all_slots(packed, len(inputs[0]), idle).transpose(0, 1)
        taken = (perf_counter() - begin) / self._rounds
        tokens, counts = packed[-1, :, :-2].contiguous(), packed[:, :, -2]
        first_row = inputs[2] + inputs[1] + counts[:-1].sum(0, dtype=torch.int32)
        return [RoundReport.of(rows, taken) for rows in packed.tolist()], [tokens, counts[-1].contiguous(), first_row]


def one_round(
    inputs: list[Tensor], _seconds: float, _limits: MultiRoundLimits | None, *, step: Step, lean: bool, lines: int
) -> tuple[list[RoundReport], list[Tensor]]:
    """As `MultiRoundStep.run_rounds`, of a step that runs one round a call. ``lean``: whether the `FusedStep` is.

    lines  as in `GraphKey`; inputs and what comes out have a line for every slot
    """
    begin = perf_counter()
    packed, *outputs = step(*([first_slots(x, lines) for x in inputs] if lines else inputs))
    if lines:
        slots = len(inputs[0])
        packed = for_all_slots(packed, slots, _idle_report(packed.shape[1] - 2))
        outputs = [for_all_slots(x, slots) for x in (outputs if lean else outputs[3:])]  # features, if they go out
    if lean or lines:
        outputs = [packed[:, :-2].contiguous(), packed[:, -2].contiguous(), inputs[2] + inputs[1], *outputs]
    return [RoundReport.of(packed.tolist(), perf_counter() - begin)], outputs


def _idle_report(width: int) -> list[int]:
    """What a `FusedStep` reports of a slot without a request."""
    return [*idle_tokens(width), 1, 0]


def consecutive_key(key: GraphKey, rounds: int) -> GraphKey:
    """Of the graph that runs so many of the rounds that ``key`` is the graph of."""
    return replace(key, variant=f"{rounds} rounds")
