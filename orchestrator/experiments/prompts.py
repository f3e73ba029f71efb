"""Prompts of an experiment, from files of speculative decoding benchmarks, and warnings about suspicious ones.

    jsonl        {"prompt": ..., "category": ..., "id": ...}; or {"messages": [{"role", "content"}]}
    spec-bench   Spec-Bench's question.jsonl: {"question_id", "category", "turns": [text, ...]}
    speed-bench  NVIDIA SPEED-Bench, as JSON lines or Parquet: the same keys, with sub_category and multiturn
    aiperf       AIPerf's single_turn, random_pool and multi_turn files: {"text"}, {"texts"}, {"turns": [{"text"}]}
    text         one prompt per file; a folder: all its .txt files
    lines        one prompt per line

Of several turns only the first is used: later ones would need the responses of each model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.detokenizer import Tokenizer
from paceline.core.errors import PromptError
from paceline.experiments.config import PromptLayout, PromptSet, digest
from paceline.text.chat import ChatMessage, chat_ids
from paceline.text.tokenizer import prompt_ids

_TEMPLATE_MARKERS = ("<|im_start|>", "<|start_header_id|>", "[INST]", "<|user|>", "<start_of_turn>", "<|assistant|>")
_THINK = ("<think>", "<|think|>", "<thinking>")
_RANDOM_IDS = 0.35
"""Maximum share of ids in the upper half of the vocabulary. Random ids have 1/2; in text it is below 0.2 if the
vocabulary lists frequent tokens first, as in byte-pair encoding.
"""
_LEAST_IDS = 32


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt in its file.

    messages     of a conversation; the last is the user's
    question     whether it is a question for a chat template instead of text to continue
    later_turns  number of ignored turns
    """

    key: str
    category: str
    messages: tuple[ChatMessage, ...]
    question: bool
    later_turns: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt as a target reads it."""

    key: str
    category: str
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a set for one target. ``content``: a digest of all ids; ``warnings``: sentences."""

    name: str
    rows: tuple[Prompt, ...]
    warnings: tuple[str, ...]

    @property
    def content(self) -> str:
        return digest(json.dumps([[row.key, row.category, list(row.ids)] for row in self.rows]))


def load_prompts(chosen: PromptSet, tokenizer: Tokenizer, vocab_size: int) -> Prompts:
    """The encoded prompts of a set, or PromptError: it cannot be read, has another layout, or is empty."""
    raw = _chosen(list(read_prompts(Path(chosen.path), chosen.layout)), chosen)
    if not raw:
        raise PromptError(
            f"{chosen.path}: expected at least one prompt for this experiment, got none; check count and categories"
        )
    has_template = bool(getattr(tokenizer, "chat_template", None))
    chat = all(row.question for row in raw) and has_template if chosen.chat == "auto" else chosen.chat
    rows = []
    for row in raw:
        if chat:
            system: list[ChatMessage] = [{"role": "system", "content": chosen.system}] if chosen.system else []
            ids = chat_ids(tokenizer, [*system, *row.messages])
        else:
            ids = prompt_ids(tokenizer, row.messages[-1]["content"], f"prompt {row.key} of {chosen.path}")
        rows.append(Prompt(row.key, row.category, tuple(ids)))
    warnings = list(_warnings(raw, rows, tokenizer, chat=chat, size=vocab_size))
    if chosen.chat == "auto" and has_template and not chat:
        warnings.append(
            "the target has a chat template, and not all of these prompts say that they are questions (by a category, "
            "turns or messages): they are continued as texts; set chat: true, or chat: false if that is meant"
        )
    return Prompts(chosen.label, tuple(rows), tuple(warnings))


