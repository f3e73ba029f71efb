"""Parsers of a model's text into plain text, reasoning and tool calls.

A parser receives a growing text and returns the parts that are certain. Its output depends only on the text, not on its
division into pieces, so a response can be resumed at any token. Names of formats are vLLM's (``--tool-call-parser``).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any


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

    def __add__(self, other: Delta) -> Delta:
        return Delta(self.content + other.content, self.reasoning + other.reasoning, self.tool_calls + other.tool_calls)


class Parser:
    """Parser of a growing text; this one finds nothing in it.

    calls  number of complete tool calls
    ended  whether the answer is over, whatever else the model writes
    """

    calls = 0
    ended = False

    def push(self, text: str) -> Delta:
        """Add text; return what is certain now."""
        return Delta(text)

    def flush(self) -> Delta:
        """Return what was held back; the text is at its end."""
        return Delta()


ParserState = Callable[[], Delta]


class StateParser(Parser):
    """Parser with several states, each a method that takes the certain part of the held text and returns its kind."""

    def __init__(self, first: ParserState) -> None:
        self._held = ""  # text that no state has taken
        self._state = first

    def push(self, text: str) -> Delta:
        self._held += text
        delta, before = Delta(), None
        while self._held and (self._held, self._state) != before:
            before = self._held, self._state
            delta += self._state()
        return delta

    def _take(self, size: int | None = None) -> str:
        piece, self._held = self._held[:size], "" if size is None else self._held[size:]
        return piece

    def _take_until(self, marker: str, then: ParserState) -> str:
        """Take the text that is certainly before a marker, and the marker itself; its state follows."""
        place = self._held.find(marker)
        piece = self._take(place if place >= 0 else len(self._held) - overlap(self._held, marker))
        if place >= 0:
            self._take(len(marker))
            self._state = then
        return piece

    def _take_arguments(self, value: JsonValue, then: ParserState) -> Delta:
        """Take what has come of a call's arguments; the state after them follows."""
        end = value.end(self._held)
        piece = self._take(end)
        delta = Delta(tool_calls=(ToolCallDelta(self.calls, None, piece),)) if piece else Delta()
        if end is not None:
            self.calls, self._state = self.calls + 1, then
        return delta

    def _plain(self) -> Delta:
        return Delta(self._take())

    def _around(self, text: str) -> Delta:
        """Return text outside of calls; spaces after one are left out."""
        return Delta(text if text.strip() or not self.calls else "")


def overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text are a beginning of the marker, but not all of it."""
    longest = min(len(marker) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


@dataclass(frozen=True, slots=True)
class ReasoningRow:
    """Markers of reasoning."""

    name: str
    start: str
    end: str


REASONING: tuple[ReasoningRow, ...] = (
    ReasoningRow("deepseek_r1", "<think>", "</think>"),
    ReasoningRow("mistral", "[THINK]", "[/THINK]"),
    ReasoningRow("seed_oss", "<seed:think>", "</seed:think>"),
)


def reasoning_of(template: str) -> ReasoningRow | None:
    return next((row for row in REASONING if row.end in template), None)


class ReasoningParser(StateParser):
    """Parser of reasoning: text before the end marker, if a start marker opens the text or the prompt ended with one
    (``started``). The rest goes to another parser.
    """

    def __init__(self, row: ReasoningRow, inner: Parser, *, started: bool) -> None:
        super().__init__(self._inside if started else self._before)
        self._row, self._inner = row, inner

    def push(self, text: str) -> Delta:
        delta = self._inner.push(text) if self._state == self._behind else super().push(text)
        self.ended = self._inner.ended
        return delta

    def flush(self) -> Delta:
        held = self._take()
        if self._state == self._inside:
            return Delta(reasoning=held) + self._inner.flush()
        return (self._inner.push(held) if held else Delta()) + self._inner.flush()

    def _before(self) -> Delta:
        begun = self._held.lstrip()
        if begun.startswith(self._row.start):
            self._held, self._state = begun[len(self._row.start) :], self._inside
        elif not self._row.start.startswith(begun):  # it cannot become the marker
            self._state = self._behind
        return Delta()

    def _inside(self) -> Delta:
        return Delta(reasoning=self._take_until(self._row.end, self._gap))

    def _gap(self) -> Delta:
        self._held = self._held.lstrip("\n")  # templates put empty lines after the marker
        if self._held:
            self._state = self._behind
        return Delta()

    def _behind(self) -> Delta:
        return self._inner.push(self._take())


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:type|tool_call_id)"\s*:\s*"[^"]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class JsonValue:
    """Extent of one JSON object or array in a growing text."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped = 0, False, False

    def end(self, text: str) -> int | None:
        """Return the position after the value's last character in more text; None: it continues."""
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


