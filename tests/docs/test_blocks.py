"""Every block of Python of the pages, run in order; those that cannot be say in the page why.

The pages of Medusa, EAGLE and structured output have the demo's models, all others a tiny pair in their place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.experiments.config import load_config
from paceline.experiments.round_times import policy_name
from tests.docs.pages import CURRENT, ROOT, python, text

WITH_CODE = [page for page in CURRENT if python(page) and not page.startswith("docs/extending/")]
"""Those of extending have tests beside this one."""
FIRST = ("README.md", "docs/quickstart.md")
"""Pages whose program imports and makes all that it uses, and prints a text."""

NOT_RUN = re.compile(r"<!-- not run: (.*) -->\n")


def blocks(page: str) -> list[tuple[str, str]]:
    """Each block of a page, and why it is not run (mostly it is: then nothing)."""
    found = re.findall(r"^(<!-- [^\n]* -->\n)?```python\n(.*?)^```", text(page), re.DOTALL | re.MULTILINE)
    reasons = [NOT_RUN.fullmatch(comment) for comment, _ in found]
    return [(block, reason[1] if reason else "") for (_, block), reason in zip(found, reasons, strict=True)]


WITH_DEMO = ("docs/medusa.md", "docs/eagle.md", "docs/structured.md")


@pytest.fixture
def folder(page: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the pages name. Decoders are on plain PyTorch and have few positions."""
    pair = ROOT / "examples" / "pycode" if page in WITH_DEMO else home
    for name, place in {
        "examples": pair.parent, "path/to/target": pair / "target", "model": pair / "target",
        "small": pair / "draft",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(place)
    monkeypatch.chdir(tmp_path)
    real = AutoDecoder.from_pretrained

    def plain(path: str, **options: Any) -> SamplingDecoder:
        return real(path, **{"n_positions": 256, **options, "backend": "eager", "amp": "f32"})

    monkeypatch.setattr(AutoDecoder, "from_pretrained", plain)
    return tmp_path


@pytest.fixture
def names(folder: Path) -> Iterator[dict[str, object]]:
    """Names that the prose around the blocks assumes."""
    target, draft = (AutoDecoder.from_pretrained(f"examples/pycode/{name}") for name in ("target", "draft"))
    prompts = [[5, 17, 99], [7, 8]]
    yield {
        "target": target, "draft": draft, "generator": SpeculativeGenerator(draft, target, k=3),
        "tokenizer": AutoTokenizer.from_pretrained("examples/pycode/target"), "prompts": prompts, "ids": prompts[:1],
        "prompt_ids": prompts[:1], "input_ids": torch.tensor([[5, 17, 99], [7, 8, 9]]),
    }  # fmt: skip


def smaller(block: str, folder: Path) -> str:
    """The same program on plain PyTorch, on a socket of this test, with two ranks for four, and short."""
    changed = block.replace('"native"', '"eager"').replace("/tmp/draft.sock", str(folder / "socket"))
    return changed.replace("tp_degree=4", "tp_degree=2").replace("1024", "256")


@pytest.mark.parametrize("page", WITH_CODE)
def test_the_blocks_of_a_page_run(
    page: str, folder: Path, names: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    ran = 0
    if page in FIRST:
        names.clear()
    for block, reason in blocks(page):
        if not reason:
            exec(compile(smaller(block, folder), page, "exec"), names)
            ran += 1
    assert ran, f"{page}: nothing is run"
    assert page not in FIRST or capsys.readouterr().out.startswith("def main(argv=None):")


def test_drafters_that_pages_print_keep_the_tokens(home: Path) -> None:
    printed = python("docs/drafters.md", marked=True)
    assert len(printed) == 2
    target = AutoDecoder.from_pretrained(home / "target", n_positions=64, amp="f32", backend="eager", batch_size=2)
    for block in printed:
        made: dict[str, Any] = {"target": target}
        exec(block, made)
        for sampling in ({}, {"do_sample": True, "seed": 4}):
            asked = {"max_new_tokens": 24, **sampling}
            prompts = [[5, 6, 7, 5], [9, 5, 6]]
            assert torch.equal(made["generator"].sample(prompts, **asked), target.sample(prompts, **asked))
        assert made["generator"].statistics.num_draft_tokens


def test_questions_of_the_page_of_experiments_are_about_its_example() -> None:
    """`build/quick` is what quick.yaml makes: it has traces, and drafters of the names that are asked for."""
    config = load_config(ROOT / "examples" / "experiments" / "quick.yaml")
    lines = [line for line in text("docs/experiments.md").splitlines() if "paceline" in line and "build/quick" in line]
    asked = {name for line in lines for name in re.findall(r'--draft(?:er)? "([^"]+)"', line)}
    names = {policy_name(one, config) for one in config.drafters}
    assert config.traces and len(lines) > 6 and {"draft model", "suffix+draft model"} <= asked <= names


def test_blocks_that_are_not_run_have_a_reason_in_their_page() -> None:
    found = {page: [reason for _, reason in blocks(page) if reason] for page in CURRENT}
    marked = {page: text(page).count("<!-- not run") for page in CURRENT}
    assert {page: len(reasons) for page, reasons in found.items()} == marked, "a mark stands before its block"
    assert sum(marked.values()) == 4, "one block more that nothing runs"
    assert all(len(reason) > 10 for reasons in found.values() for reason in reasons)
