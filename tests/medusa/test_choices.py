"""Trees from choices: the published tables' figures, and what is rejected."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import tree
from paceline.core.errors import ConfigurationError
from paceline.medusa.tree import Choices
from tests.medusa.trees import MC_SIM_7B_63, PUBLISHED, choice_trees

SMALL = [[0], [0, 0], [1], [0, 1], [0, 0, 0], [1, 0]]


def test_nodes_are_numbered_as_medusa_numbers_them() -> None:
    own = Choices.of(SMALL)
    assert own.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert own.parents == (-1, -1, 0, 0, 1, 2) and own.widths == (2, 2, 1)


@pytest.mark.parametrize(
    ("name", "marks", "levels"),
    [
        ("mc_sim_7b_63", 207, [10, 28, 23, 2]),
        ("vicuna_7b_stage2", 217, [10, 23, 23, 7]),
        ("vicuna_7b_stage1_ablation", 219, [10, 21, 25, 7]),
        ("vicuna_7b_stage1", 202, [10, 32, 20, 1]),
        ("vicuna_13b_stage2", 223, [10, 19, 25, 9]),
        ("vicuna_13b_stage1", 205, [10, 29, 23, 1]),
        ("vicuna_33b_stage2", 214, [10, 24, 24, 5]),
        ("vicuna_33b_stage1", 199, [10, 34, 19, 0]),
        ("zephyr_stage2", 209, [10, 27, 23, 3]),
    ],
)
def test_published_trees_have_the_figures_of_medusas_own_tables(name: str, marks: int, levels: list[int]) -> None:
    """Medusa's own function was run on its nine trees of 63 choices; marks: nodes that see a node, the root as well."""
    depths = tree.depths(Choices.of(PUBLISHED[name]).parents)
    assert len(depths) == 63 and 1 + sum(depth + 1 for depth in depths) == marks
    assert [depths.count(depth) for depth in range(1, 5)] == levels


@given(choice_trees())
def test_parents_spell_the_paths_of_the_choices(choices: list[list[int]]) -> None:
    own = Choices.of(choices)
    tree.check(own.parents)
    for path, parent in zip(own.paths, own.parents, strict=True):
        assert path[:-1] == (() if parent == tree.ROOT else own.paths[parent])
    assert sorted(own.paths) == sorted(map(tuple, choices))
    ranks = [[path[level] for path in own.paths if len(path) > level] for level in range(own.depth)]
    assert own.widths == tuple(1 + max(row) for row in ranks)


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
