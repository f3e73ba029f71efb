"""The head of examples/pycode/eagle3: it changes no token, and it drafts as well as published."""

from __future__ import annotations

import json

import pytest

from paceline import Chain, DynamicTree, EagleDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.eagle.tree import DraftTree
from tests import shipped
from tests.equality.settings import Setting, plain, run, texts

HEAD = shipped.FOLDER / "eagle3"


@pytest.fixture(scope="module")
def target(compile_cache: None) -> SamplingDecoder:
    return shipped.target()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return shipped.prompts(slice(3, 4))


@pytest.mark.parametrize(
    ("draft_tree", "setting"),
    [(Chain(3), {}), (DynamicTree(8, depth=4, width=3), {"do_sample": True, "temperature": 1.0, "seed": 2})],
    ids=["chain, greedy", "grown tree, sampled"],
)
def test_the_shipped_eagle_head_changes_no_token_and_drafts_well(
    target: SamplingDecoder, prompts: list[list[int]], draft_tree: DraftTree, setting: Setting
) -> None:
    """Published, greedily: 2.47 tokens per round in chains of 3, 2.92 with this tree; damaged heads give about 1."""
    generator = SpeculativeGenerator(EagleDrafter.from_pretrained(HEAD, target, draft_tree), target)
    result = run(generator, setting, prompts=prompts, new=20)
    assert texts(result) == plain(target, setting, prompts=prompts, new=20)
    assert result.statistics.tau > 1.3


def test_acceptance_of_the_shipped_head_falls_with_depth() -> None:
    shares = json.loads((HEAD / "acceptance.json").read_text())["greedy chains"]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True) and shares[-1] > 0 and shares[0] < 1
