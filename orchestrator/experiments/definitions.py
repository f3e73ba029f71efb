"""Definitions of all acceptance statistics, with their denominators.

All are computed from *drafts*: verifications of one request with drafted tokens, each described by the number of
drafted tokens (for a tree: its depth) and of accepted ones. `docs/experiments.md` has the same definitions in words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.outputs import RequestOutput

FIGURES = (
    *("new_tokens", "num_rounds", "num_drafts", "mean_acceptance_length", "draft_acceptance_rate"),
    *("conditional_acceptance_rate", "drafted_token_share"),
)
"""Figures of an `Acceptance` in the results of an experiment."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One verification of one request with drafted tokens.

    drafted   depth of the proposal, 1 or more
    accepted  number of leading drafted tokens in the output; tokens after its end are not counted
    """

    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Drafts of one request, or of many: statistics are over all drafts together, not means of means.

    drafts      in the order of the rounds
    num_rounds  verifications, including those without a draft
    new_tokens  tokens of the outputs, including the first of each, which comes from the prefill
    """

    drafts: tuple[Draft, ...]
    num_rounds: int
    new_tokens: int

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> Acceptance:
        """Return the acceptance of one request from its outputs in order, the first one included."""
        drafts: list[Draft] = []
        rounds = tokens = 0
        for number, output in enumerate(outputs):
            tokens += len(output.tokens)
            if number == 0:  # it came from the prefill
                continue
            rounds += 1 if output.drafted else len(output.tokens)  # several plain steps may run in one graph
            if output.drafted:
                drafts.append(Draft(output.drafted, output.accepted))
        return cls(tuple(drafts), rounds, tokens)

    @classmethod
    def pooled(cls, parts: Sequence[Acceptance]) -> Acceptance:
        drafts = tuple(draft for part in parts for draft in part.drafts)
        return cls(drafts, sum(part.num_rounds for part in parts), sum(part.new_tokens for part in parts))

    @property
    def num_drafts(self) -> int:
        return len(self.drafts)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted; of a tree, its depth in every draft."""
        return sum(draft.drafted for draft in self.drafts)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that are in the texts."""
        return sum(draft.accepted for draft in self.drafts)

    @property
    def num_tested_tokens(self) -> int:
        """Drafted tokens whose predecessors in the draft were all accepted: those that the target tested."""
        return sum(min(draft.accepted + 1, draft.drafted) for draft in self.drafts)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens. vLLM's and AIPerf's meaning, and `Statistics.acceptance_rate`."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def conditional_acceptance_rate(self) -> float:
        """Accepted tokens over those the target decided about: alpha of Leviathan et al. (arXiv 2211.17192)."""
        return _ratio(self.num_accepted_tokens, self.num_tested_tokens)

    @property
    def drafted_token_share(self) -> float:
        """Accepted tokens over all new tokens: how much of the text was drafted."""
        return _ratio(self.num_accepted_tokens, self.new_tokens)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens over drafts, the target's own token included: tau. 1 if nothing was drafted."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def tokens_per_round(self) -> float:
        """1 + accepted tokens over rounds, also those in which nothing was drafted."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_rounds)

    def to_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in (*FIGURES, "tokens_per_round")},
            "acceptance_by_position": [place.unconditional for place in self.positions],
            "conditional_by_position": [place.conditional for place in self.positions],
        }

    @property
    def positions(self) -> tuple[Position, ...]:
        deepest = max((draft.drafted for draft in self.drafts), default=0)
        return tuple(self._position(index) for index in range(deepest))

    @property
    def histogram(self) -> tuple[int, ...]:
        """How many drafts had 0, 1, 2, ... tokens accepted."""
        counts = Counter(draft.accepted for draft in self.drafts)
        deepest = max((draft.drafted for draft in self.drafts), default=0)
        return tuple(counts[length] for length in range(deepest + 1))

    def _position(self, index: int) -> Position:
        here = [draft for draft in self.drafts if draft.drafted > index]
        return Position(
            accepted=sum(draft.accepted > index for draft in here),
            drafted=len(here),
            tested=sum(draft.accepted >= index for draft in here),
            drafts=self.num_drafts,
        )


@dataclass(frozen=True, slots=True)
class Position:
    """Outcome at one position of all drafts.

    accepted  drafts whose token at this position was accepted
    drafted   drafts that had a token at this position
    tested    those of them in which all tokens before it were accepted
    drafts    all drafts, including shorter ones
    """

    accepted: int
    drafted: int
    tested: int
    drafts: int

    @property
    def unconditional(self) -> float:
        """Accepted over all drafts: vLLM's acceptance rate per position. The sum of these is the mean length less 1."""
        return _ratio(self.accepted, self.drafts)

    @property
    def of_drafted(self) -> float:
        """Accepted over the drafts that had a token at this position."""
        return _ratio(self.accepted, self.drafted)

    @property
    def conditional(self) -> float:
        """Accepted over the drafts that were right up to this position: the drafter's accuracy at this distance."""
        return _ratio(self.accepted, self.tested)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