class _JsonCall:
    """One call in a growing text. Its arguments are returned as they are generated if they come after the name."""

    def __init__(self, *, keyed: bool = False) -> None:
        self.text = ""
        self._keyed = keyed  # {name: arguments}
        self.extent = JsonValue()
        self._name: str | None = None
        self._arguments: JsonValue | None = None
        self._done = False

    def push(self, text: str, index: int) -> Delta:
        self.text += text
        if self._done:
            return Delta()
        name = None
        if self._arguments is None:
            head = None if self._keyed else _HEAD.match(self.text)
            if head is None:
                return Delta()
            try:
                self._name = name = json.loads(head[1])
            except ValueError:
                return Delta()
            self._arguments = JsonValue()
            text = self.text[head.end() :]
        end = self._arguments.end(text)
        self._done = end is not None
        return Delta(tool_calls=(ToolCallDelta(index, name, text[:end]),)) if text[:end] else Delta()

    def finish(self, index: int) -> Delta | None:
        """Return the rest of the call at its end; None: the text is not a call."""
        if self._name is not None:
            return Delta()
        try:
            call = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        if self._keyed and isinstance(call, dict) and len(call) == 1:
            ((name, arguments),) = call.items()
            call = {"name": name, "arguments": arguments}
        name = call.get("name", call.get("tool_name")) if isinstance(call, dict) else None
        if not isinstance(name, str):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return Delta(tool_calls=(ToolCallDelta(index, name, written),))


class _JsonCallsParser(StateParser):
    """Base of parsers of calls as JSON. ``between``: the state outside of them. ``keyed``: a call is {name:
    arguments}.
    """

    def __init__(self, between: ParserState, *, keyed: bool = False) -> None:
        super().__init__(between)
        self._between, self._keyed, self._call = between, keyed, _JsonCall(keyed=keyed)

    def flush(self) -> Delta:
        if self._state == self._object:
            return self._finish()
        return Delta(self._take() if not self.calls else "")

    def _object(self) -> Delta:
        end = self._call.extent.end(self._held)
        delta = self._call.push(self._take(end), self.calls)
        return delta if end is None else delta + self._finish()

    def _finish(self) -> Delta:
        call, self._call, self._state = self._call, _JsonCall(keyed=self._keyed), self._between
        if (delta := call.finish(self.calls)) is None:
            return self._no_call(call.text)
        self.calls += 1
        return delta

    def _no_call(self, text: str) -> Delta:
        return Delta(text)


