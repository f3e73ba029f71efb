"""The best tree of a size, against every tree of that size, and figures that can be worked out by hand."""

from itertools import combinations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigurationError
from paceline.medusa import search
from paceline.medusa.tree import Choices


def every_tree(nodes: int, *, heads: int, top: int) -> list[Choices]:
    paths = [path for depth in range(1, heads + 1) for path in product(range(top), repeat=depth)]
    sets = (set(chosen) for chosen in combinations(paths, nodes))
    return [Choices.of(sorted(found)) for found in sets if all(len(p) == 1 or p[:-1] in found for p in found)]


rank_tables = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)


@settings(max_examples=25)
@given(rank_tables, st.integers(1, 5))
def test_the_found_tree_is_the_best_of_its_size(ranks: list[tuple[int, int]], nodes: int) -> None:
    places = search.by_places(torch.tensor(ranks), top=3)
    if not sum(places(())):
        with pytest.raises(ConfigurationError, match="train the heads"):
            search.best(places, nodes)
        return
    found = search.best(places, nodes)
    best = max(search.expected(one, places) for one in every_tree(nodes, heads=2, top=3))
    assert len(found.choices) <= nodes
    assert found.accepted == pytest.approx(best)
    assert search.expected(found.choices, places) == pytest.approx(found.accepted)


@given(rank_tables)
def test_expected_length_is_the_mean_longest_correct_path(ranks: list[tuple[int, int]]) -> None:
    tree = Choices.of([[0], [1], [0, 0], [0, 2], [1, 1]])
    lengths = [
        max((n for n in (1, 2) if row[:n] in tree.paths), default=0) if row[:1] in tree.paths else 0 for row in ranks
    ]
    places = search.by_places(torch.tensor(ranks), top=3)
    assert search.expected(tree, places) == pytest.approx(sum(lengths) / len(ranks))


def test_correlated_heads_are_not_treated_as_independent() -> None:
    ranks = torch.tensor([[0, 0], [0, 0], [1, 1], [1, 1]])
    together, apart = search.by_places(ranks, top=2), search.by_heads([[0.5, 1.0], [0.5, 1.0]])
    assert together((0,)) == [0.5, 0.0]
    assert apart((0,)) == [0.25, 0.25]
    assert search.best(together, 4).choices == Choices.of([[0], [1], [0, 0], [1, 1]])
    assert search.best(together, 4).tau == 3.0


def test_equal_accuracies_give_the_geometric_sum() -> None:
    found = search.best(search.by_heads([[0.8], [0.8], [0.8], [0.8]]), 4)
    assert found.choices == Choices.chain(4)
    assert found.tau == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_a_tree_has_no_node_of_probability_zero() -> None:
    ranks = torch.tensor([[0, 3], [3, 0]])
    assert search.best(search.by_places(ranks, top=3), 9).choices == Choices.of([[0]])
    with pytest.raises(ConfigurationError, match="nodes: expected at least 1, got"):
        search.best(search.by_places(ranks, top=3), 0)
