"""What each of several drafters did for one target: counts for statistics. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrafterCounts:
    """Of one drafter of a choice.

    num_drafts           proposals of it that were verified; of these
    num_draft_tokens     tokens
    num_scored           proposals of it that were compared with what the target wrote, verified ones among them
    num_scored_tokens    tokens of these, from the first on, that the target wrote
    propose_seconds      time it took to propose, whether or not that was verified
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_scored: int = 0
    num_scored_tokens: int = 0
    propose_seconds: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Of all its proposals that were compared, the target's own token included."""
        return 1 + self.num_scored_tokens / self.num_scored if self.num_scored else 1.0

    def plus(
        self,
        *,
        num_drafts: int = 0,
        num_draft_tokens: int = 0,
        num_scored: int = 0,
        num_scored_tokens: int = 0,
        propose_seconds: float = 0.0,
    ) -> DrafterCounts:
        """With more of each."""
        return DrafterCounts(
            self.num_drafts + num_drafts,
            self.num_draft_tokens + num_draft_tokens,
            self.num_scored + num_scored,
            self.num_scored_tokens + num_scored_tokens,
            self.propose_seconds + propose_seconds,
        )

    def since(self, before: DrafterCounts) -> DrafterCounts:
        """What was added since ``before``."""
        return self.plus(
            num_drafts=-before.num_drafts,
            num_draft_tokens=-before.num_draft_tokens,
            num_scored=-before.num_scored,
            num_scored_tokens=-before.num_scored_tokens,
            propose_seconds=-before.propose_seconds,
        )

    def to_dict(self) -> dict[str, float]:
        """Plain values for JSON, the mean included."""
        return {
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_scored": self.num_scored,
            "num_scored_tokens": self.num_scored_tokens,
            "propose_seconds": self.propose_seconds,
            "mean_acceptance_length": self.mean_acceptance_length,
        }
