"""Acceptance at a chosen rate, to measure speed. The output is NOT REAL TEXT.

With any models, even random ones, rounds proceed as if each drafted token were accepted with probability alpha
(Leviathan et al., arXiv 2211.17192, section 3). The random numbers depend on seed and position, so runs repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from paceline.core import tree
from paceline.core.acceptance.base import Needs, TargetView
from paceline.core.errors import ConfigurationError
from paceline.core.types import PAD, Accepted, Proposal


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Accept every level of a proposal with probability ``alpha`` (0 to 1), if the levels above it are accepted."""

    alpha: float

    name: ClassVar[str] = "synthetic"
    needs: ClassVar[Needs] = "choices"
    draft_probs: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = True
    on_host: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise ConfigurationError(
                f"synthetic_acceptance: expected a probability from 0 to 1, got {self.alpha!r}; correct it"
            )

    @property
    def cache_key(self) -> str:
        return f"synthetic {self.alpha}"

    def __call__(self, proposal: Proposal, view: TargetView) -> Accepted:
        """Accept as if the drafter had proposed the target's sampled token where the random number is below alpha."""
        import torch

        from paceline.core import noise
        from paceline.core.acceptance.match import match

        assert view.choices is not None
        nodes = (view.positions[:, 1:] - 1).contiguous()  # of the proposed tokens themselves
        accepted = noise.uniform(view.sampling.seeds, nodes, noise.ACCEPT) < self.alpha
        if proposal.parents is None:
            above = view.choices[:, :-1]
        else:
            above = view.choices.gather(1, (tree.parents_of(proposal) + 1).to(torch.int64))
        tokens = torch.where(accepted & (proposal.tokens != PAD), above, PAD)
        return match(Proposal(tokens, proposal.parents), view.choices, view.depth)
