"""The tokenizer that a GGUF file describes: vocabulary, merges, special tokens and chat template from its metadata.

It is built with `tokenizers`, like the published tokenizer.json of such a model. A GGUF file only names the split of
text before merging (`tokenizer.ggml.pre`), so each name has the meaning of llama.cpp; an unknown name is rejected,
because another split gives other tokens. transformers ignores most of these names, including those of SmolLM.
`paceline.text.tokenizer` reads tokenizers of Hugging Face folders.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.detokenizer import Tokenizer
from paceline.core.errors import CheckpointError
from paceline.decoder.gguf.checkpoint import read_checkpoint
from paceline.decoder.gguf.header import GgufHeader
from paceline.decoder.json_fields import Fields

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # values of tokenizer.ggml.token_type

_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class SplitPattern:
    """Pre-tokenization: the split of text before merges, in byte-level vocabularies.

    pattern  of the pieces; None: GPT-2's own
    digits   every digit is a separate piece
    whole    a piece that is a token stays one, regardless of merges; and a text begins with bos by default
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False


SPLITS: dict[str, SplitPattern] = {
    "gpt-2": SplitPattern(),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "exaone"), SplitPattern(digits=True)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3"), SplitPattern(_LLAMA_3, whole=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), SplitPattern(_LLAMA_3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), SplitPattern(_QWEN_2)),
    "tekken": SplitPattern(_TEKKEN, whole=True),
}
"""Pre-tokenization by the value of `tokenizer.ggml.pre`."""


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file, a `PreTrainedTokenizerFast` of transformers.

    Raises:
        CheckpointError: the file cannot be read, or describes an unknown kind of tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    backend, settings = _read(path)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    tokenizer: Tokenizer = fast
    return tokenizer


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of the GGUF file ``path`` as tokenizer.json and tokenizer_config.json.

    Raises:
        CheckpointError: as `load_gguf_tokenizer`.
        OSError: they cannot be written.
    """
    backend, settings = _read(path)
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}, indent=2, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def gguf_vocabulary(path: Path) -> dict[str, int]:
    """Return the token -> id map of a GGUF file, without unused ids.

    Raises:
        CheckpointError: the file cannot be read, or has no vocabulary.
    """
    return _vocabulary(read_checkpoint(path))[0]


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """Read a `tokenizers.Tokenizer`, and the settings that transformers stores alongside it."""
    from tokenizers import AddedToken

    header = read_checkpoint(path)
    vocabulary, types = _vocabulary(header)
    kind = header.fields.text("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{path}: tokenizer: expected gpt2 (byte-level) or llama (SentencePiece), got {kind!r}; use the model's "
            "Hugging Face folder"
        )
    by_id = {number: token for token, number in vocabulary.items()}
    named = _special(header.fields, by_id)
    byte_level = kind == "gpt2"
    merges = _merges(header, vocabulary, types, byte_level=byte_level)
    if byte_level:
        backend, adds_bos = _byte_level(header.fields, vocabulary, merges)
    else:
        backend, adds_bos = _sentencepiece(header.fields, vocabulary, merges, unknown=named.get("unk_token")), True
    for number, token in sorted(by_id.items()):
        if types.get(number) in (_CONTROL, _USER_DEFINED):
            special = types[number] == _CONTROL
            added = AddedToken(token, normalized=False, special=special)
            (backend.add_special_tokens if special else backend.add_tokens)([added])
    _add_ends(backend, header.fields, named, adds_bos=adds_bos)
    settings: dict[str, Any] = {**named, "clean_up_tokenization_spaces": False}
    template = header.metadata.get("tokenizer.chat_template")
    if template is not None:
        settings["chat_template"] = header.fields.text("tokenizer.chat_template")
    return backend, settings


def _vocabulary(header: GgufHeader) -> tuple[dict[str, int], dict[int, int]]:
    """Token -> id, and id -> type; without unused ids."""
    tokens = _list(header, "tokenizer.ggml.tokens", str)
    types = _list(header, "tokenizer.ggml.token_type", int, length=len(tokens)) or [_NORMAL] * len(tokens)
    if not tokens:
        raise CheckpointError(f"{header.path}: expected a vocabulary, got none; use the model's Hugging Face folder")
    used = {number: kind for number, kind in enumerate(types) if kind != _UNUSED}
    vocabulary = {tokens[number]: number for number in used}
    if len(vocabulary) < len(used):
        raise CheckpointError(
            f"{header.path}: expected every token of the vocabulary once, got one twice; download the file again"
        )
    return vocabulary, used


def _list(header: GgufHeader, key: str, kind: type, *, length: int | None = None) -> list[Any]:
    """The list under a key; empty where there is none."""
    value = header.metadata.get(key)
    if value is None:
        return []
    numbers = (int, float) if kind is float else kind
    if not isinstance(value, list) or not all(isinstance(one, numbers) for one in value):
        raise CheckpointError(
            f"{header.path}: {key}: expected a list of {kind.__name__}, got another value; download the file again"
        )
    if length is not None and len(value) != length:
        raise CheckpointError(
            f"{header.path}: {key}: expected {length} entries, one per token, got {len(value)}; download the file again"
        )
    return value


def _special(fields: Fields, by_id: Mapping[int, str]) -> dict[str, str]:
    """bos, eos, unk and pad by the names that transformers has for them."""
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        key = f"tokenizer.ggml.{key}_token_id"
        for number in (fields.ids(key) or ())[:1]:
            if number not in by_id:
                raise CheckpointError(
                    f"{fields.where}: {key}: expected an id of the vocabulary of {len(by_id)} tokens, got {number}; "
                    "download the file again"
                )
            special[f"{name}_token"] = by_id[number]
    return special


def _merges(
    header: GgufHeader, vocabulary: Mapping[str, int], types: Mapping[int, int], *, byte_level: bool
) -> list[tuple[str, str]]:
    """Pairs of tokens that are merged, the most urgent first."""
    written = _list(header, "tokenizer.ggml.merges", str)
    if not written and not byte_level:
        return _merges_of_scores(header, vocabulary, types)
    merges = []
    for line in written:
        left, _, right = line.partition(" ")
        if not {left, right, left + right} <= vocabulary.keys():
            raise CheckpointError(
                f"{header.path}: expected merges of tokens in the vocabulary, got {line!r:.60}; download the file again"
            )
        merges.append((left, right))
    if byte_level and not merges:
        raise CheckpointError(f"{header.path}: the key 'tokenizer.ggml.merges' is missing; download the file again")
    return merges


def _merges_of_scores(
    header: GgufHeader, vocabulary: Mapping[str, int], types: Mapping[int, int]
) -> list[tuple[str, str]]:
    """Return the merges of a SentencePiece vocabulary: every cut of a token into two tokens is a merge, ranked by the
    token's score.

    Of merges with equal scores the one with the longer first part comes first, as in converted tokenizer.json files.
    """
    scores = _list(header, "tokenizer.ggml.scores", float)
    if len(scores) <= max(vocabulary.values()):
        raise CheckpointError(
            f"{header.path}: the key 'tokenizer.ggml.scores' is missing or too short; download the file again"
        )
    scored = []
    for token, number in vocabulary.items():
        if types[number] != _NORMAL:
            continue
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        scored += [(scores[number], pair) for pair in cuts if pair[0] in vocabulary and pair[1] in vocabulary]
    scored.sort(key=lambda entry: (-entry[0], -len(entry[1][0]), -len(entry[1][1])))
    return [pair for _, pair in scored]


def _byte_level(fields: Fields, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> tuple[Any, bool]:
    """The tokenizer, and whether bos comes first by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = fields.text("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise CheckpointError(
            f"{fields.where}: tokenizer.ggml.pre: expected one of {', '.join(SPLITS)}, got {name!r}, which may "
            "split text into other tokens; use the model's Hugging Face folder"
        )
    split = SPLITS[name]
    backend: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.digits else []
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", False)
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend, split.whole


def _sentencepiece(
    fields: Fields, vocabulary: dict[str, int], merges: list[tuple[str, str]], *, unknown: str | None
) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    backend: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    space = "\u2581"
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(space)] if prefix else []), normalizers.Replace(" ", space)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(space, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return backend


def _add_ends(backend: Any, fields: Fields, named: Mapping[str, str], *, adds_bos: bool) -> None:
    """Add bos before a text, and eos after it, if the file says so."""
    from tokenizers import processors

    before = fields.flag("tokenizer.ggml.add_bos_token", adds_bos) and named.get("bos_token")
    behind = fields.flag("tokenizer.ggml.add_eos_token", False) and named.get("eos_token")
    ends = [token for token in (before, behind) if token]
    if not ends:
        return

    def template(sequence: str, number: int) -> list[str]:
        parts = (before, sequence, behind)
        return [f"{part}:{number}" for part in parts if part]

    backend.post_processor = processors.TemplateProcessing(
        single=template("$A", 0),
        pair=[*template("$A", 0), *template("$B", 1)],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(ends)],
    )
