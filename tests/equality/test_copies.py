"""The target of the copying benchmark copies to the token, and drafts from repetitions do not change that."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from paceline import AutoDecoder, SpeculativeGenerator

NEW = 60


def test_what_is_made_to_copy_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"do_sample": True, "seed": 5}
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    copies = importlib.import_module("copies")
    made = copies.copies(2)
    copies.copier(made, tmp_path)
    target = AutoDecoder.from_pretrained(tmp_path, n_positions=512, backend="eager")
    suffixes = SpeculativeGenerator("suffix", target, k=8)
    changed = 0
    for prompt in made.prompts:
        begin = len(prompt) - made.lag  # of the file's part that is copied next
        source = prompt[begin : begin + NEW]
        copy = [made.renamed.get(token, token) for token in source]
        changed += sum(a != b for a, b in zip(source, copy, strict=True))
        for one in (target, suffixes):
            (text,) = one.sample([prompt], max_new_tokens=NEW, eos_token_id=[], **asked).tolist()
            assert text[len(prompt) :] == copy
    assert changed  # it is no plain repetition
    assert suffixes.statistics.tau > 3
