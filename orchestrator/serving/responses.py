"""Answers in OpenAI's format: whole, or as events of a stream. Values only."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass

from paceline.serving.protocol import CompletionRequest, RefusedError

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TextPiece:
    """What a model's deployment sends: text that one choice gained, and how many tokens it stands for.

    ``finish_reason`` is OpenAI's ("stop" or "length"), on the last piece of a choice.
    """

    choice: int
    text: str
    tokens: int
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """The first thing a model's deployment sends: the request was accepted. Tokens of its prompts in all."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Sent in place of an opening or a piece."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def error(self) -> RefusedError:
        return RefusedError(self.status, self.message, param=self.param, code=self.code)


class Answer:
    """Collects one request's pieces and writes them down."""

    def __init__(self, ask: CompletionRequest, prompt_tokens: int) -> None:
        self._ask, self._prompt_tokens = ask, prompt_tokens
        self._id = ("chatcmpl-" if ask.kind == "chat" else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        self._texts: dict[int, list[str]] = {index: [] for index in range(max(1, len(ask.prompts)))}
        self._reasons: dict[int, str] = {}
        self._tokens = 0
        self._begun: set[int] = set()

    def add(self, piece: TextPiece) -> None:
        """Take a piece into the whole."""
        self._texts[piece.choice].append(piece.text)
        self._tokens += piece.tokens
        if piece.finish_reason is not None:
            self._reasons[piece.choice] = piece.finish_reason

    def whole(self) -> dict[str, object]:
        """The answer to a request without ``stream``."""
        chat = self._ask.kind == "chat"
        choices = []
        for index, parts in self._texts.items():
            text = "".join(parts)
            said: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choices.append({"index": index, "logprobs": None, "finish_reason": self._reasons[index], **said})
        kind = "chat.completion" if chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self._usage()}

    def event(self, piece: TextPiece) -> bytes:
        """The event for a piece."""
        self.add(piece)
        chat = self._ask.kind == "chat"
        said: dict[str, object] = {"text": piece.text}
        if chat:
            delta = {"content": piece.text} if piece.text else {}
            if piece.choice not in self._begun:
                delta = {"role": "assistant", "content": piece.text}
            said = {"delta": delta}
        self._begun.add(piece.choice)
        choice = {"index": piece.choice, "logprobs": None, "finish_reason": piece.finish_reason, **said}
        more = {"usage": None} if self._ask.usage else {}
        return _event({**self._head(self._chunk), "choices": [choice], **more})

    def last(self) -> bytes:
        """The event behind all pieces, if usage was asked for, and the mark of the end."""
        if not self._ask.usage:
            return DONE
        return _event({**self._head(self._chunk), "choices": [], "usage": self._usage()}) + DONE

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self._ask.kind == "chat" else "text_completion"

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._ask.model}

    def _usage(self) -> dict[str, int]:
        total = self._prompt_tokens + self._tokens
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens, "total_tokens": total}


def failure_event(error: RefusedError) -> bytes:
    """An error in the middle of a stream."""
    return _event(error.body)


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
