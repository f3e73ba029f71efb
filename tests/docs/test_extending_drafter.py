"""The drafters of docs/extending/drafter.md, as they are printed: they run, change no token, and stay short."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from paceline import SpeculativeGenerator, registry
from tests.decoder.tiny import Workshop
from tests.docs.pages import script

PAGE = Path(__file__).parents[2] / "docs" / "extending" / "drafter.md"
TEXT, ROW, HEAD = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), flags=re.M | re.S)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [3, 9], [4] * 20, [1, 2, 3]]
SAMPLING = [{}, {"do_sample": True, "temperature": 0.8, "seed": 3}]


def module(code: str, name: str, folder: Path) -> ModuleType:
    """A separate file, as a user would write it."""
    (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return script(folder / f"{name}.py", name)


def test_each_example_drafter_is_one_file_of_the_stated_length() -> None:
    stated = re.search(r"complete files, of (\d+) and (\d+) lines", PAGE.read_text(encoding="utf-8"))
    assert stated is not None
    counted = [sum(bool(line.strip()) for line in code.splitlines()) for code in (TEXT, HEAD)]
    assert counted == [int(number) for number in stated.groups()] and counted[0] < 40 and counted[1] < 80


def test_one_row_makes_the_text_drafter_available_by_name(workshop: Workshop, tmp_path: Path) -> None:
    module(TEXT, "bigram", tmp_path)
    try:
        exec(ROW, {})
        generator = SpeculativeGenerator("bigram", workshop.decoder(slots=2), k=3)
    finally:
        registry.DRAFTERS.pop("bigram", None)
    assert type(generator.drafter).__name__ == "BigramDrafter" and generator.drafter.draft_shape.depth == 3


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("k", [4, (0, 1, 2, 4)])
def test_the_text_drafter_changes_no_token(
    workshop: Workshop, tmp_path: Path, k: int | tuple[int, ...], sampling: dict[str, object]
) -> None:
    target = workshop.decoder(slots=2)
    drafter = module(TEXT, "bigram", tmp_path).BigramDrafter(4)
    generator = SpeculativeGenerator(drafter, target, k=k)
    expected = target.sample(PROMPTS, max_new_tokens=40, **sampling)
    assert torch.equal(generator.sample(PROMPTS, max_new_tokens=40, **sampling), expected)
    assert not drafter._texts, "every text is forgotten"
    assert generator.statistics.num_draft_tokens > 0 or k != 4


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(("k", "fused"), [(4, True), (4, False), ((0, 1, 2, 4), None)])
def test_the_head_changes_no_token(
    workshop: Workshop, tmp_path: Path, k: int | tuple[int, ...], fused: bool | None, sampling: dict[str, object]
) -> None:
    target = workshop.decoder(slots=2)
    drafter = module(HEAD, "recurrent", tmp_path).recurrent_drafter(target)
    generator = SpeculativeGenerator(drafter, target, k=k, fused=fused)
    expected = target.sample(PROMPTS, max_new_tokens=40, **sampling)
    assert torch.equal(generator.sample(PROMPTS, max_new_tokens=40, **sampling), expected)
    assert generator.statistics.num_draft_tokens > 0 or k != 4
