"""Trees from choices: the published tables' figures, walks that other engines test, and what is rejected."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import probs, tree
from paceline.core.acceptance.base import committed
from paceline.core.errors import ConfigurationError
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Proposal
from paceline.medusa.tree import Choices
from tests.core.deciding import matched

SMALL = [[0], [0, 0], [1], [0, 1], [0, 0, 0], [1, 0]]
# Trees of github.com/FasterDecoding/Medusa (Apache-2.0), each as its inner nodes and how many children they have:
# "01:3" is the node [0, 1] with the children [0, 1, 0] to [0, 1, 2]; "-" is the root.
MC_SIM_7B_63 = """-:10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1
    000:2"""
VICUNA_13B_STAGE2 = """-:10 0:10 1:4 2:2 3:1 4:1 5:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 001:2
    002:1 010:1 100:1"""
VICUNA_33B_STAGE1 = "-:10 0:10 1:8 2:5 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 10:2 20:1"


def published(inner: str) -> Choices:
    nodes = [entry.split(":") for entry in inner.split()]
    return Choices.of([[*map(int, node.strip("-")), rank] for node, count in nodes for rank in range(int(count))])


@st.composite
def choice_trees(draw: st.DrawFn, *, depth: int = 4, size: int = 12) -> list[list[int]]:
    """Valid trees, siblings in any ranks."""
    paths: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, size))):
        above = draw(st.sampled_from([(), *(path for path in paths if len(path) < depth)]))
        path = (*above, draw(st.integers(0, 5)))
        if path not in paths:
            paths.append(path)
    return [list(path) for path in paths]


def test_nodes_are_numbered_as_medusa_numbers_them() -> None:
    own = Choices.of(SMALL)
    assert own.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))
    assert own.parents == (-1, -1, 0, 0, 1, 2) and own.widths == (2, 2, 1)


@pytest.mark.parametrize(
    ("inner", "marks", "levels"),
    [
        (MC_SIM_7B_63, 207, [10, 28, 23, 2]),
        (VICUNA_13B_STAGE2, 223, [10, 19, 25, 9]),
        (VICUNA_33B_STAGE1, 199, [10, 34, 19, 0]),
    ],
)
def test_published_trees_have_the_figures_of_medusas_own_tables(inner: str, marks: int, levels: list[int]) -> None:
    """Medusa's own function was run on its trees of 63 choices; marks: nodes that see a node, the root as well."""
    depths = tree.depths(published(inner).parents)
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
        ([], "tree: expected at least one choice, got none; give at least"), ([[0, 0]], "has no parent; add"),
        ([[0], [0]], "twice"), ([[0], []], "as a choice"), ([[-1]], "as a choice"), ([[0.5]], "whole numbers"),
        ([[True]], "whole numbers"), (["0"], "as a choice"), ([3], "as a choice"),
    ],
)  # fmt: skip
def test_invalid_choices_are_rejected(choices: list[object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        Choices.of(choices)  # type: ignore[arg-type]


def test_a_tree_deeper_or_wider_than_the_heads_is_rejected() -> None:
    tall = published(MC_SIM_7B_63)
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


def ints(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_two_golden_trees_in_one_batch_are_accepted_as_published(temperature: float) -> None:
    """SGLang's test of its tree verification: candidates 0 to 5 and 7 to 12; the target says 3 -> 4 -> 5 and 11 -> 12,
    and 18 everywhere else.
    """
    logits = torch.ones(2, 6, 20)
    for slot, row, token in ((0, 0, 3), (0, 3, 4), (0, 4, 5), (1, 0, 11), (1, 4, 12)):
        logits[slot, row, token] = 10.0
    logits[..., 18] = torch.where(logits.amax(-1) < 10, 10.0, logits[..., 18])
    sampling = sampling_tensors([Sampling(temperature=temperature, seed=seed) for seed in (1, 2)])
    choices = probs.sample_tokens(logits, torch.arange(7, 13, dtype=torch.int32).expand(2, 6), sampling)
    proposal = Proposal(ints([1, 2, 3, 4, 5], [8, 9, 10, 11, 12]), ints([-1, 0, -1, 2, 3], [-1, 0, 1, -1, 3]))
    verdict = matched(proposal, choices)
    assert verdict.path.tolist() == [[3, 4, 5], [4, 5, PAD]]  # theirs: [0, 3, 4, 5] and [6, 10, 11, -1], from 0 and 6
    assert verdict.count.tolist() == [3, 2]
    assert committed(proposal, verdict).tolist() == [[3, 4, 5, 18], [11, 12, 18, PAD]]


@pytest.mark.parametrize(
    ("planted", "expected"),
    [({0: 31}, [31]), ({0: 11, 1: 15}, [11, 15, 105]), ({0: 11, 1: 14, 4: 20}, [11, 14, 20, 110])],
    ids=["nothing", "a path", "the longest path"],
)
def test_a_static_tree_is_accepted_as_in_the_golden_cases(planted: dict[int, int], expected: list[int]) -> None:
    """TensorRT-LLM's test of static trees: drafts 11 to 22, and the target says 100 + row where nothing is planted."""
    own = Choices.of([[0], [1], [2], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0], [0, 0, 0], [0, 1, 1], [1, 0, 0]])
    proposal = Proposal(ints(list(range(11, 23))), own.parents)
    choices = ints([planted.get(row, 100 + row) for row in range(13)])
    made = committed(proposal, matched(proposal, choices))[0].tolist()
    assert [token for token in made if token != PAD] == expected
