"""A random MTP head that speculators wrote: its logits step by step, and the rounds of a greedy text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import AutoDrafter, SpeculativeGenerator
from paceline.decoder.steps import prefill
from tests.decoder.tiny import fresh
from tests.draft.random_heads import rounds
from tests.heads.speculators import needs_speculators, run_script

pytestmark = needs_speculators
SCRIPT = Path(__file__).parent / "written" / "mtp.py"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speculators")
    run_script(SCRIPT, folder)
    return folder


def test_mtp_logits_equal_speculators_step_by_step(written: Path, compile_cache: None) -> None:
    expected: dict[str, Any] = json.loads((written / "expected.json").read_text())
    target = fresh(written / "target")
    head = AutoDrafter.from_pretrained(written / "head", target, k=3).head  # type: ignore[attr-defined]
    bucket = target.bucket_for(target.n_positions)
    for one in expected["rounds"]:
        text = one["text"]
        states = prefill(target, 0, text[:-1], reads=head.reads)[1]
        assert states is not None
        row, last = torch.zeros(1, dtype=torch.int32), torch.tensor([len(text) - 2], dtype=torch.int32)
        place = head.place(row, len(text) - 1, bucket)
        hidden = head.read(torch.tensor([text[1:]]).int(), states.unsqueeze(0), place, last=last)
        for index, (token, logits) in enumerate(zip(one["drafts"], one["logits"], strict=True)):
            assert torch.allclose(head.logits(hidden)[0, 0], torch.tensor(logits), atol=1e-4)
            hidden = head.next(torch.tensor([[token]]).int(), hidden, head.place(last + 1 + index, 1, bucket))
    text, forward = expected["text"], torch.tensor(expected["forward"])
    states = prefill(target, 0, text[: len(forward)], reads=head.reads)[1]
    assert states is not None
    tokens = torch.tensor([text[1 : len(forward) + 1]]).int()
    place = head.place(torch.zeros(1, dtype=torch.int32), len(forward), bucket)
    for position in range(len(forward)):
        hidden = head.read(tokens, states.unsqueeze(0), place, last=torch.tensor([position]).int())
        assert torch.allclose(head.logits(hidden)[0, 0], forward[position], atol=1e-4)


def test_mtp_rounds_equal_a_simulation_with_its_modules(written: Path, compile_cache: None) -> None:
    expected: dict[str, Any] = json.loads((written / "expected.json").read_text())
    target = fresh(written / "target")
    generator = SpeculativeGenerator(str(written / "head"), target, k=3)
    prompt = expected["rounds"][0]["text"][:-1]
    text, accepted = rounds(generator, prompt, len(expected["text"]) - len(prompt))
    assert text == expected["text"], "the target's own greedy text"
    assert accepted[: len(expected["accepted"])] == expected["accepted"]
    assert 0 < sum(expected["accepted"]) < 3 * len(expected["accepted"])
