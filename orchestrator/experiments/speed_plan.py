"""Speed plan: the fastest way of decoding at each load with its uncertainty, or the advice not to speculate.

Acceptance comes from a trace, exactly, or from a rate that somebody gives. Times come from measured rounds, or from
arithmetic about a Neuron chip (`paceline.neuron.hardware_speed`). What is said is a prediction; running it is the
proof (`paceline plan-speed --verify`). Not here: searches over one trace for `serve` (`tune.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from operator import mul
from typing import Any

from paceline.core.errors import ConfigurationError
from paceline.experiments.round_times import PLAIN, RoundTimes
from paceline.experiments.statistics import ratio_interval
from paceline.experiments.trace import Trace
from paceline.experiments.tune import search
from paceline.experiments.whatif import Answer, Policy


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to decode at one load.

    mode              "plain"; "speculative"; on Neuron "shared cores" (draft and target in one graph on the same
                      cores) or "separate cores"
    drafter, k        who drafts, and how much; "" and 0 for plain decoding
    cores             of the target and of the draft; (0, 0) where times were measured and not modelled
    tokens_per_round  of one request, its own token included
    round_seconds     of the whole batch
    speedup, low, high  over the fastest plain decoding of this load, and the interval it is expected in
    """

    mode: str
    drafter: str
    k: int | None
    batch_size: int
    tokens_per_round: float
    round_seconds: float
    cores: tuple[int, int] = (0, 0)
    speedup: float = 1.0
    low: float = 1.0
    high: float = 1.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all requests of the batch together."""
        return self.batch_size * self.tokens_per_round / self.round_seconds

    @property
    def plain(self) -> bool:
        return self.mode == "plain"

    @property
    def label(self) -> str:
        """For people."""
        where = f", {self.cores[0]} cores" if self.cores[0] else ""
        where += f" and {self.cores[1]} for the draft" if self.cores[1] else ""
        depth = "" if self.k is None else f", k {self.k}"
        return (self.mode if self.plain else f"{self.mode}: {self.drafter}{depth}") + where

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {**asdict(self), "label": self.label, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The answer for one load: all candidates, the fastest first."""

    batch_size: int
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def verdict(self) -> str:
        """One line: what to do, and how sure that is."""
        drafts = [one for one in self.candidates if not one.plain]
        if not drafts:
            return "do not speculate: nothing that drafts can be timed or placed"
        one = max(drafts, key=lambda candidate: candidate.speedup)
        interval = f"{one.speedup:.2f} times plain decoding [{one.low:.2f}, {one.high:.2f}]"
        if one.high <= 1:
            return f"do not speculate: the best, {one.label}, is {interval}"
        if one.speedup <= 1:
            return f"do not speculate, unless a run says otherwise: the best, {one.label}, is {interval}"
        if one.low < 1:
            return f"uncertain: {one.label} is {interval}; run it (--verify) before you rely on it"
        return f"speculate: {one.label}, {interval}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "batch_size": self.batch_size,
            "verdict": self.verdict,
            "best": self.best.to_dict(),
            "candidates": [one.to_dict() for one in self.candidates],
        }


def expected_tokens(rates: Sequence[float], k: int) -> float:
    """Tokens of a round of a chain of ``k``: 1 + the sum of the products of the conditional acceptance rates.

    rates  by position; the last one stands for all behind it (Leviathan et al., arXiv 2211.17192, equation 1)
    """
    chain = [rates[min(place, len(rates) - 1)] for place in range(k)]
    return 1.0 + math.fsum(accumulate(chain, mul))


def parse_rates(text: str) -> tuple[float, ...]:
    """``0.8``, or by position ``0.8,0.7,0.6``.

    Raises:
        ConfigurationError: they are no rates.
    """
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise ConfigurationError(
            f"--acceptance: expected a rate such as 0.8, or 0.8,0.7,0.6 by position, got {text!r}; correct it"
        )
    return rates


def from_rates(
    times: RoundTimes, drafter: str, rates: Sequence[float], *, batch_size: int, max_depth: int, error: float
) -> LoadPlan:
    """Measured times of one drafter and of plain decoding, and a given acceptance.

    Raises:
        ConfigurationError: one of them was not timed.
    """
    candidates = [Candidate("plain", "", 0, batch_size, 1.0, times.seconds(PLAIN, 0, batch_size))]
    candidates += [
        Candidate(
            "speculative",
            drafter,
            k,
            batch_size,
            expected_tokens(rates, k),
            times.seconds(drafter, k, batch_size),
        )
        for k in range(1, max_depth + 1)
    ]
    return ranked(batch_size, [(one, error) for one in candidates])


def from_trace(trace: Trace, times: RoundTimes, *, batch_size: int, max_depth: int, error: float) -> LoadPlan:
    """Measured times, and for every drafter that was recorded or looks at the text its exact acceptance.

    Acceptance is as uncertain as the prompts are few: its interval is a bootstrap over texts.

    Raises:
        ConfigurationError: plain decoding was not timed.
    """
    found = []
    for answer in search(trace, times, batch_size=batch_size, max_depth=max_depth):
        one = _candidate(answer)
        requests = answer.replayed.requests
        interval = ratio_interval([one.new_tokens for one in requests], [max(1, one.num_rounds) for one in requests])
        spread = (interval.high - interval.low) / 2 / max(interval.value, 1e-9)
        found.append((one, math.hypot(error, 0.0 if one.plain else spread)))
    return ranked(batch_size, found)


def policy_of(candidate: Candidate) -> Policy:
    """The policy of a candidate of `from_trace`."""
    return Policy(()) if candidate.plain else Policy(tuple(candidate.drafter.split("+")), candidate.k)


def _candidate(answer: Answer) -> Candidate:
    figures, rounds = answer.acceptance, max(1, len(answer.replayed.rounds))
    assert answer.seconds is not None, "the search times every answer"
    # Texts that end early leave slots empty, which is part of the round's tokens here.
    tokens = figures.new_tokens / rounds / answer.batch_size
    mode = "speculative" if answer.policy.drafters else "plain"
    name = "+".join(answer.policy.drafters)
    return Candidate(mode, name, answer.policy.k, answer.batch_size, tokens, answer.seconds / rounds)


def ranked(batch_size: int, candidates: Sequence[tuple[Candidate, float]]) -> LoadPlan:
    """Return candidates with the relative errors of their speed, compared with the fastest plain decoding.

    Raises:
        ConfigurationError: there is no plain decoding among them.
    """
    plain = [one for one, _ in candidates if one.plain]
    if not plain:
        raise ConfigurationError(
            "expected a timing of plain decoding to compare with, got none; add `none` to the drafters of the "
            "experiment"
        )
    base = max(one.tokens_per_second for one in plain)
    rated = []
    for one, error in candidates:
        ratio = one.tokens_per_second / base
        spread = 0.0 if one.plain else error
        rated.append(replace(one, speedup=ratio, low=ratio * max(0.0, 1 - spread), high=ratio * (1 + spread)))
    return LoadPlan(batch_size, tuple(sorted(rated, key=lambda one: -one.speedup)))
