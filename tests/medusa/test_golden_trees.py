"""Tree walks that two other engines test themselves with, worked out again for our tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from paceline.core import probs, tree
from paceline.core.acceptance.base import committed
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Proposal
from paceline.medusa.tree import Choices
from tests.core.deciding import matched
from tests.fakes import misfit


def ints(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_two_golden_trees_in_one_batch_are_accepted_as_published(temperature: float) -> None:
    """SGLang's test of its tree verification: candidates 0 to 5 and 7 to 12, a node's children given as next_token and
    the chain of next_sibling after it; the target says 3 -> 4 -> 5 and 11 -> 12, and 18 everywhere else.
    """
    following = ([1, 2, -1, 4, 5, -1], [4, 2, 3, -1, 5, -1])
    siblings = ([-1, 3, -1, -1, -1, -1], [-1, -1, -1, -1, 1, -1])
    parents = [parents_of(*links) for links in zip(following, siblings, strict=True)]
    assert parents == [[-1, 0, -1, 2, 3], [-1, 0, 1, -1, 3]]
    logits = torch.ones(2, 6, 20)
    for slot, row, token in ((0, 0, 3), (0, 3, 4), (0, 4, 5), (1, 0, 11), (1, 4, 12)):
        logits[slot, row, token] = 10.0
    logits[..., 18] = torch.where(logits.amax(-1) < 10, 10.0, logits[..., 18])
    sampling = sampling_tensors([Sampling(temperature=temperature, seed=seed) for seed in (1, 2)])
    choices = probs.sample_tokens(logits, torch.arange(7, 13, dtype=torch.int32).expand(2, 6), sampling)
    proposal = Proposal(ints([1, 2, 3, 4, 5], [8, 9, 10, 11, 12]), ints(*parents))
    verdict = matched(proposal, choices)
    assert verdict.path.tolist() == [[3, 4, 5], [4, 5, PAD]]  # theirs: [0, 3, 4, 5] and [6, 10, 11, -1], from 0 and 6
    assert verdict.count.tolist() == [3, 2]
    assert committed(proposal, verdict).tolist() == [[3, 4, 5, 18], [11, 12, 18, PAD]]


def parents_of(following: list[int], siblings: list[int]) -> list[int]:
    """Parent nodes (the root is -1) of the rows 1, 2, ... of a tree by first children and next siblings."""
    found = [0] * len(following)
    for row, child in enumerate(following):
        while child >= 0:
            found[child], child = row - 1, siblings[child]
    return found[1:]


@pytest.mark.parametrize(
    ("planted", "expected"),
    [({0: 31}, [31]), ({0: 11, 1: 15}, [11, 15, 105]), ({0: 11, 1: 14, 4: 20}, [11, 14, 20, 110])],
    ids=["nothing", "a path", "the longest path"],
)
def test_a_static_tree_is_accepted_as_in_the_golden_cases(planted: dict[int, int], expected: list[int]) -> None:
    """TensorRT-LLM's test of static trees: drafts 11 to 22, and the target says 100 + row where nothing is planted."""
    tree = Choices.of([[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [0, 0, 0], [0, 1, 1], [1, 0, 0]])
    proposal = Proposal(ints(list(range(11, 23))), tree.parents)
    choices = ints([planted.get(row, 100 + row) for row in range(13)])
    made = committed(proposal, matched(proposal, choices))[0].tolist()
    assert [token for token in made if token != PAD] == expected


@pytest.mark.parametrize("children", [[0, 1, 2], [3, 1], [4], [2, 4, 0, 3]])
def test_trying_siblings_keeps_the_distribution(children: list[int]) -> None:
    """At a node with the probabilities (.3, .25, .2, .15, .1) any fixed children, each with its children, leave them
    and those after them, as rejection in turn with renormalising would. Without renormalising it would be (.435, .287,
    .088, .145, .045), which the same test refuses.
    """
    count, p = 20_000, torch.tensor([0.3, 0.25, 0.2, 0.15, 0.1]).double()
    after = torch.softmax(torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double(), -1)
    nodes = [*children, *((child + 1) % 5 for child in children)]  # below child i stands node len + i
    parents = (*(-1 for _ in children), *range(len(children)))
    distributions = torch.stack([p, *(after[child] for child in children), *(p for _ in children)])
    sampling = sampling_tensors([Sampling(temperature=1.0, seed=seed) for seed in range(count)])
    at = torch.tensor([0, *tree.depths(parents)], dtype=torch.int32) + 9
    choices = probs.sample_tokens(distributions.log().float().expand(count, -1, -1), at.expand(count, -1), sampling)
    proposal = Proposal(ints(nodes).expand(count, -1), parents)
    out = committed(proposal, matched(proposal, choices))
    assert misfit(out[:, :1].numpy(), p.numpy()) > 1e-3
    assert misfit(out[:, :1].numpy(), np.array([0.435, 0.287, 0.088, 0.145, 0.045])) < 1e-9
    for child in children:
        behind = out[(out[:, 0] == child) & (out[:, 1] != PAD), 1:2]
        assert len(behind) == int((out[:, 0] == child).sum()), (
            "a child that stands is followed by a token of its distribution"
        )
        assert misfit(behind.numpy(), after[child].numpy()) > 1e-3
