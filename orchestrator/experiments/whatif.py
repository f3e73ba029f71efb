"""Simulation of another drafter, depth, tree, list or batch size on the sequences of a trace.

Acceptance is exact: `paceline.experiments.replay` runs the engine's own rounds. Speed is a prediction, from measured
times of rounds. Not here: the trace's file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.draft.base import NoDrafter
from paceline.draft.choice import SHADOW_EVERY, ChoiceDrafter, FallbackDrafter
from paceline.draft_checks import check_options
from paceline.draft_spec import parse_draft
from paceline.experiments.definitions import Acceptance
from paceline.experiments.replay import Ladder, ReplayDrafter, Replayed, replay
from paceline.experiments.round_times import CHOICE, PLAIN, RoundTimes, reads_text_alone
from paceline.experiments.trace import Trace
from paceline.registry import DRAFTERS, resolve


@dataclass(frozen=True, slots=True)
class Policy:
    """Drafter and draft length to simulate.

    drafters  names of recorded drafters, or text drafters in the grammar of drafts; several: the first that has a
              proposal drafts; none: plain decoding
    k         depth; None = as recorded
    nodes     those of a recorded static tree that are kept; None = all
    confidence  threshold of the recorded draft models, in place of their own; None = their own
    ladder    depths to choose among in every round, by measured times, in place of ``k``; its last is the depth
    shadow_every  of a choice among the drafters, by accepted tokens alone (`paceline.draft.choice`); None = it is none
    """

    drafters: tuple[str, ...]
    k: int | None = None
    nodes: tuple[int, ...] | None = None
    shadow_every: int | None = None
    ladder: tuple[int, ...] = ()
    confidence: float | None = None

    @classmethod
    def parse(
        cls,
        text: str,
        k: int | None = None,
        nodes: tuple[int, ...] | None = None,
        *,
        shadow_every: int = SHADOW_EVERY,
        recorded: Collection[str] = (),
    ) -> Policy:
        """Parse ``a``, a list ``a+b``, or a choice ``choice:a+b``. ``recorded``: names that may have a plus sign."""
        if text in recorded:
            return cls((text,), k, nodes)
        names = text.removeprefix(CHOICE)
        return cls(tuple(names.split("+")), k, nodes, None if names == text else shadow_every)

    @property
    def label(self) -> str:
        """For tables."""
        depth = "" if self.k is None else f" k={self.k}"
        if self.ladder:
            depth = f" k={','.join(map(str, self.ladder))}"
        tree = "" if self.nodes is None else f" nodes {','.join(map(str, self.nodes))}"
        sure = "" if self.confidence is None else f" confidence {self.confidence:.4g}"
        return self.name + depth + tree + sure

    @property
    def name(self) -> str:
        """Name in the form that `parse` reads."""
        return ("" if self.shadow_every is None else CHOICE) + ("+".join(self.drafters) or PLAIN)


def drafter_of(trace: Trace, policy: Policy) -> Drafter:
    """A drafter that needs no model.

    Raises:
        ConfigurationError: a drafter was not recorded, or not so deep.
    """
    drafters = [_drafter(trace, name, policy) for name in policy.drafters]
    if policy.confidence is not None:
        _check_confidence(trace, policy)
    if not drafters:
        return NoDrafter()
    if policy.shadow_every is not None:
        return ChoiceDrafter(drafters, policy.drafters, shadow_every=policy.shadow_every, choose_by="length")
    return drafters[0] if len(drafters) == 1 else FallbackDrafter(drafters)


def _check_confidence(trace: Trace, policy: Policy) -> None:
    if not 0 <= (policy.confidence or 0.0) <= 1:
        raise ConfigurationError(
            f"--confidence: expected a probability from 0 to 1, got {policy.confidence}; correct it"
        )
    known = {one.name for one in trace.drafters if one.confidences is not None}
    if not known.intersection(policy.drafters):
        raise ConfigurationError(
            f"--confidence: expected a draft model with the target's tokenizer, got {policy.name}; "
            + (f"use one of {', '.join(sorted(known))}" if known else "omit it, since the trace has none")
        )


def _drafter(trace: Trace, name: str, policy: Policy) -> Drafter:
    recorded = {one.name: one for one in trace.drafters}
    if name in recorded:
        one = recorded[name]
        depth = policy.k
        if depth is not None and len(policy.drafters) > 1:  # in a list, each drafts as far as it can
            depth = min(depth, one.k)
        confidence = None if one.confidences is None else policy.confidence
        return ReplayDrafter(trace, one, depth=depth, nodes=policy.nodes, confidence=confidence)
    specs = parse_draft(name) if name.partition(":")[0] in DRAFTERS else ()
    if len(specs) != 1 or specs[0].name is None or not reads_text_alone(specs[0]):
        trace.drafter(name)  # says which there are
        raise ConfigurationError(f"drafter: expected a recorded one, got {name!r}; correct the name")
    spec, row = specs[0], DRAFTERS[specs[0].name]
    k = spec.k if spec.k is not None else policy.k
    if k is None:
        raise ConfigurationError(
            f"--k: expected the number of draft tokens for {name}, got none; give --k 4, or {name}:k=4"
        )
    drafter: Drafter = resolve(row.path)(k, **check_options(row, dict(spec.options), f"the draft {name}"))
    return drafter


@dataclass(frozen=True, slots=True)
class Answer:
    """Simulated outcome of a policy, with its speed if times are known."""

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
        """Plain values for JSON."""
        return {
            "policy": self.policy.label,
            "batch_size": self.batch_size,
            **self.acceptance.to_dict(),
            "batch_rounds": len(self.replayed.rounds),
            "tokens_per_second": self.tokens_per_second,
        }


def ask(
    trace: Trace, policy: Policy, *, batch_size: int = 1, times: RoundTimes | None = None, grouped: bool = False
) -> Answer:
    """Simulate a policy.

    grouped  as of `paceline.experiments.replay.replay`: True to foretell what ``experiment run`` measures

    Raises:
        ConfigurationError: the trace does not say, or no round of it was timed.
    """
    if policy.ladder:
        return _ask_ladder(trace, policy, batch_size=batch_size, times=times)
    replayed = replay(trace, drafter_of(trace, policy), batch_size=batch_size, grouped=grouped)
    seconds = None
    if times is not None:
        name = policy.name
        depth = policy.k if policy.k is not None else max((d for _, d in replayed.rounds), default=0)
        each = times.seconds(name, depth, batch_size)
        seconds = each * len(replayed.rounds) + times.prefill * len(trace.texts)
    return Answer(policy, batch_size, replayed, seconds)


def _ask_ladder(trace: Trace, policy: Policy, *, batch_size: int, times: RoundTimes | None) -> Answer:
    """The engine's controller chooses depths by the times; a round whose proposals are shorter takes as long."""
    if times is None:
        raise ConfigurationError(
            "--times: expected the round times of an experiment for adaptive draft lengths, got none; give --times"
        )
    name = policy.name
    seconds = {
        k: times.seconds(name, k, batch_size) if k else times.seconds(PLAIN, 0, batch_size) for k in policy.ladder
    }
    drafter = drafter_of(trace, replace(policy, k=policy.ladder[-1], ladder=()))
    replayed = replay(trace, drafter, batch_size=batch_size, ladder=Ladder(seconds))
    taken = Counter(replayed.statistics.draft_lengths)
    total = sum(count * seconds[length] for length, count in taken.items())
    return Answer(policy, batch_size, replayed, total + times.prefill * len(trace.texts))


