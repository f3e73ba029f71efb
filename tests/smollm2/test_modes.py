"""The drafters of examples/smollm2 with their target: no token changes, and they draft as well as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from tests.docs.pages import script

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "smollm2"
SAMPLED = {"do_sample": True, "temperature": 0.7, "seed": 3}
MEASURE = script(FOLDER / "recipe" / "measure.py", "smollm2_measure")
PUBLISHED = json.loads((FOLDER / "acceptance.json").read_text())
NAMES = [name for name in PUBLISHED if name not in ("prompts", "new_tokens")]


@pytest.fixture(scope="module")
def target(smollm2: Path) -> SamplingDecoder:
    made: SamplingDecoder = MEASURE.load(smollm2)
    return made


@pytest.fixture(scope="module")
def rows(smollm2: Path) -> list[list[int]]:
    found: list[list[int]] = MEASURE.prompts(smollm2)
    assert len(found) == PUBLISHED["prompts"]
    return found


@pytest.fixture(scope="module")
def plain(target: SamplingDecoder, rows: list[list[int]]) -> dict[str, Any]:
    return {"greedy": MEASURE.run(target, rows), "sampled": MEASURE.run(target, rows[:2], **SAMPLED)}


@pytest.fixture(scope="module")
def drafts() -> dict[str, dict[str, Any]]:
    made: dict[str, dict[str, Any]] = MEASURE.drafts()
    assert list(made) == NAMES
    return made


FEW = ("eagle3, dynamic tree",)
"""What `make test` asks."""


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FEW else pytest.mark.full) for one in NAMES])
def test_a_drafter_changes_no_token_and_drafts_as_published(
    target: SamplingDecoder, rows: list[list[int]], plain: dict[str, Any], drafts: dict[str, dict[str, Any]], name: str
) -> None:
    generator = SpeculativeGenerator(target=target, **drafts[name])
    found = MEASURE.run(generator, rows)
    assert found["texts"] == plain["greedy"]["texts"]
    published = PUBLISHED[name]
    # Another machine's last bits may turn a near-tie, and a text that begins to differ goes on differently.
    ours, theirs = (sum(one["num_accepted_tokens_per_pos"]) / one["num_drafts"] for one in (found, published))
    assert ours == pytest.approx(theirs, rel=0.1)
    assert MEASURE.run(generator, rows[:2], **SAMPLED)["texts"] == plain["sampled"]["texts"]


def test_shipped_files_are_small() -> None:
    files = [path for name in ("draft", "eagle3", "medusa") for path in (FOLDER / name).iterdir()]
    assert sum(path.stat().st_size for path in (*files, FOLDER / "answers.bin")) < 40e6
