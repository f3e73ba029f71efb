"""Regret of a choice among drafters at run time: against the best fixed one, and a perfect choice for every text.

Exact, on a trace: rounds are counted, of a choice that goes by accepted tokens, so no model is loaded, no time is
measured and a busy machine changes nothing. Not here: the choice (`paceline.draft.choice`), and single questions to
traces (`whatif.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigurationError
from paceline.draft.choice import SHADOW_EVERY
from paceline.experiments.definitions import Acceptance
from paceline.experiments.trace import Trace
from paceline.experiments.whatif import Answer, Policy, ask, best_per_text

TEXT_DRAFTERS = ("suffix", "ngram")
"""Need no recording, so every trace knows them."""


@dataclass(frozen=True, slots=True)
class Regret:
    """Rounds of a whole trace.

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
        """The fixed drafter with the fewest rounds, which nobody knows beforehand."""
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
    """What a choice loses and wins on the texts of a trace, one after the other in their order.

    names         of drafters to choose among; none: all of `chain_policies`
    k             drafted tokens a round, of each of them
    shadow_every  as of `paceline.draft.choice.ChoiceDrafter`

    Raises:
        ConfigurationError: there are fewer than two, or one was not recorded so deep.
    """
    known = chain_policies(trace, k)
    policies = {name: known.get(name, Policy((name,), k)) for name in names} or known
    if len(policies) < 2:
        raise ConfigurationError(f"a choice needs at least two drafters, not {', '.join(policies)}; name more of them")
    fixed = {name: ask(trace, policy) for name, policy in policies.items()}
    choice = ask(trace, Policy(tuple(policies), k, shadow_every=shadow_every))
    chosen, perfect = best_per_text(list(fixed.values()))
    return Regret(fixed, choice, tuple(list(fixed)[index] for index in chosen), perfect)
