"""The demo target and prompts, for tests of the heads that are shipped with it."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoTokenizer

from paceline import AutoDecoder
from paceline.auto import SamplingDecoder

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "pycode"


def target() -> SamplingDecoder:
    """In plain PyTorch, which compiles nothing."""
    return AutoDecoder.from_pretrained(
        FOLDER / "target", n_positions=128, context_length_estimate=64, amp="f32", backend="native"
    )


def prompts(which: slice, *, longest: int | None = 48) -> list[list[int]]:
    """The beginnings of some of the demo's prompts, as ids."""
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "target")
    lines = (FOLDER / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return [tokenizer(json.loads(line)["prompt"]).input_ids[:longest] for line in lines[which]]
