"""The head of examples/pycode/eagle3: it changes no token, and it drafts as well as published."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from paceline import AutoDecoder, Chain, DynamicTree, EagleDrafter, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.eagle.growth import Growth
from tests.equality.laws import Law, plain, run, texts

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "pycode"
HEAD = FOLDER / "eagle3"


@pytest.fixture(scope="module")
def target(compile_cache: None) -> SamplingDecoder:
    return AutoDecoder.from_pretrained(
        FOLDER / "target", n_positions=128, context_length_estimate=64, amp="f32", backend="eager"
    )


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    lines = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer(json.loads(line)["prompt"]).input_ids[:48] for line in lines[3:4]]


@pytest.mark.parametrize(
    ("growth", "law"),
    [(Chain(3), {}), (DynamicTree(8, depth=4, width=3), {"do_sample": True, "temperature": 1.0, "seed": 2})],
    ids=["chain, greedy", "grown tree, sampled"],
)
def test_it_changes_no_token_and_drafts_well(
    target: SamplingDecoder, prompts: list[list[int]], growth: Growth, law: Law
) -> None:
    """Published, greedily: 2.13 tokens a round in chains of 3, 2.67 with this tree; damaged heads give about 1."""
    generator = SpeculativeGenerator(EagleDrafter.from_pretrained(HEAD, target, growth), target)
    result = run(generator, law, prompts=prompts, new=20)
    assert texts(result) == plain(target, law, prompts=prompts, new=20)
    assert result.statistics.tau > 1.3


def test_its_acceptance_falls_with_the_depth() -> None:
    shares = json.loads((HEAD / "acceptance.json").read_text())["greedy chains"]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True) and shares[-1] > 0 and shares[0] < 1
