"""Typical acceptance (Cai et al., arXiv 2401.10774): keep tokens that the target finds plausible. LOSSY.

A drafted token is accepted when its probability is above min(epsilon, alpha * exp(-H)), where H is the entropy of the
target's distribution at its position. So a token that the target would rarely sample can be accepted where the target's
entropy is high. At temperature 0 the distribution is one-hot and the rule equals `Match`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.core import tree
from paceline.core.acceptance.base import Needs, TargetView
from paceline.core.errors import ConfigurationError
from paceline.core.types import PAD, Accepted, Proposal

if TYPE_CHECKING:
    from torch import Tensor

_INSIDE = 1e-5
"""Added to probabilities inside the logarithm of the entropy, as Medusa's own code does."""


@dataclass(frozen=True, slots=True)
class Typical:
    """Keep the longest path of plausible tokens: of equally long ones the likeliest, of those the first. LOSSY.

    epsilon  a token above this probability is always accepted
    alpha    scales the threshold where the target's entropy is high; Medusa uses the square root of epsilon

    Raises:
        ConfigurationError: a value is not between 0 and 1.
    """

    name: ClassVar[str] = "typical"
    needs: ClassVar[Needs] = "both"
    draft_probs: ClassVar[bool] = False
    lossless: ClassVar[bool] = False
    trees: ClassVar[bool] = True
    on_host: ClassVar[bool] = False

    epsilon: float = 0.09
    alpha: float = 0.3

    def __post_init__(self) -> None:
        for name in ("epsilon", "alpha"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 < value < 1:
                raise ConfigurationError(
                    f"{name}: expected a number between 0 and 1 for typical acceptance, got {value!r}; Medusa uses "
                    "epsilon=0.09 and alpha=0.3"
                )

    @property
    def cache_key(self) -> str:
        return f"typical {self.epsilon} {self.alpha}"

    def __call__(self, proposal: Proposal, view: TargetView) -> Accepted:
        import torch

        from paceline.core import reduce

        assert view.probs is not None
        assert view.choices is not None
        target, choices = view.probs, view.choices
        tokens = proposal.tokens
        slots, nodes = tokens.shape
        if not nodes:
            return Accepted(tokens, choices.new_zeros(slots), choices[:, 0])
        parents = tree.parents_of(proposal)
        entropy = -(target * (target + _INSIDE).log()).sum(-1)
        threshold = (self.alpha * torch.exp(-entropy)).clamp(max=self.epsilon)  # [B, N + 1]
        place = (parents + 1).to(torch.int64)
        vocabulary = target.shape[-1]
        ids = tokens.clamp(min=0, max=vocabulary - 1).to(torch.int64).unsqueeze(-1)
        p = target.gather(1, place.unsqueeze(-1).expand(-1, -1, vocabulary)).gather(2, ids).squeeze(-1)
        plausible = (p > threshold.gather(1, place)) & (tokens >= 0) & (tokens < vocabulary)
        above = tree.ancestor_mask(parents)  # [B, N, N]
        alive = (above * (~plausible).to(torch.float32).unsqueeze(1)).sum(-1) == 0
        level = torch.where(alive, above.sum(-1), 0.0)
        count = level.amax(-1)
        likely = (above * p.clamp(min=1e-38).log().unsqueeze(1)).sum(-1)
        longest = alive & (level == count.unsqueeze(-1))
        best = torch.where(longest, likely, reduce.NEGATIVE)
        first = torch.where(longest & (best == best.amax(-1, keepdim=True)), _rows(nodes, tokens), float(nodes + 1))
        last = torch.where(count > 0, first.amin(-1), 0.0).to(torch.int64)  # 0 = the root
        return Accepted(
            _path(above, last, view.depth), count.to(torch.int32), choices.gather(1, last.unsqueeze(1)).squeeze(1)
        )


def _rows(nodes: int, like: Tensor) -> Tensor:
    import torch

    return torch.arange(1, nodes + 1, dtype=torch.float32, device=like.device)


def _path(above: Tensor, last: Tensor, depth: int) -> Tensor:
    """Rows of the node in row ``last`` [B] (0 = none) and of its ancestors, from the root down. -> [B, depth] int32"""
    import torch

    nodes = above.shape[1]
    node = (last - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, nodes)
    on_path = (above.gather(1, node).squeeze(1) > 0) & (last > 0).unsqueeze(-1)  # [B, N]
    levels = torch.arange(1, depth + 1, dtype=torch.float32, device=above.device).view(1, -1, 1)
    at = on_path.unsqueeze(1) & (above.sum(-1).unsqueeze(1) == levels)  # [B, depth, N]: one node at most
    rows = torch.where(at, _rows(nodes, above), 0.0).sum(-1)
    return torch.where(rows > 0, rows, float(PAD)).to(torch.int32)
