"""Acceptance rules called with what a test knows of a target; no tests."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core import tree
from paceline.core.acceptance.base import AcceptanceRule, TargetView
from paceline.core.acceptance.match import Match
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import Accepted, Proposal, SamplingTensors


def decide(
    rule: AcceptanceRule,
    proposal: Proposal,
    *,
    choices: Tensor | None = None,
    probs: Tensor | None = None,
    positions: Tensor | None = None,
    sampling: SamplingTensors | None = None,
) -> Accepted:
    """Nodes of a proposal that a rule accepts. Without positions the root decides position 1; without sampling:
    greedy.
    """
    slots, nodes = proposal.tokens.shape
    if positions is None:
        positions = torch.arange(1, nodes + 2, dtype=torch.int32).expand(slots, -1)
    if sampling is None:
        sampling = sampling_tensors([Sampling()] * slots)
    return rule(proposal, TargetView(positions, sampling, depth(proposal), choices, probs))


def depth(proposal: Proposal) -> int:
    """How many tokens of it could be accepted."""
    if not proposal.tokens.shape[1] or proposal.parents is None:
        return proposal.tokens.shape[1]
    rows = tree.parents_of(proposal).tolist()
    return max(max(tree.depths(tuple(parents))) for parents in rows)


def matched(proposal: Proposal, choices: Tensor) -> Accepted:
    """Result of `Match`."""
    return decide(Match(), proposal, choices=choices)
