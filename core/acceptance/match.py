"""Sample-and-match: keep a drafted token exactly when it equals the token that the target samples at its position.

Needs no draft probabilities, is exact for every kind of drafter and any tree, and gives the same tokens as decoding
without a drafter with the same seed. Of drafts that were not sampled it accepts as much as rejection sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from paceline.core import tree
from paceline.core.acceptance.base import Needs, TargetView
from paceline.core.types import PAD, Accepted, Proposal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Match:
    """Keep drafted tokens that equal the target's sampled ones. An `AcceptanceRule`."""

    name: ClassVar[str] = "match"
    needs: ClassVar[Needs] = "choices"
    draft_probs: ClassVar[bool] = False
    lossless: ClassVar[bool] = True
    trees: ClassVar[bool] = True
    on_host: ClassVar[bool] = True
    cache_key: ClassVar[str] = "match"

    def __call__(self, proposal: Proposal, view: TargetView) -> Accepted:
        assert view.choices is not None
        return match(proposal, view.choices, view.depth)


def match(proposal: Proposal, choices: Tensor, depth: int) -> Accepted:
    """Return the path from the root on which every token equals the choice after its parent.

    Proposal of N tokens, choices [B, N + 1] int32; ``depth``: maximum number of accepted tokens
    """
    import torch

    slots, nodes = proposal.tokens.shape
    if not nodes:
        return Accepted(proposal.tokens, choices.new_zeros(slots), choices[:, 0])
    if proposal.parents is None:
        return _match_chain(proposal.tokens, choices)
    parents = tree.parents_of(proposal)
    agreed = proposal.tokens == choices.gather(1, (parents + 1).to(torch.int64))
    above = tree.ancestor_mask(parents)
    broken = (above * (~agreed | (proposal.tokens == PAD)).to(torch.float32).unsqueeze(1)).sum(-1)
    return _walk(broken == 0, above.sum(-1), choices, depth=depth)


def _match_chain(drafts: Tensor, choices: Tensor) -> Accepted:
    import torch

    nodes = drafts.shape[1]
    broken = (drafts != choices[:, :nodes]) | (drafts == PAD)
    standing = broken.to(torch.float32).cumsum(-1) == 0
    rows = torch.arange(1, nodes + 1, dtype=torch.int32, device=drafts.device)
    count = standing.to(torch.float32).sum(-1).to(torch.int32)
    token = choices.gather(1, count.to(torch.int64).unsqueeze(1)).squeeze(1)
    return Accepted(torch.where(standing, rows, PAD), count, token)


def _walk(alive: Tensor, level: Tensor, choices: Tensor, *, depth: int) -> Accepted:
    """Read the accepted path off the nodes whose whole path agreed. alive [B, N] bool, level [B, N] float32, from 1."""
    import torch

    nodes = alive.shape[1]
    rows = torch.arange(1, nodes + 1, dtype=torch.float32, device=choices.device)
    levels = torch.arange(1, depth + 1, dtype=torch.float32, device=choices.device)
    at_level = alive.unsqueeze(1) & (level.unsqueeze(1) == levels.unsqueeze(-1))  # [B, D, N]
    # Two children with the same token are both alive: the lower node represents both.
    first = torch.where(at_level, rows, float(nodes + 1)).amin(-1)
    exists = first <= nodes
    path = torch.where(exists, first, float(PAD)).to(torch.int32)
    count = exists.to(torch.float32).sum(-1).to(torch.int32)
    last = torch.where(exists, first, 0.0).amax(-1).to(torch.int64)
    return Accepted(path, count, choices.gather(1, last.unsqueeze(1)).squeeze(1))
