"""What `paceline verify` reports: a finding for each test, with what was tried and what it would have found.

The power of a test is the smallest deviation that it finds with a probability of 95 %, whatever the deviation looks
like. It is given as a total variation: the largest difference between the probabilities that the two distributions
give to any set of tokens. Not here: the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

Status = Literal["ok", "FAILED", "lossy", "note", "skipped"]

FALSE_ALARM = 1e-5
"""Probability that a test of a distribution fails although the distribution is right."""

POWER = 0.95
"""Probability with which a deviation of the size that is reported is found."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One test.

    status     ok; FAILED; lossy: the acceptance rule says of itself that it deviates, and by how much was measured;
               note: no promise is broken, and somebody should know; skipped: why stands in ``seen``
    tried      on what
    seen       what came of it
    detects    the smallest deviation, as a total variation at a token (or at the tokens that ``tried`` names), that
               would have been found with a probability of 95 %; None where this has no meaning
    seconds    that it took
    """

    name: str
    status: Status
    tried: str
    seen: str
    detects: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one target, one draft and one batch size. ``setting``: what was verified, for people."""

    setting: Mapping[str, object]
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(one.status != "FAILED" for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"passed": self.passed, **self.setting, "findings": [asdict(one) for one in self.findings]}

    def __str__(self) -> str:
        """For people: a paragraph for every finding."""
        head = ", ".join(f"{name} {value}" for name, value in self.setting.items())
        lines = [head]
        for one in self.findings:
            lines.append(f"{one.status:7} {one.name} ({one.seconds:.1f} s): {one.seen}")
            lines.append(f"        tried: {one.tried}")
            if one.detects is not None:
                lines.append(f"        finds with 95 %: a deviation of {one.detects:.2g} in total variation")
        return "\n".join(lines)


def detected_share(count: int) -> float:
    """The smallest probability of a difference at a token that shows at least once in ``count`` tokens with 95 %.

    Two texts whose tokens are drawn from distributions with a total variation of d differ at a token with probability
    d at least, however they are coupled. So this is a total variation too.
    """
    return -math.expm1(math.log(1.0 - POWER) / max(1, count))


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> float:
    """p-value of Pearson's test of counts against expected counts, all above 0."""
    statistic = math.fsum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return _beyond(statistic, len(expected) - 1)


def detected_variation(samples: int, cells: int) -> float:
    """The smallest total variation over ``cells`` cells that `chi_square` finds with 95 % in so many samples.

    A deviation of total variation d has a noncentrality of at least 4 n d^2: it moves a mass d from some cells, of mass
    P, to the others, and by Cauchy's inequality the sum of squares over expectations is at least n d^2 / (P (1 - P)).
    """
    if cells < 2 or not samples:
        return 1.0
    degrees = cells - 1
    critical = _bisected(lambda x: _beyond(x, degrees) > FALSE_ALARM, 10.0 * degrees + 100.0)
    needed = _bisected(lambda moved: _noncentral_beyond(critical, degrees, moved) < POWER, 10.0 * critical + 100.0)
    return min(1.0, math.sqrt(needed / (4.0 * samples)))


def _beyond(x: float, degrees: int) -> float:
    """Probability of more than x under chi-square with so many degrees of freedom."""
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _noncentral_beyond(x: float, degrees: int, noncentrality: float) -> float:
    """The same of the noncentral distribution: a mixture of central ones with Poisson weights."""
    mean = noncentrality / 2
    count = torch.arange(int(mean + 12 * math.sqrt(mean + 1) + 30), dtype=torch.float64)
    weights = torch.exp(count * math.log(max(mean, 1e-300)) - mean - torch.lgamma(count + 1))
    tails = torch.special.gammaincc(degrees / 2 + count, torch.full_like(count, x / 2))
    return float((weights * tails).sum())


def _bisected(below: Callable[[float], bool], high: float) -> float:
    """Where a monotone condition ends to hold, from 0 on."""
    low: float = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
