"""Outputs under schemas, by every kind of drafter of the demo pair: valid, and those of plain decoding.

A short run of `benchmarks/structured.py`, which does it ten thousand times, with plain PyTorch.
"""

from __future__ import annotations

from argparse import Namespace
from collections import Counter

import pytest

from benchmarks import structured
from benchmarks.structured import DEMO, EXPRESSION, SCHEMAS, Runs, summary, valid
from paceline import StructuredOutput

ROWS = 2
DRAFTS = [
    "suffix",
    f"{DEMO / 'draft'}",
    f"{DEMO / 'eagle3'}",
    f"{DEMO / 'eagle3'}:draft_tree=dynamic:4,2,4",
    f"{DEMO / 'medusa'}",
]


@pytest.fixture(scope="module")
def runs(compile_cache: None) -> Runs:
    return Runs(Namespace(drafts=DRAFTS, batch_size=ROWS, backend="native", amp="f32", max_new_tokens=32))


@pytest.mark.full  # small models under grammars: `tests/orchestrator/test_structured.py` and the matrix
@pytest.mark.parametrize(("kind", "temperature"), [("call", 0.0), ("person", 1.0), ("expression", 1.0)])
def test_every_drafter_gives_the_structured_output_of_plain_decoding(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, kind: str, temperature: float
) -> None:
    monkeypatch.setattr(structured, "BLOCK", ROWS)
    asked = {name: StructuredOutput("json_schema", schema) for name, schema in SCHEMAS.items()}
    asked["expression"] = StructuredOutput("regex", EXPRESSION)
    block = runs.block(kind, asked[kind], temperature, first=0)
    counts = Counter(block.counts)
    assert counts["outputs"] == counts["equal to plain"] == ROWS * (1 + len(DRAFTS)), block
    assert counts["valid"] > 0 == counts["invalid"], block
    assert counts["valid"] + counts["cut"] == counts["outputs"]
    assert len(block.mean_acceptance_length) == len(DRAFTS) and max(block.mean_acceptance_length.values()) > 1
    assert summary([block])["valid"] == counts["valid"]


def test_the_validity_check_finds_invalid_outputs() -> None:
    assert valid("flags", "[true, false]") and valid("expression", "ab_1")
    wrong = [("flags", "[true]"), ("flags", "[1, 2]"), ("call", "{}"), ("call", "{"), ("expression", "ab_1 ")]
    assert not any(valid(kind, text) for kind, text in wrong)
