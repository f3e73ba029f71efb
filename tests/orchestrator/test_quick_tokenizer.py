"""Tokenizers without transformers: the same ids and text, or none where transformers would change them."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from paceline.decoder.models.registry import MODEL_FAMILIES
from paceline.text.tokenizer import QuickTokenizer, TokenBytes, decoder_of, load_tokenizer, quick_tokenizer
from tests.draft.tokenizers_of_two import every_byte

PAIR = Path(__file__).resolve().parents[2] / "examples" / "pycode" / "target"
PIECES = ("a", "<|endoftext|>", "<|pad|>", " ", "  ", "\n", "é", "😀", "def f(x):", "\x00", "1", "'s", "\t", "\ufffd")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(PAIR / name, tmp_path)
    return tmp_path


def change(file: Path, **fields: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer with another way to decode."""

    def _decode(self, *arguments: Any, **options: Any) -> str:
        return str(super()._decode(*arguments, **options)).upper()


@pytest.mark.parametrize("module", [__name__, "transformers.models.shouting"])
def test_a_tokenizer_that_decodes_in_its_own_way_stays(folder: Path, module: str) -> None:
    kind = type("Shouting", (Shouting,), {"__module__": module})
    own = kind.from_pretrained(folder)  # type: ignore[attr-defined]
    assert decoder_of(own) is own


def test_ids_and_text_equal_those_of_transformers(folder: Path) -> None:
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, QuickTokenizer) and len(ours) == len(theirs)
    draw = random.Random(0)
    shown = decoder_of(theirs)
    assert shown is not theirs and decoder_of(ours) is ours
    for _ in range(200):
        text = "".join(draw.choices(PIECES, k=draw.randrange(30)))
        ids = draw.choices(range(len(theirs)), k=20)
        for flag in (True, False):
            assert ours.encode(text, add_special_tokens=flag) == theirs.encode(text, add_special_tokens=flag)
            options = {"skip_special_tokens": flag, "clean_up_tokenization_spaces": False}
            assert ours.decode(ids, **options) == shown.decode(ids, **options) == theirs.decode(ids, **options)
        assert ours.decode(ids) == theirs.decode(ids)


def test_other_tokenizer_attributes_equal_transformers(folder: Path) -> None:
    ours: Any = load_tokenizer(folder)
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    assert ours.eos_token_id == theirs.eos_token_id and ours.get_vocab() == theirs.get_vocab()
    for tokenizer in (ours, theirs):
        tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "x"}]
    assert ours.chat_template == theirs.chat_template
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)
    assert not hasattr(ours, "no_such_thing")


@pytest.mark.parametrize(
    "changed",
    [
        lambda folder: change(folder / "tokenizer_config.json", tokenizer_class="GPT2TokenizerFast"),
        lambda folder: change(folder / "tokenizer_config.json", add_prefix_space=True),
        lambda folder: change(folder / "tokenizer_config.json", pad_token="<new>"),
        lambda folder: change(folder / "tokenizer_config.json", clean_up_tokenization_spaces=True),
        lambda folder: change(folder / "special_tokens_map.json", pad_token="<new>"),
        lambda folder: change(folder / "config.json", model_type="qwen2"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / "added_tokens.json").write_text("{}"),
    ],
)
def test_folders_that_transformers_may_change_use_transformers(folder: Path, changed: Callable[[Path], object]) -> None:
    assert quick_tokenizer(folder) is not None
    changed(folder)
    assert quick_tokenizer(folder) is None


# Not: families whose configuration in transformers cannot have the keys of this folder's.
@pytest.mark.parametrize("family", sorted(MODEL_FAMILIES.keys() - {"gpt_neo", "qwen2", "falcon"}))
def test_a_folder_with_a_tokenizer_class_uses_transformers(folder: Path, family: str) -> None:
    """`AutoTokenizer` has exceptions by family, which a later version may add to."""
    change(folder / "config.json", model_type=family)
    assert quick_tokenizer(folder) is not None
    theirs = AutoTokenizer.from_pretrained(folder)
    assert type(theirs).__name__ in ("PreTrainedTokenizerFast", "TokenizersBackend")


def test_the_quick_tokenizer_loads_without_transformers() -> None:
    check = f"""
import sys; from pathlib import Path; from paceline.text.tokenizer import load_tokenizer
tokenizer = load_tokenizer(Path({str(PAIR)!r})); tokenizer.decode(tokenizer.encode("x", verbose=False))
print([name for name in ("torch", "transformers") if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_bytes_of_tokens_join_to_the_text(kind: str) -> None:
    """A byte-level vocabulary, and one with byte fallback; the text of one token loses both."""
    text = "n\u00e9 \u65e5 \U0001f600 \u8a9e"
    if kind == "bytes":
        tokenizer: Any = every_byte()
    else:
        vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256, "n": 257, "\u65e5": 258}
        backend: Any = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<0x00>"))
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids, bytes_of = tokenizer.encode(text, add_special_tokens=False), TokenBytes(tokenizer)
    assert b"".join(map(bytes_of, ids)).decode() == text and len(ids) > len(text)
    tokenizer.add_special_tokens({"eos_token": "<\u00e9nd>"})
    assert TokenBytes(tokenizer)(tokenizer.eos_token_id) == "<\u00e9nd>".encode()
