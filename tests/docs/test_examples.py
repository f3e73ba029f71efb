"""Python of README, quick start and drafters, run over a tiny pair."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import paceline
from paceline.experiments.config import load_config
from paceline.experiments.round_times import policy_name
from tests.docs.pages import ROOT, python, text


def on_the_tiny_pair(block: str) -> str:
    """The same program on plain PyTorch."""
    return block.replace("n_positions=512", 'n_positions=512, backend="eager", amp="f32"').replace(
        ', backend="eager", amp="f32", amp="bf16", backend="native"', ', backend="eager", amp="f32"'
    )


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_python_of_the_first_pages_runs(
    page: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    (block,) = python(page)
    monkeypatch.chdir(home.parents[1])
    exec(on_the_tiny_pair(block), {})
    assert capsys.readouterr().out.startswith("def main(argv=None):")


def test_questions_of_the_page_of_experiments_are_about_its_example() -> None:
    """`build/quick` is what quick.yaml makes: it has traces, and drafters of the names that are asked for."""
    config = load_config(ROOT / "examples" / "experiments" / "quick.yaml")
    names = {policy_name(one, config) for one in config.drafters}
    lines = [line for line in text("docs/experiments.md").splitlines() if "paceline" in line and "build/quick" in line]
    asked = {name for line in lines for name in re.findall(r'--draft(?:er)? "([^"]+)"', line)}
    assert config.traces and len(lines) > 6 and {"draft model", "suffix+draft model"} <= asked <= names


def test_drafters_that_pages_print_keep_the_tokens(home: Path) -> None:
    blocks = python("docs/drafters.md", marked=True)
    assert len(blocks) == 2
    target = paceline.AutoDecoder.from_pretrained(
        home / "target", n_positions=64, amp="f32", backend="eager", batch_size=2
    )
    prompts = [[5, 6, 7, 5], [9, 5, 6]]
    for block in blocks:
        names: dict[str, object] = {"target": target}
        exec(block, names)
        generator = names["generator"]
        assert isinstance(generator, paceline.SpeculativeGenerator)
        for sampling in ({}, {"do_sample": True, "seed": 4}):
            ids = generator.sample(prompts, max_new_tokens=24, **sampling)
            assert torch.equal(ids, target.sample(prompts, max_new_tokens=24, **sampling))
        assert generator.statistics.num_draft_tokens
