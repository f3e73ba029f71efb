"""Answers in OpenAI's format: a whole one, or the events of a stream. Values only."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass

from paceline.serving.protocol import ChatRequest, CompletionRequest, RefusedError

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text that one choice gained.

    num_tokens     tokens it stands for
    finish_reason  OpenAI's ("stop" or "length"), with the last delta of a choice
    """

    choice: int
    text: str
    num_tokens: int
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Accepted:
    """A replica sends it first: the target takes the request. ``prompt_tokens``: of all its prompts."""

    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A replica sends it last, in place of what is missing."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None

    def error(self) -> RefusedError:
        return RefusedError(self.status, self.message, param=self.param, code=self.code)


class ResponseBuilder:
    """Writes down the answer to one request, from the text that its choices gain."""

    def __init__(self, request: CompletionRequest | ChatRequest, prompt_tokens: int) -> None:
        self._request, self._prompt_tokens = request, prompt_tokens
        self._id = ("chatcmpl-" if request.kind == "chat" else "cmpl-") + uuid.uuid4().hex
        self._created = int(time.time())
        self._texts: list[list[str]] = [[] for _ in range(request.num_choices)]
        self._reasons: dict[int, str] = {}
        self._completion_tokens = 0
        self._begun: set[int] = set()

    def add(self, delta: TextDelta) -> None:
        """Take a delta into the answer."""
        self._texts[delta.choice].append(delta.text)
        self._completion_tokens += delta.num_tokens
        if delta.finish_reason is not None:
            self._reasons[delta.choice] = delta.finish_reason

    def response(self) -> dict[str, object]:
        """The answer to a request without ``stream``, when every choice is finished."""
        chat = self._request.kind == "chat"
        choices = []
        for index, parts in enumerate(self._texts):
            text = "".join(parts)
            content: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choices.append({"index": index, "logprobs": None, "finish_reason": self._reasons[index], **content})
        kind = "chat.completion" if chat else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self._usage()}

    def event(self, delta: TextDelta) -> bytes:
        """Take a delta in; the event that shows it."""
        self.add(delta)
        content: dict[str, object] = {"text": delta.text}
        if self._request.kind == "chat":
            message = {"content": delta.text} if delta.text else {}
            if delta.choice not in self._begun:
                message = {"role": "assistant", "content": delta.text}
            content = {"delta": message}
        self._begun.add(delta.choice)
        choice = {"index": delta.choice, "logprobs": None, "finish_reason": delta.finish_reason, **content}
        usage = {"usage": None} if self._request.stream_options.include_usage else {}
        return _event({**self._head(self._chunk), "choices": [choice], **usage})

    def last_event(self) -> bytes:
        """The end of the stream, after an event with the usage if that was asked for."""
        if not self._request.stream_options.include_usage:
            return DONE
        return _event({**self._head(self._chunk), "choices": [], "usage": self._usage()}) + DONE

    @property
    def _chunk(self) -> str:
        return "chat.completion.chunk" if self._request.kind == "chat" else "text_completion"

    def _head(self, kind: str) -> dict[str, object]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._request.model}

    def _usage(self) -> dict[str, int]:
        prompt, completion = self._prompt_tokens, self._completion_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def error_event(error: RefusedError) -> bytes:
    """An error in the middle of a stream."""
    return _event(error.body)


def _event(content: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n"
