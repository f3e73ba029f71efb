"""The tokenizer that a GGUF file describes: vocabulary, merges, special tokens and chat template from its metadata.

It is built with `tokenizers`, like the published tokenizer.json of such a model. A GGUF file only names the split of
text before merging (`tokenizer.ggml.pre`), so each name has the meaning of llama.cpp; an unknown name is rejected,
because another split gives other tokens. transformers ignores most of these names, including those of SmolLM.
`paceline.text.tokenizer` reads tokenizers of Hugging Face folders.
"""

# ruff: noqa: RUF001 - patterns name characters of many scripts, some of which resemble others

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.detokenizer import Tokenizer
from paceline.core.errors import CheckpointError
from paceline.decoder.gguf.header import GgufHeader, read_header
from paceline.decoder.json_fields import Fields

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # values of tokenizer.ggml.token_type
_SPACE = "\u2581"

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA_3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_END}"
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(after: str = "", *, but: str = "") -> str:
    """Words whose capitals come first, as GPT-4o splits them.

    after  pattern that may follow
    but    letters to leave out
    """
    upper, lower = f"[{_UPPER}{but}]", f"[{_LOWER}{but}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{upper}*{lower}+{after}|{before}{upper}+{lower}*{after}"


_TEKKEN = rf"{_cased()}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
_GPT_4O = rf"{_cased(_SHORT + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_END}"
_NOT_HAN = _cased(_SHORT + "?", but=r"&&[^\p{Han}]")
_PHRASE = r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+"
_QWEN_35 = _QWEN_2.replace(r"\p{L}+", r"[\p{L}\p{M}]+", 1).replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_3 = (
    rf"{_ASCII_MARKS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_END}"
)
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ"
    "-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰"
    "-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_SENTENCE = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CHARACTERS = "[一-龥ࠀ-一가-퟿]+"


@dataclass(frozen=True, slots=True)
class PreSplit:
    """Pre-tokenization: the split of text before merges.

    patterns  of the pieces, one after another: what matches is a piece, and what is between two
    whole     a piece that is a token stays one, regardless of merges
    bos       a text begins with bos by default
    raw       merges are of characters, not of bytes, and a space is written as SentencePiece does
    """

    patterns: tuple[str, ...] = (_GPT_2,)
    whole: bool = False
    bos: bool = False
    raw: bool = False


def _same(names: str, split: PreSplit) -> dict[str, PreSplit]:
    return dict.fromkeys(names.split(), split)


