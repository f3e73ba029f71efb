"""Tokenizers of GGUF files: the tokens of the tokenizer that was converted, offline, and what is rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.core.errors import CheckpointError, PairingError
from paceline.text.gguf_tokenizer import write_tokenizer
from paceline.text.tokenizer import load_tokenizer
from paceline.vocab_compat import check_same_tokenizer
from tests.decoder.gguf_files import END, MERGES, START, TEMPLATE, TOKENS, network, write

TEXTS = [
    "hello hello",
    "he said:  12 hello",
    "a  2\n\n hello12<|start|>x<|end|>",
    "h\u00e9llo \u6f22\u5b57 \U0001f642\t.",
    "  lead",
]


@pytest.fixture(scope="module")
def published() -> Tokenizer:
    """A tokenizer.json as SmolLM's is: digits by themselves, then GPT-2's split."""
    vocabulary = {token: number for number, token in enumerate(TOKENS[:-1])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in MERGES]))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|start|>", "<|end|>"])
    return made


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", network())


def changed(folder: Path, **keys: object) -> Path:
    """A file whose tokenizer has other keys."""
    changes = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    return write(folder / "model.gguf", network(), changes=changes)


def test_tokens_equal_those_of_the_converted_tokenizer(path: Path, published: Tokenizer) -> None:
    made: Any = load_tokenizer(path)
    assert isinstance(made, PreTrainedTokenizerFast)
    for text in TEXTS:
        assert made.encode(text) == published.encode(text).ids
        assert made.decode(made.encode(text)) == text
    # A digit is a piece of its own, so that two spaces before it are one token, and "1 2" is never merged.
    assert made.tokenize("a  2 12") == ["a", "\u0120\u0120", "2", "\u0120", "1", "2"]
    assert (made.bos_token_id, made.eos_token_id) == (START, END)
    assert made.decode([START, 71, END], skip_special_tokens=True) == made.decode([71])


def test_the_chat_template_is_read_from_the_file(path: Path) -> None:
    made: Any = load_tokenizer(path)
    assert made.chat_template == TEMPLATE
    said = made.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert said == "<|start|>user hello<|end|>"


def test_a_saved_tokenizer_is_the_same(path: Path, tmp_path: Path) -> None:
    write_tokenizer(path, tmp_path)
    first: Any = load_tokenizer(path)
    second: Any = AutoTokenizer.from_pretrained(tmp_path)
    assert second.chat_template == TEMPLATE and second.eos_token == "<|end|>"
    assert [first.encode(text) for text in TEXTS] == [second.encode(text) for text in TEXTS]
    sizes = (len(TOKENS), len(TOKENS))
    check_same_tokenizer((path, tmp_path), sizes)
    other = changed(tmp_path, tokens=[*TOKENS[:-4], "other", *TOKENS[-3:]], merges=MERGES[:-1])
    with pytest.raises(PairingError, match="2 other ids, such as '12'"):
        check_same_tokenizer((path, other), sizes)


def test_pre_tokenizer_names_select_different_splits(tmp_path: Path) -> None:
    text = "he12 3456  7"
    pieces = {}
    for name in ("gpt-2", "smollm", "llama-bpe", "qwen2", "tekken"):
        made: Any = load_tokenizer(changed(tmp_path, pre=name, bos_token_id=START, add_bos_token=None))
        ids = made.encode(text)
        pieces[name] = made.convert_ids_to_tokens(ids)
    assert pieces["gpt-2"] == ["he", "12", "\u0120", "3", "4", "5", "6", "\u0120", "\u0120", "7"]
    assert pieces["smollm"] == ["he", "1", "2", "\u0120", "3", "4", "5", "6", "\u0120\u0120", "7"]
    # llama-bpe and tekken begin with bos where the file says nothing else.
    assert pieces["llama-bpe"] == ["<|start|>", "he", "12", "\u0120", "3", "4", "5", "6", "\u0120", "\u0120", "7"]
    assert pieces["qwen2"] == ["he", "1", "2", "\u0120", "3", "4", "5", "6", "\u0120", "\u0120", "7"]
    assert pieces["tekken"] == ["<|start|>", *pieces["qwen2"]]


def test_bos_and_eos_are_added_as_configured(tmp_path: Path) -> None:
    made: Any = load_tokenizer(changed(tmp_path, add_bos_token=True, add_eos_token=True))
    plain = made.encode("hello", add_special_tokens=False)
    assert made.encode("hello") == [START, *plain, END]


SPACE = "\u2581"
PIECES = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *((f"<0x{i:02X}>", 0.0, 6) for i in range(256))]
PIECES += [
    (f"{SPACE}h", -1.0, 1),
    ("ll", -2.0, 1),
    (f"{SPACE}he", -3.0, 1),
    ("llo", -4.0, 1),
    (f"{SPACE}hello", -5.0, 1),
    ("el", -9.0, 1),  # loses against the others, by its score
]
PIECES += [(SPACE, -6.0, 1), *((letter, -7.0, 1) for letter in "helo,.w")]


def test_sentencepiece_vocabularies_merge_by_their_scores(tmp_path: Path) -> None:
    tokens, scores, types = (list(column) for column in zip(*PIECES, strict=True))
    path = changed(
        tmp_path, model="llama", pre=None, tokens=tokens, scores=scores, token_type=types, merges=None, bos_token_id=1,
        eos_token_id=2, unknown_token_id=0, add_bos_token=None,
    )  # fmt: skip
    made: Any = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    assert made.tokenize("hello hell, hew\u00e9") == [
        f"{SPACE}hello", f"{SPACE}he", "ll", ",", f"{SPACE}he", "w", "<0xC3>", "<0xA9>",
    ]  # fmt: skip
    for text in ("hello hello", "he.  llo", "well, w\u00e9", "hello</s>"):
        assert made.encode(text) == theirs.encode(text) and made.encode(text)[0] == 1
        assert made.decode(made.encode(text), skip_special_tokens=True) == text.removesuffix("</s>")
    # After a special token a space is put before the text again, as llama.cpp and the published files do it.
    assert made.tokenize("<s>hello") == ["<s>", f"{SPACE}hello"]


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "no split": ({"pre": None}, "got None"),
    "another split": ({"pre": "superbpe"}, "expected one of gpt-2, .*, got 'superbpe'"),
    "another kind": ({"model": "bert"}, "expected gpt2 .*, llama .*, got 'bert'"),
    "no tokens": (
        {"tokens": None, "token_type": None},
        "expected a vocabulary, got none; use the model's Hugging",
    ),
    "types of others": ({"token_type": [1, 2]}, "token_type: expected 266 entries, one per token, got 2"),
    "a token twice": (
        {"tokens": [TOKENS[1], *TOKENS[1:]]},
        "expected every token of the vocabulary once, got one twice",
    ),
    "merges of others": ({"merges": ["x yy"]}, "tokens in the vocabulary, got 'x yy'"),
    "no merges": ({"merges": None}, "'tokenizer.ggml.merges' is missing"),
    "no scores": ({"model": "llama", "merges": None}, "'tokenizer.ggml.scores' is missing or too short"),
    "eos outside": ({"eos_token_id": 9999}, "eos_token_id: expected an id of the vocabulary .*, got 9999"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_tokenizers_are_rejected_by_name(tmp_path: Path, name: str) -> None:
    keys, words = REFUSED[name]
    path = changed(tmp_path, **keys)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)
