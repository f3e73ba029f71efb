"""What README and guide say about commands and Python, tried out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import paceline
from tests.cli.calling import call

ROOT = Path(__file__).parents[2]


def test_readme_names_commands_that_exist() -> None:
    readme, makefile = ((ROOT / name).read_text() for name in ("README.md", "Makefile"))
    named = re.findall(r"^    make (\w+)", readme, re.MULTILINE)
    assert named == ["demo", "test"]
    assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in named)
    for command, options in re.findall(r"^    paceline (\w+)((?:.*\\\n)*.*)$", readme, re.MULTILINE):
        known = call(command, "--help").stdout
        assert all(option in known for option in re.findall(r"--[a-z-]+", options)), command


def test_python_of_the_readme_runs(home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(home.parents[1])
    exec(block.replace('"inductor"', '"eager"').replace('"bf16"', '"f32"'), {})
    assert capsys.readouterr().out.startswith("def main(argv=None):")


def test_drafters_of_the_guide_keep_the_tokens(home: Path) -> None:
    blocks = re.findall(r"```python drafter\n(.*?)```", (ROOT / "docs" / "guide.md").read_text(), re.DOTALL)
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
