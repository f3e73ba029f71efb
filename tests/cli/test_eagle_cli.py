"""Training and conversion of EAGLE heads by command, and generating with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.decoder.token_files import write_tokens
from tests.cli.calling import call, last, refused, trained_in_three_goes
from tests.decoder.tiny import VOCABULARY

EAGER = ["--backend", "eager", "--amp", "f32", "--context-length-estimate", 16]


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head by the command line, in three goes."""
    folder = tmp_path_factory.mktemp("head")
    (folder / "text.py").write_text(" ".join(f"w{(i * i + i // 7) % VOCABULARY}" for i in range(2400)))
    command: list[object] = [
        "train", "eagle", "--target", target, "--data", folder / "text.py", "--out", folder / "out",
        "--eagle-version", 3, "--aux-layers", 0, "--aux-layers", 1, "--aux-layers", 2, "--draft-vocab-size", 60,
        "--tokens", 24 * 8 * 3, "--ttt-steps", 2, "--length", 24, "--eval-samples", 32, "--json",
    ]  # fmt: skip
    work = folder / "out" / "work"
    found = trained_in_three_goes(command, work)
    assert found["version"] == 3 and len(found["greedy chains"]) == 5  # type: ignore[arg-type]
    assert "of" in json.loads((work / "log.jsonl").read_text().splitlines()[-1])
    return folder / "out"


def generate(target: Path, *arguments: object) -> list[object]:
    given = ("generate", "--json", "--target", target, "--prompt", "w5 w9 w5", "--max-new-tokens", 16)
    return [*given, *EAGER, *arguments]


def tokens(target: Path, *arguments: object) -> object:
    return last(call(*generate(target, *arguments)))["tokens"]


def test_a_head_is_trained_and_generates_the_tokens_of_plain_decoding(target: Path, head: Path) -> None:
    plain = tokens(target)
    for options in ("draft_tree=chain,k=3", "draft_tree=tree:-1,-1,0,0", "draft_tree=dynamic:6,3,2,k=3"):
        assert tokens(target, "--draft", f"{head}:{options}") == plain
    assert tokens(target, "--draft", head, "--acceptor", "reject") == plain
    assert tokens(target, "--draft", head, "--k", "0,1,3") == plain


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["HEAD", "--draft", "ngram"], "use it without a list"),
        (["HEAD:draft_tree=bush"], "'bush'"),
        (["HEAD:draft_tree=dynamic:6,3"], "dynamic:NODES"),
        (["HEAD:draft_tree=dynamic:60,2,3"], "12 nodes"),
        (["HEAD:draft_tree=dynamic:6,3,2", "--k", "4"], "k: expected a draft depth of 3"),
        (["HEAD:draft_tree=tree:-1,0", "--acceptor", "reject"],
         "draft_tree: expected 'chain' for acceptor='reject', since"),
    ],
)  # fmt: skip
def test_invalid_eagle_options_are_rejected(target: Path, head: Path, arguments: list[str], part: str) -> None:
    refused(part, *generate(target, "--draft", *(argument.replace("HEAD", str(head)) for argument in arguments)))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--eagle-version", 2], "EAGLE-2"),
        (["--aux-layers", 99], "layers: expected residual streams from 0 to 2 of this target, got [99]"),
        (["--draft-vocab-size", 0], "draft_vocab_size: expected 1 to 96"),
        (["--eagle-version", 1, "--draft-vocab-size", 9], "for version 1; correct it"),
        (["--ttt-steps", 0], "expected positive tokens and ttt_steps, and ttt_decay above"),
        (["--feature-cache-gb", "nan"], "feature_cache_gb: expected a size in gigabytes, got"),
        (["--feature-cache-gb", "1e300"], "feature_cache_gb: expected a size in gigabytes, got"),
        (["--length", 200], "length: expected at most 128 tokens"),
        (["--data", "OTHER"], "target's vocabulary of 96, got ids of one of 5001"),
        (["--data", "ODD"], "expected a header with the size of the token ids, got none"),
        (["--data", "ODD", "--data-dtype", "uint16"], "-bit ids, got a part of one at the end; write the file again"),
        (["--data", "ODD", "--data-dtype", "uint32"], "ODD.bin: expected ids of 16 bits for a vocabulary of 96"),
        (["--data", "ODD", "--data-dtype", "int8"], "for token ids, got 'int8'"),
        (["--eagle-version", 3], "not three different ones for a target of 2 layers"),
        (["--aux-layers", 1, "--out", "FILE"], "cannot be created"),
        (["--aux-layers", 1, "--out", "FILE", "--work-dir", "FOLDER"], "cannot be created"),
    ],
)
def test_invalid_eagle_training_is_rejected(target: Path, tmp_path: Path, arguments: list[object], said: str) -> None:
    """Before the target is loaded."""
    files = {name: tmp_path / f"{name}.bin" for name in ("GOOD", "OTHER", "ODD", "FILE")}
    ids = np.arange(6000) % VOCABULARY
    write_tokens(files["GOOD"], [ids], vocab_size=VOCABULARY)
    write_tokens(files["OTHER"], [np.where(ids == 7, 5000, ids)], vocab_size=5001)
    files["ODD"].write_bytes(b"123")
    files["FILE"].touch()
    given = [{**files, "FOLDER": tmp_path}.get(str(one), one) for one in arguments]
    out = [] if "--out" in given else ["--out", tmp_path / "out"]
    base = ["--target", target, "--data", files["GOOD"], "--tokens", 192, "--length", 24]
    refused(said, "train", "eagle", *base, *out, *given)
    assert not (tmp_path / "out").exists()


def test_heads_are_converted_and_still_draft(target: Path, head: Path, tmp_path: Path) -> None:
    for layout in ("speculators", "eagle"):
        done = call("convert-eagle", head, tmp_path / layout, "--target", target, "--layout", layout)
        assert done.exit_code == 0, done.stderr
    found: list[Any] = [last(call(*generate(target, "--draft", one))) for one in (head, tmp_path / "speculators")]
    assert found[0]["statistics"]["tau"] == found[1]["statistics"]["tau"]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dflash", "pard"])
def test_a_block_drafter_is_trained_and_keeps_the_tokens(target: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "text.py").write_text(" ".join(f"w{i % VOCABULARY}" for i in range(2400)))
    done = call(
        "train", kind, "--target", target, "--data", tmp_path / "text.py", "--out", tmp_path / "out", "--k", 3,
        "--head-layers", 1, "--tokens", 24 * 64, "--length", 24, "--eval-samples", 32, "--dpace", "--json",
    )  # fmt: skip
    assert len(last(done)["greedy chains"]) == 3  # type: ignore[arg-type]
    assert tokens(target, "--draft", f"{tmp_path / 'out'}:k=3") == tokens(target)
