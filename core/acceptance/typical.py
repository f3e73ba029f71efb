"""Typical acceptance (Cai et al., arXiv 2401.10774): keep what the target finds plausible. LOSSY.

A drafted token stands when its probability is above min(epsilon, alpha * exp(-H)), H being the entropy of the target's
law at its place, so a token that the target would hardly ever choose can stand wherever it is unsure. The text does
not follow the target's law and does not equal that of plain decoding, except at temperature 0, where the law is
one-hot and the rule is `Match`. Nothing else in this package is lossy; what uses this rule says so.

Pure, with static shapes; probabilities come from `paceline.core.probs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import reduce, tree
from paceline.core.errors import ConfigurationError
from paceline.core.types import PAD, Accepted, Proposal

_INSIDE = 1e-5
"""Added to probabilities inside the logarithm of the entropy, as Medusa's own code does."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Keep the longest path of plausible tokens; of equally long ones the likeliest, of those the first.

    epsilon  a token above this probability always stands
    alpha    scales the bar where the target is unsure; Medusa takes the square root of epsilon

    Raises:
        ConfigurationError: a value is not between 0 and 1.
    """

    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "alpha"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < 1:
                raise ConfigurationError(
                    f"{name} of typical acceptance must be between 0 and 1, not {value!r}; Medusa's own "
                    "are epsilon=0.09 and alpha=0.3"
                )

    def __call__(self, proposal: Proposal, law: Tensor, choices: Tensor, *, depth: int) -> Accepted:
        """Proposal of N nodes, law [B, N + 1, V] float32 and choices [B, N + 1] int32 after each row -> Verdict.

        ``depth``: most nodes that can be accepted. The token behind them is the target's own choice.
        """
        tokens = proposal.tokens
        slots, nodes = tokens.shape
        if not nodes:
            return Accepted(tokens, choices.new_zeros(slots), choices[:, 0])
        parents = tree.parents_of(proposal)
        entropy = -(law * (law + _INSIDE).log()).sum(-1)
        bar = (self.alpha * torch.exp(-entropy)).clamp(max=self.epsilon)  # [B, N + 1]
        place = (parents + 1).to(torch.int64)
        vocabulary = law.shape[-1]
        ids = tokens.clamp(min=0, max=vocabulary - 1).to(torch.int64).unsqueeze(-1)
        p = law.gather(1, place.unsqueeze(-1).expand(-1, -1, vocabulary)).gather(2, ids).squeeze(-1)
        plausible = (p > bar.gather(1, place)) & (tokens >= 0) & (tokens < vocabulary)
        above = tree.ancestor_mask(parents)  # [B, N, N]
        alive = (above * (~plausible).to(torch.float32).unsqueeze(1)).sum(-1) == 0
        level = torch.where(alive, above.sum(-1), 0.0)
        count = level.amax(-1)
        likely = (above * p.clamp(min=1e-38).log().unsqueeze(1)).sum(-1)
        longest = alive & (level == count.unsqueeze(-1))
        best = torch.where(longest, likely, reduce.NEGATIVE)
        first = torch.where(longest & (best == best.amax(-1, keepdim=True)), _rows(nodes, tokens), float(nodes + 1))
        last = torch.where(count > 0, first.amin(-1), 0.0).to(torch.int64)  # row of the window; 0 = the root
        return Accepted(
            _path(above, last, depth), count.to(torch.int32), choices.gather(1, last.unsqueeze(1)).squeeze(1)
        )


def _rows(nodes: int, like: Tensor) -> Tensor:
    return torch.arange(1, nodes + 1, dtype=torch.float32, device=like.device)


def _path(above: Tensor, last: Tensor, depth: int) -> Tensor:
    """Rows of the node in row ``last`` [B] (0 = none) and of its ancestors, from the root down. -> [B, depth] int32"""
    nodes = above.shape[1]
    node = (last - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, nodes)
    mine = (above.gather(1, node).squeeze(1) > 0) & (last > 0).unsqueeze(-1)  # [B, N]
    levels = torch.arange(1, depth + 1, dtype=torch.float32, device=above.device).view(1, -1, 1)
    at = mine.unsqueeze(1) & (above.sum(-1).unsqueeze(1) == levels)  # [B, depth, N]: one node at most
    rows = torch.where(at, _rows(nodes, above), 0.0).sum(-1)
    return torch.where(rows > 0, rows, float(PAD)).to(torch.int32)
