"""Uncertainty of experiments: bootstrap over prompts, and the paired test of two runs.

Prompts are the unit of resampling, because rounds of one sequence are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from paceline.core.errors import ConfigurationError
from paceline.experiments.store import CellResult, Row

RESAMPLES = 2000
_TIMES = ("tokens_per_second", "seconds")


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure and the middle 95 % of its bootstrap distribution."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_interval(above: Sequence[float], below: Sequence[float], *, seed: int = 0) -> Interval:
    """The ratio of two sums over units, such as plain seconds over seconds of groups of prompts."""
    a, b = np.asarray(above, dtype=float), np.asarray(below, dtype=float)
    drawn = np.random.default_rng(seed).integers(0, len(a), size=(RESAMPLES, len(a)))
    ratios = a[drawn].sum(1) / np.maximum(b[drawn].sum(1), 1e-300)
    low, high = np.quantile(ratios, (0.025, 0.975))
    return Interval(float(a.sum() / max(b.sum(), 1e-300)), float(low), float(high))


def speedup_interval(result: CellResult) -> Interval | None:
    """Speed-up over plain decoding, by groups of prompts that ran together; None without a baseline."""
    groups = {row["group"]: row for row in result.rows if row["plain_seconds"] is not None}
    if not groups:
        return None
    return ratio_interval([row["plain_seconds"] for row in groups.values()], [r["seconds"] for r in groups.values()])


def length_interval(rows: Sequence[Row]) -> Interval:
    accepted, drafts = [row["num_accepted_tokens"] for row in rows], [row["num_drafts"] for row in rows]
    if not sum(drafts):
        return Interval(1.0, 1.0, 1.0)
    one = ratio_interval(accepted, drafts)
    return Interval(1 + one.value, 1 + one.low, 1 + one.high)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs of the same prompts.

    units        unit of resampling and flipping: prompts, or for times the groups of prompts that ran together
    difference   second minus first, with its interval
    p_value      two-sided, of a sign-flip test over units: the probability of such a large mean difference by chance
    """

    figure: str
    prompts: int
    units: int
    first: float
    second: float
    difference: Interval
    p_value: float

    def to_dict(self) -> dict[str, Any]:
        interval = asdict(self.difference)
        return {**asdict(self), "difference": interval.pop("value"), **interval}


def compare_rows(first: Sequence[Row], second: Sequence[Row], figure: str, *, seed: int = 0) -> Comparison:
    """Compare a figure of rows prompt by prompt; times group by group, since prompts that ran together share theirs.
    ``tokens_per_second`` is new tokens over seconds. ConfigurationError: the two have no prompt in common.
    """
    theirs = {row["prompt"]: row for row in second}
    pairs = [(row, theirs[row["prompt"]]) for row in first if row["prompt"] in theirs]
    if not pairs:
        raise ConfigurationError("the two runs have no prompt in common; compare runs of the same prompt set")
    units: dict[object, list[tuple[Row, Row]]] = {}
    for index, pair in enumerate(pairs):
        units.setdefault(_together(pair) if figure in _TIMES else index, []).append(pair)
    a, b = (np.array([_figure([p[side] for p in unit], figure) for unit in units.values()]) for side in (0, 1))
    deltas, dice = b - a, np.random.default_rng(seed)
    drawn = dice.integers(0, len(deltas), size=(RESAMPLES, len(deltas)))
    low, high = np.quantile(deltas[drawn].mean(1), (0.025, 0.975))
    interval = Interval(float(deltas.mean()), float(low), float(high))
    first_mean, second_mean = float(a.mean()), float(b.mean())
    return Comparison(figure, len(pairs), len(units), first_mean, second_mean, interval, _sign_flips(deltas, dice))


def _together(pair: tuple[Row, Row]) -> tuple[object, ...]:
    """The groups that the two rows of a prompt ran in; without any, the prompt itself."""
    return tuple(row.get("group", row["prompt"]) for row in pair)


def _sign_flips(deltas: np.ndarray, dice: np.random.Generator) -> float:
    """All sign flips where they are few, else drawn ones, the observed one counted."""
    size, observed = len(deltas), abs(float(deltas.mean()))
    if size <= 12:
        signs = np.array([[1 if flips >> i & 1 else -1 for i in range(size)] for flips in range(1 << size)])
    else:
        signs = np.vstack([np.ones(size), dice.choice((-1, 1), size=(RESAMPLES * 5 - 1, size))])
    means = np.abs((signs * deltas).mean(1))
    return float((means >= observed - 1e-12).mean())


def _figure(rows: Sequence[Row], name: str) -> float:
    """Return a statistic of a unit: seconds are those of the group, the same in all its rows."""
    if name == "tokens_per_second":
        return float(sum(row["new_tokens"] for row in rows) / rows[0]["seconds"])
    return float(rows[0][name])
