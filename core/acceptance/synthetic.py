"""Acceptance by the toss of a coin, to measure speed at a given acceptance. What comes out is NOT REAL TEXT.

With models of any quality, even random ones, rounds take the course they would take if each draft stood with
probability alpha (Leviathan et al., arXiv 2211.17192, section 3). Coins depend on seed and position: runs repeat.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import noise, tree
from paceline.core.acceptance.match import Match
from paceline.core.errors import ConfigurationError
from paceline.core.types import PAD, Accepted, Proposal, SamplingTensors


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Every level of a proposal stands with probability ``alpha``, if the levels above it do.

    Raises:
        ConfigurationError: alpha is no probability.
    """

    alpha: float

    def __post_init__(self) -> None:
        if not isinstance(self.alpha, (int, float)) or not 0 <= self.alpha <= 1:
            raise ConfigurationError(f"alpha={self.alpha!r} of simulated acceptance is no probability; give 0 to 1")

    def __call__(
        self, proposal: Proposal, choices: Tensor, positions: Tensor, *, sampling: SamplingTensors, depth: int
    ) -> Accepted:
        """Proposal of N nodes, choices [B, N + 1] int32, positions [B, N] int32 of the nodes -> Verdict."""
        heads = noise.uniform(sampling.seeds, positions, noise.ACCEPT) < self.alpha
        if proposal.parents is None:
            above = choices[:, :-1]
        else:
            above = choices.gather(1, (tree.parents_of(proposal) + 1).to(torch.int64))
        # As if the draft had said what the target chose wherever the coin fell well, and nothing elsewhere.
        said = torch.where(heads & (proposal.tokens != PAD), above, PAD)
        return Match()(Proposal(said, proposal.parents), choices, depth)