class HermesParser(_JsonCallsParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, with text around: Hermes, Qwen."""

    def __init__(self) -> None:
        super().__init__(self._text)

    def flush(self) -> Delta:
        held = self._take()
        return Delta(held) if self._state == self._text else self._call.push(held, self.calls) + self._finish()

    def _text(self) -> Delta:
        return self._around(self._take_until(_OPEN, self._inside))

    def _inside(self) -> Delta:
        delta = self._call.push(self._take_until(_CLOSE, self._text), self.calls)
        return delta + self._finish() if self._state == self._text else delta

    def _no_call(self, text: str) -> Delta:
        return Delta(f"{_OPEN}{text}{_CLOSE}")


class LlamaJsonParser(_JsonCallsParser):
    """Llama 3's format: only {"name": ..., "parameters": {...}}, or several with ";" or nothing between."""

    def __init__(self) -> None:
        super().__init__(self._before)

    def _before(self) -> Delta:
        begun = self._held.lstrip(" \n;" if self.calls else " \n").removeprefix("<|python_tag|>")
        if begun.startswith("{"):
            self._held, self._state = begun, self._object
        elif not "<|python_tag|>".startswith(begun):
            self._held, self._state = begun if self.calls else self._held, self._plain
        return Delta()

    def _no_call(self, text: str) -> Delta:
        self._state = self._plain
        return Delta(text)


def calls_schema(functions: Sequence[tuple[str, dict[str, Any]]], *, several: bool) -> dict[str, Any]:
    """Return the JSON schema of what `JsonListParser` reads. ``functions``: names and schemas of arguments."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "parameters": _moved(arguments, f"/items/anyOf/{index}/properties/parameters"),
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for index, (name, arguments) in enumerate(functions)
    ]
    return {"type": "array", "minItems": 1, **({} if several else {"maxItems": 1}), "items": {"anyOf": calls}}


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its root are to its place in another schema."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#"):
        made["$ref"] = f"#{place}{reference[1:]}"
    return made


class JsonListParser(_JsonCallsParser):
    """[{"name": ..., "parameters": {...}}, ...], as the grammar of tool_choice: required generates it."""

    def __init__(self) -> None:
        super().__init__(self._before)

    def flush(self) -> Delta:
        return Delta()

    def _before(self) -> Delta:
        place = self._held.find("{")
        self._take(place if place >= 0 else None)
        if place >= 0:
            self._state = self._object
        return Delta()


class ListOrTextParser(JsonListParser):
    """A list of calls, or text that does not begin with a bracket: the form of functions that messages tell of."""

    def __init__(self) -> None:
        super().__init__()
        self._state = self._first

    def flush(self) -> Delta:
        return Delta(self._take()) if self._state == self._first else super().flush()

    def _first(self) -> Delta:
        if begun := self._held.lstrip():
            self._state = self._before if begun.startswith("[") else self._plain
        return Delta()


_TOOL_CALLS = "[TOOL_CALLS]"
_HEAD_END = ("[CALL_ID]", "[ARGS]")
_NAME = re.compile(r"[\w.\-]+")


class MarkedListParser(_JsonCallsParser):
    """A marker and calls as JSON, in a list or not, with text around: Command R7B, Granite 3, Nemotron Nano.

    start, end  the markers; without an end the list's bracket ends it
    keyed       a call is {name: arguments}: Apertus
    """

    def __init__(self, start: str, end: str = "", *, keyed: bool = False) -> None:
        super().__init__(self._list, keyed=keyed)
        self._start, self._end = start, end
        self._state = self._text

    def flush(self) -> Delta:
        if self._state == self._object:
            return self._finish()
        held = self._take()
        return Delta(held if self._state == self._text else "")

    def _text(self) -> Delta:
        return self._around(self._take_until(self._start, self._list))

    def _list(self) -> Delta:
        begun = self._held.lstrip(" \n\t,")
        if begun.startswith("{"):
            self._held, self._state = begun, self._object
        elif begun.startswith(self._end or "]"):
            self._held, self._state = begun[len(self._end or "]") :], self._text
        elif not self._end.startswith(begun):
            self._held = begun[1:]  # a bracket, or unexpected text
        return Delta()


class MistralParser(MarkedListParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}, any number of the latter.

    The first form is that of tokenizers up to version 7, the second that of version 11 and later, where version 11 has
    [CALL_ID] and an id before [ARGS]. Text may come before and between.
    """

    def __init__(self) -> None:
        super().__init__(_TOOL_CALLS)
        self._value = JsonValue()

    def flush(self) -> Delta:
        if self._state == self._head:
            return Delta(_TOOL_CALLS + self._take())
        return super().flush()

    def _text(self) -> Delta:
        return self._around(self._take_until(_TOOL_CALLS, self._head))

    def _head(self) -> Delta:
        begun = self._held.lstrip()
        if not begun:
            return Delta()
        if begun.startswith("[") and not any(marker.startswith(begun[: len(marker)]) for marker in _HEAD_END):
            self._held, self._state = begun[1:], self._list
            return Delta()
        place = self._held.find("{")
        if place < 0:
            return Delta()
        head = before = self._take(place)
        for marker in _HEAD_END:
            head = head.partition(marker)[0]
        name = head.strip()
        if not _NAME.fullmatch(name):  # not a call
            self._state = self._text
            return Delta(_TOOL_CALLS + before)
        self._state, self._value = self._arguments, JsonValue()
        return Delta(tool_calls=(ToolCallDelta(self.calls, name, ""),))

    def _arguments(self) -> Delta:
        return self._take_arguments(self._value, self._text)


class PythonicParser(StateParser):
    """Llama 3.2's and 4's format: a Python list of calls, [f(a=1), g(b="x")]. They are returned when it is complete."""

    def __init__(self) -> None:
        super().__init__(self._before)

    def flush(self) -> Delta:
        text = self._take()
        calls = python_calls(text.strip())
        return Delta(text) if calls is None else Delta(tool_calls=calls)

    def _before(self) -> Delta:
        if (begun := self._held.lstrip()) and not begun.startswith("["):
            self._state = self._plain
        return Delta()


class NamedCallParser(Parser):
    """The arguments of one function, as the grammar of a tool_choice with a name generates them."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Delta:
        name, self._name = self._name, None
        return Delta(tool_calls=(ToolCallDelta(0, name, text),))


class OneCallParser(Parser):
    """Parser that ends another parser after the first call."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def push(self, text: str) -> Delta:
        return self._first(self._parser.push(text))

    def flush(self) -> Delta:
        return self._first(self._parser.flush())

    def _first(self, delta: Delta) -> Delta:
        self.ended = self._parser.calls > 0
        return replace(delta, tool_calls=tuple(call for call in delta.tool_calls if not call.index))


def python_calls(text: str) -> tuple[ToolCallDelta, ...] | None:
    """Calls with literal keyword arguments; None: the text is something else. Nothing is executed."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        calls = []
        for index, call in enumerate(tree.elts):
            if not isinstance(call, ast.Call) or call.args or any(one.arg is None for one in call.keywords):
                return None
            arguments = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
            written = json.dumps(arguments, ensure_ascii=False)
            calls.append(ToolCallDelta(index, ast.unparse(call.func), written))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    return tuple(calls)