def _chosen(raw: list[RawPrompt], chosen: PromptSet) -> list[RawPrompt]:
    if chosen.categories is not None:
        known = {row.category for row in raw}
        if unknown := [name for name in chosen.categories if name not in known]:
            raise PromptError(
                f"{chosen.path}: category: expected {', '.join(sorted(known))}, got {unknown[0]!r}; use one of them"
            )
        raw = [row for row in raw if row.category in chosen.categories]
    if chosen.per_category is not None:
        seen: dict[str, int] = {}
        kept = []
        for row in raw:
            seen[row.category] = seen.get(row.category, 0) + 1
            if seen[row.category] <= chosen.per_category:
                kept.append(row)
        raw = kept
    return raw if chosen.count is None else raw[:: max(1, len(raw) // chosen.count)][: chosen.count]


def read_prompts(path: Path, layout: PromptLayout = "auto") -> Iterator[RawPrompt]:
    """Read a file in any of the layouts, or raise PromptError; ``auto`` goes by the file's name and its keys."""
    if layout == "auto":
        layout = "text" if path.is_dir() or path.suffix in (".txt", ".md") else "jsonl"
    if layout == "text":
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        for file in files:
            yield RawPrompt(file.stem, path.stem, _user(_text(file).removesuffix("\n")), question=False)
    elif layout == "lines":
        for number, line in enumerate(filter(str.strip, _text(path).splitlines())):
            yield RawPrompt(str(number), path.stem, _user(line), question=False)
    else:
        for number, row in enumerate(_rows(path)):
            yield _prompt(row, number, path=path, layout=layout)


def _rows(path: Path) -> Iterator[Mapping[str, Any]]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptError(
                f"{path}, line {number}: expected JSON, got {error}; give JSON lines, or set layout: text"
            ) from error
        if not isinstance(row, dict):
            raise PromptError(
                f"{path}, line {number}: expected a JSON object, got another value; give one with a prompt, turns "
                "or messages"
            )
        yield row


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise PromptError(
            f"{path}: Parquet files need pyarrow, which is not installed; run pip install 'paceline[experiments]'"
        ) from error
    try:
        yield from parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise PromptError(f"{path}: expected a Parquet file, got {error}; download it again") from error


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path}: the file cannot be read ({error}); check the path and its permissions") from error


def _prompt(row: Mapping[str, Any], number: int, *, path: Path, layout: PromptLayout) -> RawPrompt:
    key = str(next((row[name] for name in ("question_id", "id", "session_id") if name in row), number))
    category = str(row.get("category", path.stem))
    if layout in ("auto", "jsonl") and isinstance(row.get("prompt"), str):
        return RawPrompt(key, category, _user(row["prompt"]), question="category" in row)
    messages: Any = row.get("messages")
    if layout in ("auto", "jsonl", "speed-bench") and _are_messages(messages):
        first_user = next(i for i, message in enumerate(messages) if message["role"] == "user")
        later = sum(message["role"] == "user" for message in messages[first_user + 1 :])
        return RawPrompt(key, category, tuple(messages[: first_user + 1]), question=True, later_turns=later)
    turns = row.get("turns")
    if turns is None and layout in ("jsonl", "aiperf"):  # AIPerf: single_turn and random_pool
        turns = [row] if "text" in row or "texts" in row else None
    texts = [_turn(turn) for turn in turns] if isinstance(turns, Sequence) and not isinstance(turns, str) else []
    if not texts or texts[0] is None:
        raise PromptError(
            f"{path}, prompt {key}: expected a prompt, turns, messages or a text (layout {layout}), got none; use "
            "another file, since lengths without text cannot show acceptance"
        )
    return RawPrompt(key, category, _user(texts[0]), question=True, later_turns=len(texts) - 1)


def _turn(turn: object) -> str | None:
    """The text of a turn: a string, or AIPerf's {"text"} or {"texts": [...]}."""
    if isinstance(turn, Mapping):
        texts = turn.get("texts")
        turn = turn.get("text", texts[0] if isinstance(texts, Sequence) and texts else None)
        if isinstance(turn, Mapping):  # {"name", "contents"}
            turn = next(iter(turn.get("contents", [])), None)
    return turn if isinstance(turn, str) else None


def _are_messages(value: object) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return False
    shaped = all(isinstance(m, Mapping) and isinstance(m.get("content"), str) and "role" in m for m in value)
    return shaped and any(m["role"] == "user" for m in value)


def _user(text: str) -> tuple[ChatMessage, ...]:
    return ({"role": "user", "content": text},)


def _warnings(
    raw: Sequence[RawPrompt], rows: Sequence[Prompt], tokenizer: Tokenizer, *, chat: bool, size: int
) -> Iterator[str]:
    if later := sum(row.later_turns > 0 for row in raw):
        yield f"{later} of {len(raw)} prompts have further turns, which are left out"
    texts = [message["content"] for row in raw for message in row.messages]
    if chat and any(marker in text for text in texts for marker in _TEMPLATE_MARKERS):
        yield "prompts hold markers of a chat template and are put into the target's as well: set chat: false"
    if not chat and getattr(tokenizer, "chat_template", None) and all(row.question for row in raw):
        yield "these are questions, and the target's chat template is not applied: acceptance is that of another text"
    templated = "".join(tokenizer.decode([token]) for token in rows[0].ids)
    for marker in (one for one in _THINK if one in templated):
        ids = tokenizer.encode(marker, add_special_tokens=False)
        pieces = "" if len(ids) == 1 else f", which this tokenizer splits into {len(ids)} tokens"
        yield (
            f"prompts hold {marker}{pieces}: a drafter that was trained without it, or a target that never thinks, is "
            "measured on texts it does not write; see that the template's switch for thinking is as in service"
        )
    bos = getattr(tokenizer, "bos_token_id", None)
    if bos is not None and any(row.ids[:2] == (bos, bos) for row in rows):
        yield "prompts begin with two beginning-of-text tokens: their text holds one, or the template adds it again"
    sample = [token for row in rows for token in row.ids]
    upper = sum(token > size // 2 for token in sample)
    if len(sample) >= _LEAST_IDS and upper > _RANDOM_IDS * len(sample):
        yield (
            f"{upper / len(sample):.0%} of the prompts' ids are in the upper half of the vocabulary: prompts look like "
            "random tokens, on which acceptance says nothing about real texts"
        )
