"""Contents of a piece of a response: text for the reader, reasoning, and tool calls.

Parsers receive a growing text and return the parts that are certain. Their output depends only on the text, not on its
division into pieces, so a response can be resumed at any token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Addition to a tool call.

    index      of the call in the response
    name       of the function, with the first delta of the call; None later
    arguments  addition to its arguments, which are a JSON object as text
    """

    index: int
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Delta:
    """Addition to a response."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.content + other.content, self.reasoning + other.reasoning, self.tool_calls + other.tool_calls)


class Parser(Protocol):
    """Finds one kind of thing in a growing text."""

    @property
    def ended(self) -> bool:
        """Whether the answer is over, whatever else the model writes."""

    def push(self, text: str) -> Delta:
        """More text; what is certain now."""

    def flush(self) -> Delta:
        """The text is at its end; what was held back."""


class CallParser(Parser, Protocol):
    """Finds calls. ``calls``: how many of them are complete, which is the next one's number."""

    calls: int


class StateParser:
    """A parser with several states, each a method that takes the certain part of the held text and returns its kind."""

    ended = False

    def __init__(self, first: Callable[[], Delta]) -> None:
        self._held, self.calls = "", 0  # text that no state has taken
        self._state = first

    def push(self, text: str) -> Delta:
        self._held += text
        delta, before = Delta(), None
        while (self._held, self._state) != before:
            before = self._held, self._state
            delta += self._state()
        return delta


class PlainText:
    """All of it is for the reader."""

    ended = False

    def push(self, text: str) -> Delta:
        return Delta(text)

    def flush(self) -> Delta:
        return Delta()


def overlap(text: str, marker: str) -> int:
    """How many characters at the end of a text are a beginning of the marker, but not all of it."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)
