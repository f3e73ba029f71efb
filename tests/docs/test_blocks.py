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
from tests.docs.pages import CURRENT, ROOT, python, text

ELSEWHERE = ("README.md", "docs/quickstart.md", "docs/extending/")
"""Pages whose blocks have tests of their own beside this one."""

WITH_CODE = [page for page in CURRENT if python(page) and not page.startswith(ELSEWHERE)]

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
def test_the_blocks_of_a_page_run(page: str, folder: Path, names: dict[str, object]) -> None:
    ran = 0
    for block, reason in blocks(page):
        if not reason:
            exec(compile(smaller(block, folder), page, "exec"), names)
            ran += 1
    assert ran, f"{page}: nothing is run"


def test_blocks_that_are_not_run_have_a_reason_in_their_page() -> None:
    found = {page: [reason for _, reason in blocks(page) if reason] for page in CURRENT}
    marked = {page: text(page).count("<!-- not run") for page in CURRENT}
    assert {page: len(reasons) for page, reasons in found.items()} == marked, "a mark stands before its block"
    assert sum(marked.values()) == 4, "one block more that nothing runs"
    assert all(len(reason) > 10 for reasons in found.values() for reason in reasons)
