"""The command line over tiny checkpoints, and streamed text."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import Result
from rich.console import Console

from paceline.cli.console import TextView
from paceline.cli.options import read_prompts
from paceline.core.errors import PromptError
from paceline.decoder.backends.registry import BACKENDS
from paceline.outputs import RequestOutput
from paceline.text.tokenizer import load_tokenizer
from tests.cli.calling import call, last, refused

EAGER = ["--backend", "eager", "--amp", "f32", "--n-positions", "64", "--context-length-estimate", "16"]
PROMPT = "def main"


def generate(home: Path, *arguments: object) -> Result:
    given = ("generate", "--target", home / "target", "--prompt", PROMPT, "--max-new-tokens", 20, *EAGER)
    return call(*given, *arguments)


def answer(home: Path, *arguments: object) -> dict[str, object]:
    done = generate(home, "--json", *arguments)
    assert done.exit_code == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    found: dict[str, object] = json.loads(done.stdout)
    return found


def bench(home: Path, prompts: Path, lines: str, *arguments: object) -> list[object]:
    prompts.write_text(lines)
    return ["bench", "--target", home / "target", "--draft", home / "draft", "--prompts", prompts, *arguments]


def test_json_is_one_object_with_the_new_tokens(home: Path) -> None:
    found = answer(home)
    assert list(found) == ["prompt", "text", "tokens", "finish_reason", "statistics"]
    assert found["prompt"] == PROMPT and found["finish_reason"] == "length"
    tokens = found["tokens"]
    assert isinstance(tokens, list) and len(tokens) == 20
    tokenizer = load_tokenizer(home / "target")
    everything = tokenizer.decode([*tokenizer.encode(PROMPT), *tokens])
    assert everything == PROMPT + str(found["text"])
    statistics = found["statistics"]
    assert isinstance(statistics, dict) and statistics["new_tokens"] == 20 and statistics["tokens_per_round"] == 1


@pytest.fixture(scope="module")
def hot(home: Path) -> object:
    """Tokens of plain decoding at temperature 0.9."""
    return answer(home, "--temperature", 0.9)["tokens"]


@pytest.mark.parametrize(
    "drafting",
    [
        ["--draft", "draft", "--k", "auto"],
        ["--draft", "draft", "--k", "auto:0,1,3", "--no-fused"],
        ["--draft", "ngram", "--k", "0,2"],
        ["--draft", "ngram", "--draft", "draft", "--k", "auto"],
        ["--draft", "suffix", "--draft", "ngram:k=2", "--draft", "draft", "--k", 3],
        ["--draft", '["suffix", {"type": "ngram", "k": 2}]'],
        ["--draft", "suffix", "--no-exact"],
        ["--draft", "draft", "--fused", "--confidence-threshold", 0.3],
        ["--draft", "target", "--vocabulary", "intersection"],
    ],
    ids=lambda given: " ".join(map(str, given)),
)
def test_options_of_drafting_keep_the_tokens(home: Path, hot: list[int], drafting: list[object]) -> None:
    found = answer(home, "--temperature", 0.9, *(home / one if one in ("draft", "target") else one for one in drafting))
    assert found["tokens"] == hot
    lengths = found["statistics"]["draft_lengths"]  # type: ignore[index]
    asked = str(drafting[drafting.index("--k") + 1]) if "--k" in drafting else "4"
    depths = {"auto": {0, 1, 2, 4, 8}, "auto:0,1,3": {0, 1, 3}, "0,2": {0, 2}}.get(asked, set())
    assert set(lengths) <= depths and bool(lengths) == bool(depths)


def test_tensor_parallel_models_keep_the_tokens(home: Path, hot: list[int]) -> None:
    divided = ("--tp-degree", 2, "--group-query-attention", "all-gather-heads", "--draft", home / "draft")
    assert answer(home, "--temperature", 0.9, *divided)["tokens"] == hot


def test_simulated_acceptance_is_marked_everywhere(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    asked = ("--draft", "ngram", "--synthetic-acceptance", 1, "--k", 3)
    with caplog.at_level("WARNING", "paceline"):
        found = answer(home, *asked)
    assert "'synthetic' is lossy" in caplog.text
    assert next(iter(found)) == "warning" and "NOT REAL TEXT" in str(found["warning"])
    assert found["statistics"]["acceptor"] == "synthetic" and not found["statistics"]["lossless"]  # type: ignore[index]
    done = generate(home, *asked, "--stats")
    assert done.stdout.startswith("NOT REAL TEXT") and "NOT REAL TEXT" in done.stderr
    assert "warning" not in answer(home, "--draft", "ngram")


def test_text_goes_to_stdout_and_nothing_else(home: Path) -> None:
    text = answer(home)["text"]
    done = generate(home, "--draft", home / "draft", "--stats")
    assert done.stdout == f"{text}\n"
    assert "tokens per round" in done.stderr
    assert "tokens per round" not in generate(home).stderr
    assert "rounds at each draft length" not in done.stderr
    done = generate(home, "--draft", home / "draft", "--k", "0,2", "--stats")
    assert "rounds at each draft length" in done.stderr and "0: " in done.stderr


def test_a_prompt_is_read_from_a_file(home: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt").write_text(PROMPT + "\n")
    asked = ("--target", home / "target", "--prompt-file", tmp_path / "prompt", *EAGER, "--max-new-tokens", 20)
    assert last(call("generate", "--json", *asked))["tokens"] == answer(home)["tokens"]


def test_stop_strings_end_the_text(home: Path) -> None:
    tokens = answer(home)["tokens"]
    assert isinstance(tokens, list)
    tokenizer = load_tokenizer(home / "target")
    at = next(i for i, token in enumerate(tokens) if tokenizer.decode([token]).isascii())
    found = answer(home, "--stop", "\n\n\n\n never", "--stop", tokenizer.decode([tokens[at]]), "--draft", "ngram")
    assert found["finish_reason"] == "stop" and found["tokens"] == tokens[: at + 1]
    text = answer(home)["text"]
    assert isinstance(text, str) and len(text) > 5
    assert answer(home, "--stop", text[2:4])["text"] == text[: text.index(text[2:4])], "as an answer over HTTP"


def test_folders_without_a_model_or_a_tokenizer_are_rejected(home: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        refused(str(tmp_path), "generate", "--target", tmp_path, "--prompt", PROMPT, *EAGER)
        (tmp_path / name).symlink_to(home / "target" / name)
    refused("tokenizer", "generate", "--target", tmp_path, "--prompt", PROMPT, *EAGER)


def test_compile_says_that_eager_compiles_nothing(home: Path, tmp_path: Path) -> None:
    asked = ("compile", "--backend", "eager", "--target", home / "target")
    done = call(*asked)
    assert done.exit_code == 0 and "compiles nothing" in done.stderr
    refused("--save: expected a backend that compiles graphs, got", *asked, "--save", tmp_path)
    refused("missing", "compile", "--target", tmp_path / "missing", "--backend", "eager")
    refused("config.json", *asked, "--draft", tmp_path)


@pytest.mark.parametrize("drafting", [[], ["--draft", "ngram"], ["--draft", "draft"]], ids=["plain", "n-gram", "model"])
def test_graphs_are_built_before_generation(home: Path, monkeypatch: pytest.MonkeyPatch, drafting: list[str]) -> None:
    """The backend is eager under another name, in a row that says that it compiles."""
    monkeypatch.setitem(BACKENDS, "other", replace(BACKENDS["eager"], compiles=True))
    options = ["--backend", "other", *(home / "draft" if one == "draft" else one for one in drafting)]
    done = generate(home, "--json", *options)
    assert done.exit_code == 0, done.stderr
    assert "preparing graphs" in done.stderr
    assert json.loads(done.stdout)["tokens"] == answer(home)["tokens"]
    if "ngram" not in drafting:
        made = call("compile", "--target", home / "target", *EAGER[2:], *options)
        assert made.exit_code == 0 and "verify" in made.stdout, made.stderr


def test_json_lines_prompts_are_read_as_written(tmp_path: Path) -> None:
    """JSON leaves the line ends of Unicode as they are, and only that of a file parts its lines."""
    file = tmp_path / "prompts.jsonl"
    texts = ["a\u2028b\u0085c", "d\n e", "na\u00efve"]
    file.write_text("\n".join(json.dumps({"prompt": text}, ensure_ascii=False) for text in texts) + "\n\n", "utf-8")
    assert read_prompts(file) == texts
    file.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\r\n')
    assert read_prompts(file) == ["a"]


@pytest.mark.parametrize("line", ['{"prompt": null}', '{"prompt": 5}', '{"prompt": ["a"]}', '["prompt"]', "{", "{}"])
def test_json_lines_without_text_are_rejected(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(PromptError, match="expected JSON lines"):
        read_prompts(file)


def test_prompts_with_lone_surrogates_are_rejected(home: Path, tmp_path: Path) -> None:
    """A shell passes bytes that are not UTF-8 as lone surrogates, which no tokenizer takes."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a\\ud800"}\n')
    with pytest.raises(PromptError, match="half a surrogate pair"):
        read_prompts(file)
    refused("half a surrogate pair", "generate", "--target", home / "target", "--prompt", "a\udcff")


