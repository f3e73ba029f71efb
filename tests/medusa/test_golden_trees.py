"""Tree walks that two other engines test themselves with, worked out again for our tables."""

from __future__ import annotations

import pytest
import torch

from paceline.core.accept import Match, committed
from paceline.core.types import PAD, Proposal
from paceline.medusa.choices import Choices


def ints(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def test_two_trees_of_six_rows_in_one_batch() -> None:
    """SGLang's test of its tree verification: paths 3 -> 4 -> 5 and 11 -> 12, and 18 everywhere else."""
    proposal = Proposal(ints([1, 2, 3, 4, 5], [8, 9, 10, 11, 12]), ints([-1, 0, -1, 2, 3], [-1, 0, 1, -1, 3]))
    choices = torch.full((2, 6), 18, dtype=torch.int32)
    choices[0, 0], choices[0, 3], choices[0, 4] = 3, 4, 5
    choices[1, 0], choices[1, 4] = 11, 12
    verdict = Match()(proposal, choices, 3)
    assert verdict.path.tolist() == [[3, 4, 5], [4, 5, PAD]]
    assert verdict.count.tolist() == [3, 2]
    assert committed(proposal, verdict).tolist() == [[3, 4, 5, 18], [11, 12, 18, PAD]]


@pytest.mark.parametrize(
    ("planted", "expected"),
    [({0: 31}, [31]), ({0: 11, 1: 15}, [11, 15, 105]), ({0: 11, 1: 14, 4: 20}, [11, 14, 20, 110])],
    ids=["nothing", "a path", "the longest path"],
)
def test_three_walks_of_a_static_tree(planted: dict[int, int], expected: list[int]) -> None:
    """TensorRT-LLM's test of static trees: drafts 11 to 22, and the target says 100 + row where nothing is planted."""
    tree = Choices.of([[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [0, 0, 0], [0, 1, 1], [1, 0, 0]])
    proposal = Proposal(ints(list(range(11, 23))), tree.parents)
    choices = ints([planted.get(row, 100 + row) for row in range(13)])
    made = committed(proposal, Match()(proposal, choices))[0].tolist()
    assert [token for token in made if token != PAD] == expected
