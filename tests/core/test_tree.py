"""Trees as tuples of parents: depths and ancestors against a walk up from every node."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import tree
from paceline.core.errors import ConfigurationError


def way_up(parents: tuple[int, ...], node: int) -> list[int]:
    found = []
    while node != tree.ROOT:
        found.append(node)
        node = parents[node]
    return found


@given(st.integers(0, 12).flatmap(lambda n: st.tuples(*(st.integers(-1, node - 1) for node in range(n)))))
def test_depths_and_ancestors_follow_the_parents(parents: tuple[int, ...]) -> None:
    tree.check(parents)
    ways = [way_up(parents, node) for node in range(len(parents))]
    assert tree.depths(parents) == tuple(len(way) for way in ways)
    rows = torch.tensor([parents, parents], dtype=torch.int32).view(2, len(parents))
    wanted = [[float(m in way) for m in range(len(parents))] for way in ways]
    assert tree.ancestor_mask(rows).tolist() == [wanted, wanted]
    assert tree.is_chain(parents) == (list(parents) == list(range(-1, len(parents) - 1)))


def test_every_node_of_a_chain_is_the_child_of_the_one_before() -> None:
    assert tree.chain(0) == ()
    assert tree.chain(4) == (-1, 0, 1, 2)


@pytest.mark.parametrize(("parents", "node", "parent"), [((0,), 0, 0), ((-1, -2), 1, -2), ((-1, 2, 0), 1, 2)])
def test_a_parent_after_its_child_is_rejected(parents: tuple[int, ...], node: int, parent: int) -> None:
    with pytest.raises(ConfigurationError, match=f"the parent of node {node}, got {parent}"):
        tree.check(parents)
