"""Counts and health of drafters for the statistics of a call: each of several, or one in another process."""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class DrafterCounts:
    """Counts of one drafter of a choice.

    num_drafts           proposals of it that were verified; of these
    num_draft_tokens     tokens
    num_scored           proposals of it that were compared with the target's tokens, verified ones among them
    num_scored_tokens    tokens of these, from the first on, that the target sampled
    propose_seconds      time to propose, verified or not
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_scored: int = 0
    num_scored_tokens: int = 0
    propose_seconds: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Mean accepted length of all compared proposals, the bonus or recovered token included."""
        return 1 + self.num_scored_tokens / self.num_scored if self.num_scored else 1.0

    def plus(self, other: DrafterCounts) -> DrafterCounts:
        pairs = zip(astuple(self), astuple(other), strict=True)
        return DrafterCounts(*(mine + more for mine, more in pairs))

    def since(self, before: DrafterCounts) -> DrafterCounts:
        pairs = zip(astuple(self), astuple(before), strict=True)
        return DrafterCounts(*(now - then for now, then in pairs))

    def to_dict(self) -> dict[str, float]:
        return asdict(self) | {"mean_acceptance_length": self.mean_acceptance_length}


DrafterState = Literal["up", "late", "broken", "down", "closed"]
Fault = Literal["lost", "late", "failed", "invalid"]


@dataclass(frozen=True, slots=True)
class DrafterHealth:
    """Health of a drafter since it was made.

    state       up; late (a reply is overdue); broken (failed too often, no longer used); down (being
                restarted); closed
    asked       rounds in which a request was sent to it; of these were
    answered    answered in time with a usable proposal
    ahead       answered with a proposal that was ready before the request
    skipped     rounds without a request, because it was not up
    lost        connections that broke: the process died or was killed
    late        replies after the deadline
    failed      replies that gave a reason why there is no proposal
    invalid     replies with a wrong shape, or ids outside the vocabulary
    restarts    restarts of the process
    rereads     sequences that it had to prefill again
    last_error  the last reason, as a message
    """

    state: DrafterState = "down"
    asked: int = 0
    answered: int = 0
    ahead: int = 0
    skipped: int = 0
    lost: int = 0
    late: int = 0
    failed: int = 0
    invalid: int = 0
    restarts: int = 0
    rereads: int = 0
    last_error: str = ""

    @property
    def faults(self) -> int:
        return self.lost + self.late + self.failed + self.invalid

    @property
    def hit_rate(self) -> float:
        """Share of the responses that were ready before the request; 0 without responses."""
        return self.ahead / self.answered if self.answered else 0.0

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"hit_rate": self.hit_rate}

    def since(self, before: DrafterHealth) -> DrafterHealth:
        now, then = asdict(self), asdict(before)
        return replace(self, **{name: value - then[name] for name, value in now.items() if isinstance(value, int)})
