"""Small experiments for the tests: a tiny pair with a tokenizer, eager; no tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.decoder.tiny import VOCABULARY, save_pair


def save_models(folder: Path) -> None:
    """``folder/target`` and ``folder/draft``, with a tokenizer of one letter a token."""
    save_pair(folder)
    for role in ("target", "draft"):
        save_tokenizer(folder / role)


def save_tokenizer(folder: Path, *, first: int = 0) -> None:
    """A tokenizer of one letter a token. ``first``: id of the first letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(33 + i): (first + i) % VOCABULARY for i in range(VOCABULARY)}
    made = Tokenizer(models.WordLevel(letters, unk_token="!"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="!").save_pretrained(folder)


def save_prompts(path: Path, count: int = 4) -> Path:
    """Prompts in two categories."""
    rows = [{"prompt": "&*&*" + "+,-"[i % 3] * 2 + "&*", "category": "ab"[i % 2], "id": f"p{i}"} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def grid(folder: Path, **changes: Any) -> dict[str, Any]:
    """The values of a small experiment over these models."""
    return {
        "targets": str(folder / "target"),
        "drafters": ["none", "suffix", {"name": "model", "draft": str(folder / "draft"), "k": [1, 3]}],
        "prompt_sets": str(folder / "prompts.jsonl"), "k": 2, "max_new_tokens": 9, "backend": "eager", "amp": "f32",
        **changes,
    }  # fmt: skip