SPLITS: dict[str, PreSplit] = {
    **_same("gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4", PreSplit()),
    **_same("smollm starcoder refact command-r exaone codeshell minerva-7b mellum2", PreSplit((r"\p{N}", _GPT_2))),
    **_same(
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2", PreSplit((_LLAMA_3,), whole=True, bos=True)
    ),
    **_same("dbrx smaug-bpe chatglm-bpe", PreSplit((_LLAMA_3,))),
    **_same("glm4 glm5", PreSplit((_LLAMA_3,), whole=True)),
    **_same("qwen2 deepseek-r1-qwen kormo f2llmv2 stablelm2 megrez hunyuan solar-open grok-2", PreSplit((_QWEN_2,))),
    "qwen35": PreSplit((_QWEN_35,)),
    "tekken": PreSplit((_TEKKEN,), whole=True, bos=True),
    **_same("gpt-4o llama4 kanana2 talkie minimax-m2", PreSplit((_GPT_4O,))),
    **_same("tiny_aya cohere2moe", PreSplit((r"[0-9]{1,3}(?=(?:[0-9]{3})*\b)", _GPT_4O))),
    "kimi-k2": PreSplit(
        (rf"\p{{Han}}+|{_NOT_HAN}|\p{{N}}{{1,3}}|{_MARKS}|{_END}",)
    ),
    **_same("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreSplit((r"\p{N}{1,3}", _KANA, _DEEPSEEK_3))),
    "deepseek-llm": PreSplit(
        (
            r"[\r\n]", rf"\s?[{_CASED_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _CHARACTERS, r"\p{N}+",
        )
    ),
    "deepseek-coder": PreSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHARACTERS, r"\p{N}")),
    "youtu": PreSplit(
        (
            rf"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{_KANA}", _GPT_4O.replace(r"\p{N}{1,3}", r"\p{N}"),
        ),
        whole=True,
    ),
    "falcon": PreSplit((r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, r"[0-9][0-9][0-9]")),
    "default": PreSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **_same("poro-chat bloom gpt3-finnish", PreSplit((_SENTENCE,))),
    "viking": PreSplit((_SENTENCE, r"\p{N}")),
    "jais-2": PreSplit(
        (
            _LLAMA_3.removesuffix(r"|\s+(?!\S)|\s+")
            + "".join(rf"|\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4)) + r"|\s{1,2}(?!\S)|\s",
        )
    ),
    **_same(
        "bailingmoe bailingmoe2 llada-moe",
        PreSplit((rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+",)),
    ),
    "seed-coder": PreSplit((rf"{_SHORT}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_END}",)),
    "ufakzeka": PreSplit((_QWEN_2.removeprefix(_SHORT + "|"),)),
    "laguna": PreSplit((r"[^\n]+|\n+", _QWEN_2)),
    "minicpm5": PreSplit((r"\p{N}{1,3}", _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}+")), whole=True),
    "exaone-moe": PreSplit((rf"{_SHORT}|{_PHRASE}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",)),
    "afmoe": PreSplit(
        (
            r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
            r"[一-鿿㐀-䶿豈-﫿぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
            _DEEPSEEK_3,
        )
    ),
    **_same("gemma4 sarvam-moe", PreSplit((r"[^\n]+|\n+",), raw=True)),
}  # fmt: skip
"""By the value of `tokenizer.ggml.pre`."""

_MODELS = ("gpt2", "llama", "t5", "gemma4")
"""Values of `tokenizer.ggml.model`: merges of bytes, SentencePiece's merges and its unigrams, and Gemma 4's merges."""


def load_gguf_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a GGUF file, a `PreTrainedTokenizerFast` of transformers."""
    from transformers import PreTrainedTokenizerFast

    backend, settings = _read(path)
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
    tokenizer: Tokenizer = fast
    return tokenizer


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of the GGUF file ``path`` as tokenizer.json and tokenizer_config.json."""
    backend, settings = _read(path)
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings}, indent=2, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(backend.to_str(pretty=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def gguf_vocabulary(path: Path) -> dict[str, int]:
    """Return the token -> id map of a GGUF file, without unused ids."""
    return _vocabulary(read_header(path))[0]


def _read(path: Path) -> tuple[Any, dict[str, Any]]:
    """Read a `tokenizers.Tokenizer`, and the settings that transformers stores alongside it."""
    header = read_header(path)
    vocabulary, types = _vocabulary(header)
    kind = header.fields.text("tokenizer.ggml.model")
    if kind not in _MODELS:
        raise CheckpointError(
            f"{path}: tokenizer: expected gpt2 (byte-level), llama or t5 (SentencePiece), or gemma4, got {kind!r}; use "
            "the model's Hugging Face folder"
        )
    by_id = {number: token for token, number in vocabulary.items()}
    named = _special(header.fields, by_id)
    bos, eos = kind == "llama", kind == "t5"
    if kind == "t5":
        backend = _unigram(header, vocabulary)
    elif kind == "llama":
        merges = _merges(header, vocabulary, types, scored=True)
        backend = _sentencepiece(header.fields, vocabulary, merges, unknown=named.get("unk_token"))
    else:
        split = _split(header.fields, kind)
        merges = _merges(header, vocabulary, types, scored=False)
        backend, bos = _split_bpe(split, vocabulary, merges), split.bos or split.raw
    _add_tokens(backend, header, by_id, types=types)
    _add_ends(backend, header.fields, named, bos=bos, eos=eos)
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
    header: GgufHeader, vocabulary: Mapping[str, int], types: Mapping[int, int], *, scored: bool
) -> list[tuple[str, str]]:
    """Pairs of tokens that are merged, the most urgent first."""
    written = _list(header, "tokenizer.ggml.merges", str)
    if not written and scored:
        return _merges_of_scores(header, vocabulary, types)
    merges = []
    for line in written:
        at = line.find(" ", 1)
        left, right = line[:at], line[at + 1 :]
        if not {left, right, left + right} <= vocabulary.keys():
            raise CheckpointError(
                f"{header.path}: expected merges of tokens in the vocabulary, got {line!r:.60}; download the file again"
            )
        merges.append((left, right))
    if not merges:
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


def _split(fields: Fields, kind: str) -> PreSplit:
    name = "gemma4" if kind == "gemma4" else fields.values.get("tokenizer.ggml.pre")
    if name not in SPLITS:
        raise CheckpointError(
            f"{fields.where}: tokenizer.ggml.pre: expected one of {', '.join(SPLITS)}, got {name!r}, which may "
            "split text into other tokens; use a newer conversion of the model, or its Hugging Face folder"
        )
    return SPLITS[str(name)]


def _split_bpe(split: PreSplit, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    backend: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole, byte_fallback=split.raw)
    )
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    if split.raw:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    else:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return backend


def _unigram(header: GgufHeader, vocabulary: Mapping[str, int]) -> Any:
    """The most probable pieces."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    fields, scores = header.fields, _list(header, "tokenizer.ggml.scores", float)
    unknown = (fields.ids("tokenizer.ggml.unknown_token_id") or (2,))[0]
    if len(scores) != len(vocabulary) or sorted(vocabulary.values()) != list(range(len(vocabulary))):
        raise CheckpointError(
            f"{header.path}: the key 'tokenizer.ggml.scores' is missing, or some tokens are unused; use the model's "
            "Hugging Face folder."
        )
    pieces = [(token, float(scores[number])) for token, number in vocabulary.items()]
    backend: Any = Tokenizer(models.Unigram(pieces, unknown, byte_fallback="<0x00>" in vocabulary))
    charsmap = _list(header, "tokenizer.ggml.precompiled_charsmap", int)
    steps: list[Any] = [normalizers.Precompiled(bytes(one & 0xFF for one in charsmap))] if charsmap else []
    if fields.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if fields.flag("tokenizer.ggml.add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(replacement=_SPACE, prepend_scheme=scheme)
    return backend


def _add_tokens(backend: Any, header: GgufHeader, by_id: Mapping[int, str], *, types: Mapping[int, int]) -> None:
    from tokenizers import AddedToken

    # llama.cpp knows Phi-3 by its name, too: there, a special token takes the spaces that follow.
    name = str(header.metadata.get("general.name", "")).lower()
    strips = "phi-3" in name or "phi3" in name
    for number, token in sorted(by_id.items()):
        if types.get(number) in (_CONTROL, _USER_DEFINED):
            special = types[number] == _CONTROL
            eats = strips and token not in ("<unk>", "<s>", "<|endoftext|>")
            added = AddedToken(token, normalized=False, special=special, rstrip=eats)
            (backend.add_special_tokens if special else backend.add_tokens)([added])


def _sentencepiece(
    fields: Fields, vocabulary: dict[str, int], merges: list[tuple[str, str]], *, unknown: str | None
) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers

    backend: Any = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = fields.flag("tokenizer.ggml.add_space_prefix", True)
    backend.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(_SPACE)] if prefix else []), normalizers.Replace(" ", _SPACE)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return backend


def _add_ends(backend: Any, fields: Fields, named: Mapping[str, str], *, bos: bool, eos: bool) -> None:
    """Add bos before a text, and eos after it, if the file says so."""
    from tokenizers import processors

    before = fields.flag("tokenizer.ggml.add_bos_token", bos) and named.get("bos_token")
    behind = fields.flag("tokenizer.ggml.add_eos_token", eos) and named.get("eos_token")
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
