"""The tokens that a proposal had at the place of the target's own token."""

from __future__ import annotations

import torch

from paceline.core.types import PAD, Proposal
from paceline.engine.rounds import drafted_depths, drafted_last


def test_the_replaced_draft_of_a_chain_follows_the_accepted_ones() -> None:
    proposal = Proposal(torch.tensor([[5, 6, 7], [5, 6, PAD], [5, 6, 7]]))
    assert drafted_last(proposal, [[5, 9], [5, 6, 9], [9]]) == [[6], [], [5]]


def test_the_replaced_drafts_of_a_tree_are_the_children_of_the_path() -> None:
    tokens = torch.tensor([[5, 6, 7, 8, 5, 3]])
    parents = (-1, -1, 0, 0, -1, 4)
    for tree in (parents, torch.tensor([parents])):
        proposal = Proposal(tokens, tree)
        assert drafted_last(proposal, [[9]]) == [[5, 6, 5]]
        assert drafted_last(proposal, [[5, 9]]) == [[7, 8, 3]]
        assert drafted_last(proposal, [[6, 9]]) == [[]]


def test_lengths_of_chains_are_those_of_their_tokens() -> None:
    made = Proposal.chains([[5, -1, 7], [3], [], [1, 2, 3, 4]], (2, 4))
    assert made.lengths == drafted_depths(Proposal(made.tokens), [4] * 4) == [1, 1, 0, 4]
