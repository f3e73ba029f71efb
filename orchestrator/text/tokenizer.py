"""Tokenizers of checkpoints, and prompts as ids. `paceline.core.detokenizer` decodes growing sequences."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from paceline.core.detokenizer import Decodes, IncrementalDetokenizer, Tokenizer, plain_text
from paceline.core.errors import CheckpointError, PromptError
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.hub import checkpoint_path

__all__ = ["IncrementalDetokenizer", "Tokenizer", "has_tokenizer", "load_tokenizer", "prompt_ids"]


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a checkpoint: a folder, a GGUF file, or a fetched model. No code in it is run.

    Raises:
        CheckpointError: it has no readable tokenizer.
    """
    folder = checkpoint_path(folder)
    if is_gguf(folder):
        from paceline.text.gguf_tokenizer import load_gguf_tokenizer  # loads PyTorch

        return load_gguf_tokenizer(folder)
    try:
        loaded: Any = quick_tokenizer(folder)
        if loaded is None:
            from transformers import AutoTokenizer

            loaded = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise CheckpointError(
            f"{folder}: expected a tokenizer, got none that can be read ({error}); add the model's tokenizer.json"
        ) from error
    tokenizer: Tokenizer = loaded
    return tokenizer


def has_tokenizer(path: Path) -> bool:
    """Whether a checkpoint, given as to `load_tokenizer`, holds a tokenizer: a GGUF file always does."""
    place = checkpoint_path(path)
    return is_gguf(place) or (place / "tokenizer.json").is_file()


def prompt_ids(tokenizer: Tokenizer, text: str, name: str = "the prompt") -> list[int]:
    """Return a prompt's ids, at least one. ``name`` is its name in errors.

    Raises:
        PromptError: it has no ids.
    """
    ids = tokenizer.encode(text, verbose=False)  # verbose=False: a later check reports too long prompts
    if not ids:
        raise PromptError(
            f"{name}: expected text, got an empty one, and this model's tokenizer adds no first token; give some text"
        )
    return ids


_CLASSES = frozenset({"PreTrainedTokenizerFast", "TokenizersBackend"})
"""Class names in tokenizer_config.json that keep tokenizer.json unchanged."""

_OWN_CLASS = frozenset({None, "gpt_neo", "qwen2"})
"""Values of ``model_type`` for which `AutoTokenizer` uses another class, regardless of the file."""

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
_WITHOUT_EFFECT = frozenset({"tokenizer_class", "backend", "is_local", "chat_template", "model_max_length"})
"""Keys of tokenizer_config.json that change neither ids nor text."""


