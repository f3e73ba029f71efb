"""Training, tree and conversion of Medusa heads by command, and generating with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.calling import call, last, refused, trained_in_three_goes
from tests.decoder.tiny import VOCABULARY

EAGER = ["--backend", "eager", "--amp", "f32"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text of as many words as a few windows need."""
    file = tmp_path_factory.mktemp("data") / "text.py"
    file.write_text(" ".join(f"w{(i * i + i // 7) % VOCABULARY}" for i in range(1200)))
    return file


@pytest.fixture(scope="module")
def heads(target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads by the command line, in three goes."""
    out = tmp_path_factory.mktemp("heads")
    command: list[object] = [
        "train", "medusa", "--target", target, "--data", data, "--out", out, "--num-heads", 2, "--tokens", 64 * 4,
        "--length", 64, "--eval-samples", 2, "--epochs", 4, "--batch-size", 2, "--json",
    ]  # fmt: skip
    assert trained_in_three_goes(command, out / "work")["heads"] == 2
    return out


def tokens(target: Path, *arguments: object) -> dict[str, object]:
    given = ("generate", "--json", "--target", target, "--prompt", "w5 w9 w5", "--max-new-tokens", 16, *EAGER)
    return last(call(*given, "--context-length-estimate", 16, *arguments))


def test_heads_are_trained_and_generate_the_tokens_of_plain_decoding(target: Path, heads: Path, tmp_path: Path) -> None:
    table = json.loads((heads / "accuracy.json").read_text())
    assert table["places"] > 0 and len(table["top"]) == 2
    file = tmp_path / "tree.json"
    file.write_text("[[0], [1], [0, 0]]")
    for sampling in ([], ["--temperature", 0.8, "--seed", 4]):
        plain = tokens(target, *sampling)
        for draft in (heads, f"{heads}:draft_tree={file}"):
            assert tokens(target, "--draft", draft, *sampling)["tokens"] == plain["tokens"]
    file.write_text("[[0], [0, 0]]")  # a chain can be had at several depths, as deep as there are heads
    found = tokens(target, "--draft", f"{heads}:draft_tree={file}", "--k", "auto", *sampling)
    assert found["tokens"] == plain["tokens"]
    assert set(found["statistics"]["draft_lengths"]) == {0, 1, 2}  # type: ignore[index]
    for k in (1, 2):
        found = tokens(target, "--draft", f"{heads}:draft_tree={file},k={k}", *sampling)
        assert found["tokens"] == plain["tokens"]
        assert len(found["statistics"]["num_draft_tokens_per_pos"]) == k  # type: ignore[index]


def test_typical_acceptance_is_labelled(target: Path, heads: Path) -> None:
    found = tokens(target, "--draft", heads, "--acceptor", "typical", "--temperature", 1.5)["statistics"]
    assert isinstance(found, dict) and not found["lossless"] and found["acceptor"] == "typical"
    asked = ("--prompt", "w5", "--max-new-tokens", 4, *EAGER, "--draft", heads, "--acceptor", "typical", "--stats")
    assert "LOSSY" in call("generate", "--target", target, *asked).stderr


def test_a_tree_is_searched_and_checked(target: Path, heads: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "tree.json"
    prompts.write_text("\n".join(json.dumps({"prompt": f"w{i} w{2 * i}"}) for i in range(3, 9)))
    given = ("--target", target, "--heads", heads, "--out", out, "--nodes", 6, "--prompts", prompts)
    found = last(call("medusa-tree", *given, "--max-new-tokens", 24, *EAGER, "--json"))
    assert len(json.loads(out.read_text())) == found["nodes"] <= 6
    assert 1 <= float(str(found["expected_tau"])) <= 3
    assert 1 <= float(str(found["measured_tau"])) <= 3
    assert found["texts"] == [3, 3]


def test_heads_are_converted(target: Path, heads: Path, tmp_path: Path) -> None:
    files = {"medusa": "medusa_lm_head.pt", "nxd": "medusa_heads.pt", "paceline": "model.safetensors"}
    for layout, file in files.items():
        done = call("convert-medusa", heads, tmp_path / layout, "--target", target, "--layout", layout)
        assert done.exit_code == 0, done.stderr
        assert (tmp_path / layout / file).is_file()
        assert tokens(target, "--draft", tmp_path / layout)["tokens"] == tokens(target)["tokens"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draft", "HEADS", "--draft", "ngram"], "use it without a list"),
        (["--acceptor", "typical"], "expected a drafter with it, got draft=None; give a draft"),
        (["--draft", "HEADS", "--k", "7"], "got 7"),
        (["--draft", "HEADS", "--acceptor", "best"], "acceptor: expected one of match, reject"),
        (["--draft", "medusa:path=absent"], "expected a folder"),
        (["--draft", "HEADS:draft_tree=absent.json"], "absent.json"),
    ],
)
def test_invalid_medusa_options_are_rejected(target: Path, heads: Path, arguments: list[str], said: str) -> None:
    given = [argument.replace("HEADS", str(heads)) for argument in arguments]
    refused(said, "generate", "--target", target, "--prompt", "w5", *EAGER, *given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes", 0], "of at least 1, got 0 and 128"),
        (["--max-new-tokens", 0], "expected --nodes and --max-new-tokens of at least 1"),
        *((["--eval-samples", count], "one half to search with, one half to check on") for count in (1, 0, -2)),
        (["--out", "FOLDER"], "--out: expected a file for the choices, got the folder"),
        (["--out", "FILE/tree.json"], "cannot be created"),
        (["--prompts", "FILE"], "one of them"),
    ],
)
def test_invalid_trees_are_rejected(
    target: Path, heads: Path, data: Path, tmp_path: Path, arguments: list[object], said: str
) -> None:
    (tmp_path / "FILE").touch()
    (tmp_path / "FOLDER").mkdir()
    given = [tmp_path / one if str(one).startswith("F") else one for one in arguments]
    out = [] if "--out" in given else ["--out", tmp_path / "tree.json"]
    base = ("--target", target, "--heads", heads, "--data", data, "--eval-samples", 4, *EAGER, *out)
    refused(said, "medusa-tree", *base, *given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--num-heads", 0], "at least 1"),
        (["--num-heads", 60], "60 draft positions after"),
        (["--length", 200], "length: expected at most 128 tokens"),
        (["--temperature", -1], "greedy"),
        (["--learning-rate", "nan"], "expected a positive"),
        (["--epochs", "inf"], "expected a positive"),
        (["--max-minutes", -1], "max_minutes: expected at least 0, or None for no limit, got"),
    ],
)
def test_invalid_medusa_training_options_are_rejected(
    target: Path, data: Path, tmp_path: Path, arguments: list[object], said: str
) -> None:
    out = tmp_path / "out"
    given = ("--target", target, "--data", data, "--out", out, "--tokens", 256, "--length", 64, "--eval-samples", 2)
    refused(said, "train", "medusa", *given, *arguments)
    assert not out.exists()


def test_missing_training_data_is_rejected(target: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for wrong, said in (("absent.txt", "does not exist"), ("empty.txt", "expected text, got none")):
        files = ("--data", tmp_path / wrong, "--out", tmp_path / "out")
        refused(said, "train", "medusa", "--target", target, *files, "--length", 64)
