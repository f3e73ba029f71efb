"""Queries on traces and round times: what-if, the fastest configuration, and the loss of a choice.

Acceptance is exact: `paceline.experiments.replay` runs the engine's rounds over the sequences of a trace, without a
model. Speed is a prediction, from measured round times, or from a model of a Neuron chip
(`paceline.neuron.hardware_speed`). `tuned.py` runs the best answer to verify it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from operator import mul
from typing import Any

import numpy as np

from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.draft.base import NoDrafter
from paceline.draft.choice import ChoiceDrafter, FallbackDrafter
from paceline.draft_checks import check_options
from paceline.draft_spec import DraftSpec, parse_draft
from paceline.experiments.definitions import Acceptance
from paceline.experiments.replay import ReplayDrafter, Replayed, replay
from paceline.experiments.round_times import CHOICE, PLAIN, RoundTimes, reads_text_alone
from paceline.experiments.statistics import ratio_interval
from paceline.experiments.trace import RecordedDrafter, Trace
from paceline.registry import DRAFTERS, resolve

log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class Policy:
    """Drafters and their draft length.

    drafters       names of recorded drafters, or text drafters in the grammar of drafts; several: the first with a
                   proposal drafts; none: plain decoding
    k              depth; None = as recorded
    nodes          nodes of a recorded static tree to keep; None = all
    confidence     threshold of the recorded draft models, replacing their own; None = their own
    draft_lengths  depths to choose among in every round, by measured times, not ``k``; the last is the maximum
    chooses        whether to choose among the drafters, by accepted tokens only (`paceline.draft.choice`)
    """

    drafters: tuple[str, ...]
    k: int | None = None
    nodes: tuple[int, ...] | None = None
    chooses: bool = False
    draft_lengths: tuple[int, ...] = ()
    confidence: float | None = None
    competes: bool = False

    @classmethod
    def parse(
        cls,
        text: str,
        k: int | None = None,
        nodes: tuple[int, ...] | None = None,
        *,
        recorded: Collection[str] = (),
    ) -> Policy:
        """Read ``a``, a list ``a+b``, or a choice ``choice:a+b``. ``recorded``: names that may contain a plus sign."""
        if text in recorded:
            return cls((text,), k, nodes)
        names = text.removeprefix(CHOICE)
        return cls(tuple(names.split("+")), k, nodes, names != text)

    @property
    def label(self) -> str:
        depth = "" if self.k is None else f" k={self.k}"
        if self.draft_lengths:
            depth = f" k={','.join(map(str, self.draft_lengths))}" + (", competing" if self.competes else "")
        tree = "" if self.nodes is None else f" nodes {','.join(map(str, self.nodes))}"
        sure = "" if self.confidence is None else f" confidence {self.confidence:.4g}"
        return self.name + depth + tree + sure

    @property
    def name(self) -> str:
        """The text that `parse` reads."""
        return (CHOICE if self.chooses else "") + ("+".join(self.drafters) or PLAIN)


def drafter_of(trace: Trace, policy: Policy) -> Drafter:
    """A drafter that needs no model, or ConfigurationError: one was not recorded, or not at this depth."""
    drafters = [_drafter(trace, name, policy) for name in policy.drafters]
    if policy.confidence is not None:
        _check_confidence(trace, policy)
    if not drafters:
        return NoDrafter()
    if policy.chooses:
        return ChoiceDrafter(drafters, policy.drafters, choose_by="length")
    return drafters[0] if len(drafters) == 1 else FallbackDrafter(drafters)


def _check_confidence(trace: Trace, policy: Policy) -> None:
    if not 0 <= (policy.confidence or 0.0) <= 1:
        raise ConfigurationError(f"a threshold of confidence is a probability, 0 to 1, not {policy.confidence}")
    known = {one.name for one in trace.drafters if one.confidences is not None}
    if not known.intersection(policy.drafters):
        raise ConfigurationError(
            f"{policy.name} has no threshold of confidence: only draft models with the target's tokenizer have one, "
            f"and recorded of these {'are ' + ', '.join(sorted(known)) if known else 'is none'}"
        )


def _drafter(trace: Trace, name: str, policy: Policy) -> Drafter:
    recorded = {one.name: one for one in trace.drafters}
    if name in recorded:
        one = recorded[name]
        depth = policy.k
        if depth is not None and len(policy.drafters) > 1:  # in a list, each drafts up to its own maximum
            depth = min(depth, one.k)
        confidence = None if one.confidences is None else policy.confidence
        return ReplayDrafter(trace, one, depth=depth, nodes=policy.nodes, confidence=confidence)
    spec = _text_spec(name)
    if spec is None or spec.name is None:
        trace.drafter(name)  # its error lists the available ones
        raise ConfigurationError(f"drafter: expected a recorded one or a text drafter, got {name!r}; record it")
    row = DRAFTERS[spec.name]
    k = spec.k if spec.k is not None else policy.k
    if k is None:
        raise ConfigurationError(f"k: expected the draft length of {name}, got none; give --k 4, or {name}:k=4")
    drafter: Drafter = resolve(row.path)(k, **check_options(row, dict(spec.options), f"the draft {name}"))
    return drafter


def _text_spec(name: str) -> DraftSpec | None:
    """The drafter of that name if it needs only tokens, else None."""
    specs = parse_draft(name) if name.partition(":")[0] in DRAFTERS else ()
    return specs[0] if len(specs) == 1 and reads_text_alone(specs[0]) else None


@dataclass(frozen=True, slots=True)
class PolicyResult:
    """The rounds of a policy on a trace, and their time, if times are known."""

    policy: Policy
    batch_size: int
    replayed: Replayed
    seconds: float | None

    @property
    def acceptance(self) -> Acceptance:
        return self.replayed.acceptance

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.seconds is None else self.acceptance.new_tokens / self.seconds

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy.label,
            "batch_size": self.batch_size,
            **self.acceptance.to_dict(),
            "batch_rounds": len(self.replayed.rounds),
            "tokens_per_second": self.tokens_per_second,
        }


def ask(
    trace: Trace, policy: Policy, *, batch_size: int = 1, times: RoundTimes | None = None, grouped: bool = False
) -> PolicyResult:
    """Replay a policy on the sequences of a trace. ``grouped``: as in `replay`, to predict ``experiment run``.

    Raises:
        ConfigurationError: the trace has no answer, or none of its rounds was timed.
    """
    if policy.draft_lengths:
        return _ask_adaptive(trace, policy, batch_size=batch_size, times=times)
    replayed = replay(trace, drafter_of(trace, policy), batch_size=batch_size, grouped=grouped)
    seconds = None
    if times is not None:
        name = policy.name
        depth = policy.k if policy.k is not None else max((d for _, d in replayed.rounds), default=0)
        each = times.seconds(name, depth, batch_size)
        seconds = each * len(replayed.rounds) + times.prefill * len(trace.texts)
    return PolicyResult(policy, batch_size, replayed, seconds)


def _ask_adaptive(trace: Trace, policy: Policy, *, batch_size: int, times: RoundTimes | None) -> PolicyResult:
    """Depths chosen by the engine's controller. A shorter proposal takes a round's time all the same; where requests
    compete for rows, a row that is not verified saves what one more request of plain decoding costs.
    """
    if times is None:
        raise ConfigurationError("k: expected times of rounds with adaptive lengths, got none; give them (--times)")
    name = policy.name
    seconds = {
        k: times.seconds(name, k, batch_size) if k else times.seconds(PLAIN, 0, batch_size)
        for k in policy.draft_lengths
    }
    verify = partial(times.seconds, PLAIN, 0) if policy.competes else None
    drafter = drafter_of(trace, replace(policy, k=policy.draft_lengths[-1], draft_lengths=()))
    replayed = replay(trace, drafter, batch_size=batch_size, draft_lengths=seconds, rows=verify)
    return PolicyResult(policy, batch_size, replayed, replayed.seconds + times.prefill * len(trace.texts))


def best_per_text(answers: Sequence[PolicyResult]) -> tuple[list[int], Acceptance]:
    """Return for every sequence the answer with the fewest rounds, and the acceptance of these: a perfect choice."""
    texts = zip(*(answer.replayed.requests for answer in answers), strict=True)
    chosen = [int(np.argmin([one.num_rounds for one in row])) for row in texts]
    return chosen, Acceptance.pooled([answers[c].replayed.requests[i] for i, c in enumerate(chosen)])


TEXT_DRAFTERS = ("suffix", "ngram")
"""Drafters that need no recording, so that every trace supports them."""


@dataclass(frozen=True, slots=True)
class Regret:
    """A choice among drafters at run time, compared with the best fixed one, and a perfect choice for every sequence.

    best_of  for every sequence, the fixed drafter with the fewest rounds
    perfect  acceptance if that were known for every sequence
    """

    fixed: Mapping[str, PolicyResult]
    choice: PolicyResult
    best_of: tuple[str, ...]
    perfect: Acceptance

    @property
    def best(self) -> str:
        """The fixed drafter with the fewest rounds, which is known only afterwards."""
        return min(self.fixed, key=lambda name: self.fixed[name].acceptance.num_rounds)

    @property
    def worst(self) -> str:
        """The fixed drafter with the most rounds."""
        return max(self.fixed, key=lambda name: self.fixed[name].acceptance.num_rounds)

    def against(self, rounds: int) -> float:
        """Rounds of the choice more (above 0) or fewer than so many, as a share of them."""
        return self.choice.acceptance.num_rounds / rounds - 1

    def to_dict(self) -> dict[str, Any]:
        rounds = {name: answer.acceptance.num_rounds for name, answer in self.fixed.items()}
        return {
            "new_tokens": self.choice.acceptance.new_tokens,
            "rounds": {**rounds, "choice": self.choice.acceptance.num_rounds},
            "rounds_of_a_perfect_choice": self.perfect.num_rounds,
            "best_fixed": self.best,
            "regret_against_best_fixed": self.against(rounds[self.best]),
            "regret_against_worst_fixed": self.against(rounds[self.worst]),
            "regret_against_a_perfect_choice": self.against(self.perfect.num_rounds),
        }


def chain_policies(trace: Trace, k: int) -> dict[str, Policy]:
    """Return every chain drafter of a trace, recorded or using only tokens, with at most ``k`` drafted tokens."""
    chains = [one for one in trace.drafters if one.parents is None and not one.dynamic]
    policies = {one.name: Policy((one.name,), min(k, one.k) if one.prefixes else None) for one in chains}
    return policies | {name: Policy((name,), k) for name in TEXT_DRAFTERS if name not in policies}


def regret(trace: Trace, names: Sequence[str] = (), *, k: int) -> Regret:
    """Losses and gains of a choice of up to ``k`` tokens per round on the sequences of a trace, in their order.
    ``names``: of drafters; none: `chain_policies`.

    Raises:
        ConfigurationError: there are fewer than two, or one was not recorded at this depth.
    """
    known = chain_policies(trace, k)
    policies = {name: known.get(name, Policy((name,), k)) for name in names} or known
    if len(policies) < 2:
        raise ConfigurationError(f"a choice needs at least two drafters, not {', '.join(policies)}; name more of them")
    fixed = {name: ask(trace, policy) for name, policy in policies.items()}
    choice = ask(trace, Policy(tuple(policies), k, chooses=True))
    chosen, perfect = best_per_text(list(fixed.values()))
    return Regret(fixed, choice, tuple(list(fixed)[index] for index in chosen), perfect)


def search(trace: Trace, times: RoundTimes, *, batch_size: int, max_depth: int = 8) -> list[PolicyResult]:
    """All points of the grid with known round times, the fastest first, plain decoding among them. A timed drafter that
    cannot be replayed is skipped with a log line.

    Raises:
        ConfigurationError: plain decoding was not timed at this batch size or at two others.
    """
    timed = {name for name, *_ in times.rounds}
    if PLAIN not in timed:
        raise ConfigurationError("plain decoding was not timed; put `none` among the drafters of the experiment")
    answers = [ask(trace, Policy(()), batch_size=batch_size, times=times)]
    for name in sorted(timed - {PLAIN}):
        try:
            policies = list(_grid(trace, name, max_depth))
            answers += [ask(trace, policy, batch_size=batch_size, times=times) for policy in policies]
        except ConfigurationError as error:
            log.warning("%s skipped: %s", name, error)
    return sorted(answers, key=lambda answer: -(answer.tokens_per_second or 0.0))


def _grid(trace: Trace, name: str, max_depth: int) -> Iterator[Policy]:
    """Every depth at which a timed drafter can be replayed, or ConfigurationError: a part needs more than tokens."""
    recorded = {one.name: one for one in trace.drafters}
    if name in recorded:
        yield from (Policy((name,), k) for k in _depths(recorded[name], max_depth))
        return
    if name.startswith(CHOICE):
        raise ConfigurationError("a choice goes by measured times, which no trace knows; run it in an experiment")
    parts = tuple(name.split("+"))
    for part in parts:
        if part not in recorded and _text_spec(part) is None:
            trace.drafter(part)  # its error lists the available ones
    yield from (Policy(parts, k) for k in range(1, max_depth + 1))


def _depths(drafter: RecordedDrafter, most: int) -> Sequence[int | None]:
    """Depths that a recording can answer for: all up to the recorded depth, or only that depth."""
    return range(1, min(most, drafter.k) + 1) if drafter.prefixes and drafter.parents is None else (None,)


@dataclass(frozen=True, slots=True)
class SpeedEstimate:
    """One configuration at one load.

    mode              "plain"; "speculative"; on Neuron "shared cores" (draft and target in one graph on the same
                      cores) or "separate cores"
    drafter, k        drafter and draft length; "" and 0 for plain decoding
    cores             of the target and of the draft; (0, 0) if times were measured and not modelled
    tokens_per_round  of one request, the target's token included
    round_seconds     of the whole batch
    speedup, low, high  relative to the fastest plain decoding of this load, with its expected interval
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
    def policy(self) -> Policy:
        if self.plain:
            return Policy(())
        return Policy(tuple(self.drafter.split("+")), self.k)

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all requests of the batch together."""
        return self.batch_size * self.tokens_per_round / self.round_seconds

    @property
    def plain(self) -> bool:
        return self.mode == "plain"

    @property
    def label(self) -> str:
        where = f", {self.cores[0]} cores" if self.cores[0] else ""
        where += f" and {self.cores[1]} for the draft" if self.cores[1] else ""
        depth = "" if self.k is None else f", k {self.k}"
        return (self.mode if self.plain else f"{self.mode}: {self.drafter}{depth}") + where

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "label": self.label, "tokens_per_second": self.tokens_per_second}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The answer for one load: all candidates, the fastest first."""

    batch_size: int
    candidates: tuple[SpeedEstimate, ...]

    @property
    def best(self) -> SpeedEstimate:
        return self.candidates[0]

    @property
    def verdict(self) -> str:
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
        return {
            "batch_size": self.batch_size,
            "verdict": self.verdict,
            "best": self.best.to_dict(),
            "candidates": [one.to_dict() for one in self.candidates],
        }


