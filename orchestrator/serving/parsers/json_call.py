"""One tool call written as JSON, {"name": ..., "arguments": {...}}, while it grows.

The arguments are handed out as they are written. Where they stand before the name, or the text is no such call, all of
it is known at its end only.
"""

from __future__ import annotations

import json
import re

from paceline.serving.parsers.base import Delta, ToolCallDelta

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonValue:
    """How far one JSON object or array of a growing text reaches."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def end(self, text: str) -> int | None:
        """The place behind the value's last character in more text; None: it goes on."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return None


class JsonCall:
    """A call that grows. ``name`` is known before the first piece of the arguments is handed out."""

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self._value: JsonValue | None = None
        self._done = False

    def push(self, text: str) -> str:
        """More text; more of the arguments."""
        self.text += text
        if self._done:
            return ""
        if self._value is None:
            head = _HEAD.match(self.text)
            if head is None:
                return ""
            try:
                self.name = json.loads(head[1])
            except ValueError:
                return ""
            self._value = JsonValue()
            text = self.text[head.end() :]
        end = self._value.end(text)
        self._done = end is not None
        return text[:end]

    def rest(self) -> tuple[str, str] | None:
        """At its end: its name and arguments, if it is a call of which nothing was handed out."""
        if self.name is not None:
            return None
        return parse_call(self.text)


def parse_call(text: str) -> tuple[str, str] | None:
    """Name and arguments (as JSON) of a whole call; None: it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    return call["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def grown(call: JsonCall, text: str, index: int) -> Delta:
    """What a call gains by more text."""
    before = call.name
    arguments = call.push(text)
    if not arguments:
        return Delta()
    return Delta(tool_calls=(ToolCallDelta(index, call.name if before is None else None, arguments),))


def ended(call: JsonCall, index: int) -> Delta | None:
    """What a call gains by its end: nothing if it was handed out, or all of it at once; None: it is no call."""
    if call.name is not None:
        return Delta()
    rest = call.rest()
    return None if rest is None else Delta(tool_calls=(ToolCallDelta(index, *rest),))
