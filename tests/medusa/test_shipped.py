"""The heads of examples/pycode/medusa: their trees fit, they change no token, and they are as good as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from paceline import AutoDecoder, MedusaDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.medusa.choices import Choices
from tests.equality.laws import plain, run, texts

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "pycode"
HEADS = FOLDER / "medusa"


@pytest.fixture(scope="module")
def target(compile_cache: None) -> SamplingDecoder:
    return AutoDecoder.from_pretrained(
        FOLDER / "target", n_positions=128, context_length_estimate=64, amp="f32", backend="eager"
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    lines = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer(json.loads(line)["prompt"]).input_ids[:48] for line in lines[3:5]]


def test_every_tree_fits_and_has_the_nodes_that_its_name_says() -> None:
    files = sorted(HEADS.glob("tree-*.json"))
    assert files
    for file in files:
        tree = Choices.read(file)
        tree.check(heads=4, top=10)
        assert len(tree) == int(file.stem.removeprefix("tree-"))
    assert Choices.read(HEADS / "tree.json") in [Choices.read(file) for file in files]


@pytest.mark.parametrize("law", [{}, {"do_sample": True, "temperature": 1.0, "seed": 2}], ids=["greedy", "sampled"])
def test_they_change_no_token(target: SamplingDecoder, prompts: list[list[int]], law: dict[str, object]) -> None:
    drafter = MedusaDrafter.from_pretrained(HEADS, target, tree=HEADS / "tree-8.json")
    result = run(SpeculativeGenerator(drafter, target), law, prompts=prompts, new=24)
    assert texts(result) == plain(target, law, prompts=prompts, new=24)
    assert result.statistics.accepted > 0


def test_greedy_rounds_are_about_as_long_as_the_search_expected(
    target: SamplingDecoder, prompts: list[list[int]]
) -> None:
    """Published: 2.65 tokens a round with this tree. Two short texts stray, but damaged heads would give about 1."""
    drafter = MedusaDrafter.from_pretrained(HEADS, target, tree=HEADS / "tree-8.json")
    assert run(SpeculativeGenerator(drafter, target), {}, prompts=prompts, new=40).statistics.tau > 1.6