def test_bench_compares_drafters(home: Path, tmp_path: Path) -> None:
    given = home, tmp_path / "prompts.jsonl", json.dumps({"prompt": PROMPT})
    asked = bench(*given, "--max-new-tokens", 4, *EAGER[:4])
    assert last(call(*asked, "--k", "1,2", "--tp-degree", 2, "--json"))["identical"] is True
    shown = call(*asked, "--draft", "suffix", "--k", "2")
    assert shown.exit_code == 0 and "speculative_over_plain" in shown.stdout and "{" not in shown.stdout


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        ("", [], "--prompts: expected at least one prompt"),
        ('{"prompt": "a"}', ["--num-prompts", 0], "--prompts: expected at least one prompt"),
        ('{"prompt": "a"}\n{"prompt": "b"}', ["--num-prompts", -1], "--prompts: expected at least one prompt"),
        ('{"prompt": "a"}', ["--max-new-tokens", 1], "at least 2"),
        ('{"prompt": "a"}\n{"prompt": ""}', [*EAGER[:2], "--max-new-tokens", 2], "prompt 2: expected text"),
        ('{"prompt": "a"}', ["--draft", '["ngram", "suffix"]'], "--draft: expected one drafter, got"),
    ],
)
def test_invalid_benches_fail(home: Path, tmp_path: Path, lines: str, options: list[object], message: str) -> None:
    refused(message, *bench(home, tmp_path / "prompts.jsonl", lines, *options))


def test_drafted_text_looks_different_on_a_terminal(home: Path) -> None:
    tokenizer = load_tokenizer(home / "target")
    tokens = tuple(tokenizer.encode("xyz\x1b"))
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system="standard", _environ={})
    TextView(console, tokenizer, []).show(RequestOutput(0, tokens, accepted=2, finish_reason="length"))
    assert written.getvalue() == "\x1b[1;32mx\x1b[0m\x1b[1;32my\x1b[0mz\ufffd"  # no escape from a model

    written = io.StringIO()
    view = TextView(Console(file=written, _environ={}), tokenizer, [], marks=True)
    view.show(RequestOutput(0, tokens[:3], accepted=2, finish_reason="length"))
    assert written.getvalue() == "\u2039xy\u203az"