class QuickTokenizer:
    """Tokenizer of a folder, without transformers: importing transformers takes a third of PyTorch's import time, and
    its `AutoTokenizer` also imports PyTorch and model code.

    Ids and text come from the `tokenizers` library (``backend_tokenizer``), as in transformers'
    `PreTrainedTokenizerFast`. Any other attribute, such as a chat template, comes from that class, which is imported on
    first use. The behaviour of transformers was seen in 4.57 and 5.24.
    """

    def __init__(self, folder: Path, backend: Any) -> None:
        self.__dict__.update(_folder=folder, backend_tokenizer=backend)

    def encode(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        if clean_up_tokenization_spaces:
            options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": True}
            return str(self._full.decode(token_ids, **options))
        text: str = self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    @cached_property
    def _full(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(str(self._folder), local_files_only=True)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # looked up by copy, pickle and the like
            raise AttributeError(name)
        return getattr(self._full, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._full, name, value)


def quick_tokenizer(folder: Path) -> QuickTokenizer | None:
    """Return the tokenizer of a folder; None: only transformers can load it."""
    try:
        settings, model = (read_json_object(folder / name) for name in ("tokenizer_config.json", "config.json"))
    except CheckpointError:
        return None
    unknown = settings.keys() - _WITHOUT_EFFECT - {*_TOKENS, "clean_up_tokenization_spaces"}
    if settings.get("tokenizer_class") not in _CLASSES or model.get("model_type") in _OWN_CLASS or unknown:
        return None
    file, mapped = folder / "tokenizer.json", folder / "special_tokens_map.json"
    if settings.get("clean_up_tokenization_spaces") or not file.is_file():
        return None
    if any((folder / name).exists() for name in ("added_tokens.json", "tekken.json")):
        return None
    from tokenizers import Tokenizer

    backend = Tokenizer.from_file(str(file))
    special = [token.content for token in backend.get_added_tokens_decoder().values() if token.special]
    named = [settings.get(name) for name in _TOKENS]
    if mapped.exists():
        named += read_json_object(mapped).values()
    if backend.truncation or backend.padding or any(token is not None and token not in special for token in named):
        return None  # transformers changes this value
    return QuickTokenizer(folder, backend)


_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_LEVEL = {chr(byte): byte for byte in _PRINTED} | {
    chr(256 + place): byte for place, byte in enumerate(sorted(set(range(256)) - set(_PRINTED)))
}
"""Characters of a byte-level vocabulary, GPT-2's, and the bytes that they represent."""
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class TokenBytes:
    """The bytes of single tokens, whose concatenation is that of the text.

    The decoded text of one token differs: a replacement mark if it is part of a character, and no space before a word
    in SentencePiece vocabularies.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = None if self._backend is None else self._backend.decoder
        kind = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)
        self._is_byte_level, self._has_spaces = "ByteLevel" in kind, _SPACE in kind
        added = {} if self._backend is None else self._backend.get_added_tokens_decoder()
        self._added = {number: str(one.content).encode() for number, one in added.items()}

    def __call__(self, token: int) -> bytes:
        if token in self._added:  # never a part of anything
            return self._added[token]
        piece = None if self._backend is None else self._backend.id_to_token(token)
        if piece is not None and self._is_byte_level and all(character in _BYTE_LEVEL for character in piece):
            return bytes(_BYTE_LEVEL[character] for character in piece)
        if piece is not None and self._has_spaces:
            byte = _BYTE.fullmatch(piece)
            return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()
        return plain_text(self._tokenizer, [token], skip_special_tokens=False).encode()


class LibraryDecoder:
    """A decoder of the `tokenizers` library, without the work that a tokenizer of transformers adds."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def decode(self, token_ids: list[int], **options: Any) -> str:
        assert not options.get("clean_up_tokenization_spaces"), "what is shown is not cleaned up"
        text: str = self._backend.decode(token_ids, skip_special_tokens=options.get("skip_special_tokens", False))
        return text


def decoder_of(tokenizer: Decodes) -> Decodes:
    """A decoder with a tokenizer's texts that takes half the time of transformers; the tokenizer itself where its class
    decodes in its own way, or is not of transformers.
    """
    known: Any = tokenizer
    kind: Any = type(tokenizer)
    if not kind.__module__.startswith("transformers."):
        return tokenizer
    from transformers import PreTrainedTokenizerFast

    usual: Any = PreTrainedTokenizerFast
    if kind.decode is not usual.decode or getattr(kind, "_decode", None) is not usual._decode:
        return tokenizer
    return LibraryDecoder(known.backend_tokenizer)


class MarkerTokens:
    """Decodes like its tokenizer, except that it shows some special tokens and skips the others.

    Hugging Face's tokenizers skip all special tokens of a text or none. Mistral's [TOOL_CALLS] and [THINK] are special
    tokens that parsers of responses need, and so is the eos token, which is not shown.
    """

    def __init__(self, tokenizer: Decodes, hidden: frozenset[int]) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden

    def decode(self, token_ids: list[int], **options: Any) -> str:
        if options.pop("skip_special_tokens", False):
            token_ids = [token for token in token_ids if token not in self._hidden]
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, **options)


def with_markers(tokenizer: Decodes, markers: Iterable[str]) -> Decodes:
    """`decoder_of`, which shows these markers, too, where one is a special token."""
    added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    special = {number: str(one.content) for number, one in added.items() if one.special}
    wanted = set(markers)
    shown = {number for number, text in special.items() if text in wanted}
    if not shown:
        return decoder_of(tokenizer)
    hidden = frozenset(special.keys() | set(getattr(tokenizer, "all_special_ids", ()))) - shown
    return MarkerTokens(decoder_of(tokenizer), hidden)