def best_per_text(answers: Sequence[Answer]) -> tuple[list[int], Acceptance]:
    """For every text which of some answers has the fewest rounds, and the acceptance of these: a perfect choice."""
    texts = zip(*(answer.replayed.requests for answer in answers), strict=True)
    chosen = [int(np.argmin([one.num_rounds for one in row])) for row in texts]
    return chosen, Acceptance.pooled([answers[c].replayed.requests[i] for i, c in enumerate(chosen)])


def parse_depths(text: str, option: str = "--k") -> tuple[int, ...]:
    """``4``, ``1,2,4`` or ``1:8`` (both ends included). ``option``: what errors call it.

    Raises:
        ConfigurationError: it is none of these.
    """
    first, colon, last = text.partition(":")
    try:
        depths = tuple(range(int(first), int(last) + 1)) if colon else tuple(map(int, text.split(",")))
    except ValueError:
        depths = ()
    if not depths or min(depths) < 0:
        raise ConfigurationError(f"{option}: expected numbers from 0 on, got {text!r}; write 4, 1,2,4 or 1:8")
    return depths


def parse_thresholds(text: str) -> tuple[float, ...]:
    """``0.4`` or ``0.2,0.4``.

    Raises:
        ConfigurationError: they are no probabilities.
    """
    try:
        values = tuple(map(float, text.split(",")))
    except ValueError:
        values = ()
    if not values or not all(0 <= value <= 1 for value in values):
        raise ConfigurationError(
            f"--confidence: expected probabilities such as 0.4 or 0.2,0.4, got {text!r}; correct it"
        )
    return values


TEXT_DRAFTERS = ("suffix", "ngram")
"""Need no recording, so every trace knows them."""


@dataclass(frozen=True, slots=True)
class Regret:
    """Regret of a choice among drafters at run time, against the best fixed one and a perfect choice for every
    sequence. It counts rounds of a whole trace exactly: no model is loaded and no time is measured.

    fixed    answers for every drafter by itself
    choice   for the choice among them
    best_of  for every text, the fixed drafter with the fewest rounds
    perfect  acceptance if somebody had told that for every text
    """

    fixed: Mapping[str, Answer]
    choice: Answer
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
        """Plain values for JSON."""
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
    """Every drafter of chains that a trace knows, recorded or of text alone, with at most ``k`` drafted tokens."""
    chains = [one for one in trace.drafters if one.parents is None and not one.dynamic]
    policies = {one.name: Policy((one.name,), min(k, one.k) if one.prefixes else None) for one in chains}
    return policies | {name: Policy((name,), k) for name in TEXT_DRAFTERS if name not in policies}


def regret(trace: Trace, names: Sequence[str] = (), *, k: int, shadow_every: int = SHADOW_EVERY) -> Regret:
    """Return the rounds that a choice loses and wins on the sequences of a trace, in their order.

    names         of drafters to choose among; none: all of `chain_policies`
    k             drafted tokens a round, of each of them
    shadow_every  as of `paceline.draft.choice.ChoiceDrafter`

    Raises:
        ConfigurationError: there are fewer than two, or one was not recorded so deep.
    """
    known = chain_policies(trace, k)
    policies = {name: known.get(name, Policy((name,), k)) for name in names} or known
    if len(policies) < 2:
        raise ConfigurationError(
            f"drafters: expected at least two for a choice, got {', '.join(policies)}; name more of them"
        )
    fixed = {name: ask(trace, policy) for name, policy in policies.items()}
    choice = ask(trace, Policy(tuple(policies), k, shadow_every=shadow_every))
    chosen, perfect = best_per_text(list(fixed.values()))
    return Regret(fixed, choice, tuple(list(fixed)[index] for index in chosen), perfect)
