"""The heads of examples/pycode/medusa: their trees fit, they change no token, and they are as good as published."""

from __future__ import annotations

import pytest

from paceline import MedusaDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.medusa.tree import Choices
from tests import shipped
from tests.equality.settings import plain, run, texts

HEADS = shipped.FOLDER / "medusa"


@pytest.fixture(scope="module")
def target(compile_cache: None) -> SamplingDecoder:
    return shipped.target()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return shipped.prompts(slice(3, 5))


def test_every_shipped_tree_fits_and_has_the_nodes_of_its_name() -> None:
    files = sorted(HEADS.glob("tree-*.json"))
    assert files
    for file in files:
        tree = Choices.read(file)
        tree.check(heads=4, top=10)
        assert len(tree) == int(file.stem.removeprefix("tree-"))
    assert Choices.read(HEADS / "tree.json") in [Choices.read(file) for file in files]


@pytest.mark.parametrize("setting", [{}, {"do_sample": True, "temperature": 1.0, "seed": 2}], ids=["greedy", "sampled"])
def test_shipped_medusa_heads_change_no_token(
    target: SamplingDecoder, prompts: list[list[int]], setting: dict[str, object]
) -> None:
    drafter = MedusaDrafter.from_pretrained(HEADS, target, draft_tree=HEADS / "tree-8.json")
    result = run(SpeculativeGenerator(drafter, target), setting, prompts=prompts, new=24)
    assert texts(result) == plain(target, setting, prompts=prompts, new=24)
    assert result.statistics.num_accepted_tokens > 0


def test_greedy_rounds_are_about_as_long_as_the_search_expected(
    target: SamplingDecoder, prompts: list[list[int]]
) -> None:
    """Published: 2.06 tokens per round with this tree. Two short texts stray, but damaged heads would give about 1."""
    drafter = MedusaDrafter.from_pretrained(HEADS, target, draft_tree=HEADS / "tree-8.json")
    assert run(SpeculativeGenerator(drafter, target), {}, prompts=prompts, new=40).statistics.tau > 1.4
