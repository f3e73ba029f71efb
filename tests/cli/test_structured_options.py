"""`--json-schema`, `--regex` and `--logprobs`: the answer fits, and drafts change no token of it."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from paceline.text import structured_output
from paceline.text.tokenizer import load_tokenizer, prompt_ids
from tests.cli.calling import refused
from tests.cli.test_cli import EAGER, answer

SCHEMA = {"enum": ["main", "argv", 7]}


@pytest.fixture(scope="module")
def ending(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same pair, whose texts can end."""
    folder = tmp_path_factory.mktemp("ending")
    for name in ("target", "draft"):
        shutil.copytree(home / name, folder / name)
        for file in ("config.json", "generation_config.json"):
            content = json.loads((folder / name / file).read_text())
            (folder / name / file).write_text(json.dumps({**content, "eos_token_id": 0}))
    return folder


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    return tmp_path / "schema.json"


def test_answers_match_their_regex_or_schema_with_any_draft(ending: Path, schema: Path) -> None:
    expression, texts = r"(ab|cd){2,4}x", list[str]()
    asked: list[list[object]] = [["--regex", expression], ["--json-schema", schema, "--temperature", 1, "--seed", 4]]
    for options in asked:
        found = answer(ending, *options)
        assert answer(ending, *options, "--draft", ending / "draft", "--k", 2)["tokens"] == found["tokens"]
        assert found["finish_reason"] == "stop"
        texts.append(str(found["text"]))
    assert re.fullmatch(expression, texts[0]) and json.loads(texts[1]) in SCHEMA["enum"]


def test_a_grammar_is_compiled_once(ending: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    real = structured_output._matcher
    monkeypatch.setattr(structured_output, "_matcher", lambda *given: compiled.append(given) or real(*given))
    answer(ending, "--regex", "once|twice")
    assert len(compiled) == 1, "the check before loading compiles it"


def test_log_probabilities_are_printed_for_each_token(home: Path) -> None:
    found: dict[str, Any] = answer(home, "--logprobs", 3)
    plain = answer(home)
    assert found["tokens"] == plain["tokens"] and len(found["logprobs"]) == len(found["tokens"])
    for token, one in zip(found["tokens"], found["logprobs"], strict=True):
        assert len(one["top"]) == 3 and one["top"][0][0] == token, "greedy: the likeliest is what was chosen"
        assert one["logprob"] == one["top"][0][1] and sum(math.exp(value) for _, value in one["top"]) <= 1 + 1e-6


def test_tokens_of_the_prompt_have_log_probabilities_too(home: Path) -> None:
    found: dict[str, Any] = answer(home, "--prompt-logprobs", 2)
    ids = prompt_ids(load_tokenizer(home / "target"), found["prompt"])
    assert [one["token"] for one in found["prompt_logprobs"]] == ids[1:] and "logprobs" not in found
    assert all(len(one["top"]) == 2 and one["logprob"] <= one["top"][0][1] < 0 for one in found["prompt_logprobs"])


def test_an_invalid_regex_is_rejected(ending: Path) -> None:
    refused("regex", "generate", "--target", ending / "target", "--prompt", "x", *EAGER, "--regex", "(")
