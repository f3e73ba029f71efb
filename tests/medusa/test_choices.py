"""Trees from choices: the published tables' figures, and what is rejected."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import tree
from paceline.core.errors import ConfigurationError
from paceline.medusa.tree import Choices, tree_buffers
from tests.medusa.trees import MC_SIM_7B_63, PUBLISHED, choice_trees

SMALL = [[0], [0, 0], [1], [0, 1], [0, 0, 0], [1, 0]]


def seen_by(row: list[int]) -> set[int]:
    return {column for column, mark in enumerate(row) if mark}


def test_tables_of_a_small_tree_are_right() -> None:
    made = tree_buffers(SMALL)
    assert made.tree_indices == [0, 1, 2, 11, 12, 11, 21]
    assert made.position_ids == [0, 1, 1, 2, 2, 2, 3]
    assert made.retrieve_indices == [[0, 1, 3, 6], [0, 2, 5, -1], [0, 1, 4, -1]]
    expected = [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 4}, {0, 2, 5}, {0, 1, 3, 6}]
    assert [seen_by(row) for row in made.attention_mask] == expected


@pytest.mark.parametrize(
    ("name", "marks", "largest", "paths", "gaps", "levels"),
    [
        ("mc_sim_7b_63", 207, 32, (42, 5), 58, [10, 28, 23, 2]),
        ("vicuna_7b_stage2", 217, 34, (42, 5), 53, [10, 23, 23, 7]),
        ("vicuna_7b_stage1_ablation", 219, 34, (42, 5), 52, [10, 21, 25, 7]),
        ("vicuna_7b_stage1", 202, 31, (44, 5), 67, [10, 32, 20, 1]),
        ("vicuna_13b_stage2", 223, 34, (42, 5), 50, [10, 19, 25, 9]),
        ("vicuna_13b_stage1", 205, 31, (44, 5), 65, [10, 29, 23, 1]),
        ("vicuna_33b_stage2", 214, 33, (43, 5), 57, [10, 24, 24, 5]),
        ("vicuna_33b_stage1", 199, 29, (46, 4), 27, [10, 34, 19, 0]),
        ("zephyr_stage2", 209, 32, (44, 5), 63, [10, 27, 23, 3]),
    ],
)
def test_tables_of_the_published_trees_are_right(
    name: str, marks: int, largest: int, paths: tuple[int, int], gaps: int, levels: list[int]
) -> None:
    """Figures of Medusa's own function, run on its own nine trees of 63 choices."""
    made = tree_buffers(PUBLISHED[name])
    assert len(made.tree_indices) == len(made.attention_mask) == 64
    assert sum(map(sum, made.attention_mask)) == marks
    assert max(made.tree_indices) == largest
    assert (len(made.retrieve_indices), len(made.retrieve_indices[0])) == paths
    assert sum(row.count(-1) for row in made.retrieve_indices) == gaps
    assert [made.position_ids.count(depth) for depth in range(1, 5)] == levels


@given(choice_trees())
def test_tables_agree_with_the_tree_of_parents(choices: list[list[int]]) -> None:
    made, own = tree_buffers(choices), Choices.of(choices)
    tree.check(own.parents)
    assert made.position_ids[1:] == list(tree.depths(own.parents))
    for node, path in enumerate(own.paths):
        way, up = {0}, node
        while up != tree.ROOT:
            way.add(up + 1)
            up = own.parents[up]
        assert seen_by(made.attention_mask[node + 1]) == way
        assert made.tree_indices[node + 1] == 1 + 10 * (len(path) - 1) + path[-1]
    leaves = set(range(len(own))) - set(own.parents)
    rows = [[node for node in row if node >= 0] for row in made.retrieve_indices]
    assert sorted(row[-1] - 1 for row in rows) == sorted(leaves)
    for row in rows:
        assert set(row) == seen_by(made.attention_mask[row[-1]])
    assert own.widths == tuple(
        1 + max(path[level] for path in own.paths if len(path) > level) for level in range(own.depth)
    )


@given(choice_trees(), st.randoms())
def test_the_order_of_choices_does_not_matter(choices: list[list[int]], random: object) -> None:
    shuffled = list(choices)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert Choices.of(shuffled) == Choices.of(choices)


def test_chain_choices_make_a_chain() -> None:
    assert tree.is_chain(Choices.chain(4).parents)
    assert Choices.of([[0, 0], [0]]) == Choices.chain(2)


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ([], "tree: expected at least one choice, got none; give at least"),
        ([[0, 0]], "has no parent; add"),
        ([[0], [0]], "twice"),
        ([[0], []], "as a choice"),
        ([[-1]], "as a choice"),
        ([[0.5]], "whole numbers"),
        ([[True]], "whole numbers"),
        (["0"], "as a choice"),
        ([3], "as a choice"),
    ],
)
def test_invalid_choices_are_rejected(choices: list[object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Choices.of(choices)  # type: ignore[arg-type]


def test_a_tree_deeper_or_wider_than_the_heads_is_rejected() -> None:
    tall = Choices.of(MC_SIM_7B_63)
    tall.check(heads=4, top=10)
    with pytest.raises(ConfigurationError, match="depth of at most 3, the number of heads, got 4"):
        tall.check(heads=3, top=10)
    with pytest.raises(ConfigurationError, match=r"ranks below .*, got 9"):
        tall.check(heads=4, top=9)
    with pytest.raises(ConfigurationError, match=r"ranks below 10 .*, got 10; use a narrower"):
        tree_buffers([[0], [10]])


def test_files_of_choices_are_read(tmp_path: Path) -> None:
    own, file = Choices.of(SMALL), tmp_path / "tree.json"
    own.write(file)
    assert Choices.read(file) == own
    file.write_text(json.dumps({"choices": SMALL}))
    assert Choices.read(file) == own
    for text in ("[[0],", '{"tree": []}', "7", "[" * 100_000):
        file.write_text(text)
        with pytest.raises(ConfigurationError, match=r"tree\.json"):
            Choices.read(file)
    with pytest.raises(ConfigurationError, match="absent"):
        Choices.read(tmp_path / "absent.json")
