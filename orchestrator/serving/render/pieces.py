"""What the parts of rendering hand to each other. Values only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from paceline.serving.parsers.base import Delta

Origin = Literal["draft", "corrected", "target"]
"""Of a token: drafted and accepted; the target's own where a drafted one fell; or the target's own."""

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class TokenPiece:
    """One token of an answer.

    text      that became certain with it: empty where a character is unfinished or a stop string may have begun
    logprob   natural logarithm of its probability, if asked for
    top       (id, log-probability) of the likeliest tokens at its place, if asked for
    """

    token: int
    text: str
    origin: Origin
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """What one choice gained.

    first          whether this holds the first token of the choice
    finish_reason  OpenAI's, with the last step of a choice
    """

    choice: int
    delta: Delta
    pieces: tuple[TokenPiece, ...]
    first: bool = False
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of an answer. ``cached_tokens``: of the prompts, those that were not read again; None: without
    prefix caching.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    def to_dict(self) -> dict[str, object]:
        """As in completions and chat completions."""
        usage: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        if self.cached_tokens is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
        return usage


@dataclass(slots=True)
class ToolCall:
    """A whole call."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class ChoiceText:
    """A whole choice, as it adds up."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    pieces: list[TokenPiece] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, step: Step) -> None:
        """One step more."""
        self.content += step.delta.content
        self.reasoning += step.delta.reasoning
        for call in step.delta.tool_calls:
            if call.name is not None:
                self.tool_calls.append(ToolCall(call.name))
            self.tool_calls[call.index].arguments += call.arguments
        self.pieces += step.pieces
        self.finish_reason = step.finish_reason or self.finish_reason

    @property
    def mean_logprob(self) -> float:
        """What the best of several choices are chosen by."""
        logprobs = [piece.logprob for piece in self.pieces if piece.logprob is not None]
        return sum(logprobs) / len(logprobs) if logprobs else 0.0


class AnswerWriter(Protocol):
    """Writes answers in the format of one endpoint.

    ``by_token``: steps hold one token each, since the events are numbered and an answer must be resumable.
    """

    by_token: bool

    def step(self, step: Step, usage: Usage) -> bytes:
        """The events of a step; empty where it shows nothing. ``usage``: up to here."""

    def end(self, usage: Usage, metrics: Mapping[str, object] | None) -> bytes:
        """The events behind the last step."""

    def body(
        self, choices: Sequence[ChoiceText], usage: Usage, metrics: Mapping[str, object] | None
    ) -> Mapping[str, object]:
        """The whole answer, where nothing is streamed."""


def event(content: Mapping[str, object], name: str | None = None) -> bytes:
    """A server-sent event."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + encode(content) + b"\n\n"


def encode(content: Mapping[str, object]) -> bytes:
    """JSON, as UTF-8."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
