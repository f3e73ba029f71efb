"""Fused rounds one behind the other, on a backend whose steps cannot do that by themselves."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from paceline.core.types import IDLE, MultiRoundLimits, RoundReport
from paceline.decoder.backends.base import Again, Step


def multi_round(step: Step, *, lean: bool) -> Again:
    """What runs a `paceline.target.steps.FusedStep` again on what it made. ``lean``: whether it is."""

    def again(
        inputs: list[Tensor], seconds: float, room: MultiRoundLimits | None
    ) -> tuple[list[RoundReport], list[Tensor]]:
        limits, left = inputs[3].tolist(), [] if room is None else list(room.remaining)
        told: list[RoundReport] = []
        first = begin = perf_counter()
        while True:
            packed, *made = step(*inputs)
            if lean:
                made = [packed[:, :-2].contiguous(), packed[:, -2].contiguous(), inputs[2] + inputs[1], *made]
            end = perf_counter()
            told.append(RoundReport.of(packed.tolist(), end - begin))
            if room is None or len(told) >= room.max_rounds or end - first + told[-1].seconds > seconds:
                return told, made
            if not _goes_on(told[-1].tokens, left, room.end_ids):
                return told, made
            smaller = [min(limit, most) for limit, most in zip(limits, left, strict=True)]
            if not any(smaller):
                return told, made
            if smaller != limits:
                limits, inputs = smaller, [*inputs[:3], torch.tensor(smaller, dtype=torch.int32), *inputs[4:]]
            begin, inputs = end, [*made[:3], *inputs[3:6], *made[3:]]

    return again


def _goes_on(gained: list[list[int]], left: list[int], ends: frozenset[int]) -> bool:
    """Whether another round may follow one in which slots gained this; it is taken off the room that is left there."""
    on = True
    for slot, tokens in enumerate(gained):
        if left[slot] != IDLE:
            left[slot] -= len(tokens)
            on = on and left[slot] >= 0 and ends.isdisjoint(tokens)
    return on
