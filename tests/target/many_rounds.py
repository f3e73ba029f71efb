"""Several fused rounds in one call, in plain Python: what native code is compared with; no tests."""

from __future__ import annotations

from time import perf_counter

import torch
from torch import Tensor

from paceline.core.types import IDLE, RoundLimits, RoundReport
from paceline.decoder.backends.base import Step


def run_rounds(
    step: Step, inputs: list[Tensor], seconds: float, limits: RoundLimits
) -> tuple[list[RoundReport], list[Tensor]]:
    """Run rounds as `paceline.decoder.backends.base.MultiRoundStep.run_rounds`, of a `FusedStep` that is not lean."""
    max_accept, remaining = inputs[3].tolist(), list(limits.remaining)
    reports: list[RoundReport] = []
    first = begin = perf_counter()
    while True:
        packed, *made = step(*inputs)
        end = perf_counter()
        reports.append(RoundReport.of(packed.tolist(), end - begin))
        if len(reports) >= limits.max_rounds or end - first + reports[-1].seconds > seconds:
            return reports, made
        if not _goes_on(reports[-1].tokens, remaining, limits.end_ids):
            return reports, made
        smaller = [min(limit, most) for limit, most in zip(max_accept, remaining, strict=True)]
        if not any(smaller):
            return reports, made
        if smaller != max_accept:
            max_accept = smaller
            inputs = [*inputs[:3], torch.tensor(smaller, dtype=torch.int32), *inputs[4:]]
        begin, inputs = end, [*made[:3], *inputs[3:6], *made[3:]]


def _goes_on(gained: list[list[int]], remaining: list[int], ends: frozenset[int]) -> bool:
    """Whether another round may follow one in which slots gained this; takes it off what remains."""
    on = True
    for slot, tokens in enumerate(gained):
        if remaining[slot] != IDLE:
            remaining[slot] -= len(tokens)
            on = on and remaining[slot] >= 0 and ends.isdisjoint(tokens)
    return on