def expected_tokens(rates: Sequence[float], k: int) -> float:
    """Tokens per round of a chain of ``k``: 1 + the sum of the products of the conditional rates by position, of which
    the last serves all later ones (Leviathan et al., arXiv 2211.17192, equation 1).
    """
    chain = [rates[min(place, len(rates) - 1)] for place in range(k)]
    return 1.0 + math.fsum(accumulate(chain, mul))


def from_rates(
    times: RoundTimes, drafter: str, rates: Sequence[float], *, batch_size: int, max_depth: int, error: float
) -> LoadPlan:
    """Candidates from a given acceptance and measured times of one drafter and plain decoding."""
    candidates = [SpeedEstimate("plain", "", 0, batch_size, 1.0, times.seconds(PLAIN, 0, batch_size))]
    candidates += [
        SpeedEstimate(
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
    """Candidates from measured times, or ConfigurationError, with exact acceptance for every drafter that was recorded
    or needs only tokens; its interval is a bootstrap over sequences.
    """
    found = []
    for answer in search(trace, times, batch_size=batch_size, max_depth=max_depth):
        one = _candidate(answer)
        requests = answer.replayed.requests
        interval = ratio_interval([one.new_tokens for one in requests], [max(1, one.num_rounds) for one in requests])
        spread = (interval.high - interval.low) / 2 / max(interval.value, 1e-9)
        found.append((one, math.hypot(error, 0.0 if one.plain else spread)))
    return ranked(batch_size, found)


def _candidate(answer: PolicyResult) -> SpeedEstimate:
    figures, rounds = answer.acceptance, max(1, len(answer.replayed.rounds))
    assert answer.seconds is not None, "the search times every answer"
    # Sequences that end early leave slots empty, which is included in the tokens per round.
    tokens = figures.new_tokens / rounds / answer.batch_size
    policy, seconds = answer.policy, answer.seconds / rounds
    mode = "speculative" if policy.drafters else "plain"
    return SpeedEstimate(mode, "+".join(policy.drafters), policy.k, answer.batch_size, tokens, seconds)


def ranked(batch_size: int, candidates: Sequence[tuple[SpeedEstimate, float]]) -> LoadPlan:
    """Candidates with the relative errors of their speed, compared with the fastest plain decoding, or
    ConfigurationError.
    """
    plain = [one for one, _ in candidates if one.plain]
    if not plain:
        raise ConfigurationError("expected a timing of plain decoding, got none; time it, too")
    base = max(one.tokens_per_second for one in plain)
    rated = []
    for one, error in candidates:
        ratio = one.tokens_per_second / base
        spread = 0.0 if one.plain else error
        rated.append(replace(one, speedup=ratio, low=ratio * max(0.0, 1 - spread), high=ratio * (1 + spread)))
    return LoadPlan(batch_size, tuple(sorted(rated, key=lambda one: -one.speedup)))
