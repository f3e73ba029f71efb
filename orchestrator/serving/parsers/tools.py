"""Tool calls in the formats of chat templates, with a parser for each.

`tool_format` detects the format of a template. Names are vLLM's (``--tool-call-parser``).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.serving.parsers.base import CallParser, Delta, StateParser, ToolCallDelta, overlap

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class _JsonValue:
    """How far one JSON object or array of a growing text reaches."""

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
    """Incremental parser of one call as JSON, {"name": ..., "arguments": {...}}. ``name`` is known before the first
    piece of the arguments is returned.

    The arguments are returned as they are generated. If they come before the name, or the text is not such a call,
    nothing is known before its end.
    """

    def __init__(self) -> None:
        self.text = ""
        self.name: str | None = None
        self._value: _JsonValue | None = None
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
            self._value = _JsonValue()
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


def _grown(call: _JsonCall, text: str, index: int) -> Delta:
    """Return the addition to a call from more text."""
    before = call.name
    arguments = call.push(text)
    if not arguments:
        return Delta()
    return Delta(tool_calls=(ToolCallDelta(index, call.name if before is None else None, arguments),))


def _ended(call: _JsonCall, index: int) -> Delta | None:
    """Return the addition to a call at its end: nothing if it was returned already, else all of it; None: it is not a
    call.
    """
    if call.name is not None:
        return Delta()
    rest = call.rest()
    return None if rest is None else Delta(tool_calls=(ToolCallDelta(index, *rest),))


_MISTRAL_START = "[TOOL_CALLS]"
_HEAD_END = ("[CALL_ID]", "[ARGS]")
_NAME = re.compile(r"[\w.\-]+")


class MistralParser(StateParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}, any number of the latter.

    The first form is that of tokenizers up to version 7, the second that of version 11 and later, where version 11 has
    [CALL_ID] and an id before [ARGS]. Text may come before and between.
    """

    def __init__(self) -> None:
        super().__init__(self._text)
        self._call: _JsonCall | None = None
        self._value = _JsonValue()

    def flush(self) -> Delta:
        held, self._held = self._held, ""
        if self._state == self._text:
            return Delta(held)
        if self._state == self._head:
            return Delta(_MISTRAL_START + held)
        return self._finish() if self._call is not None else Delta()

    def _text(self) -> Delta:
        """Outside of calls."""
        place = self._held.find(_MISTRAL_START)
        certain = place if place >= 0 else len(self._held) - overlap(self._held, _MISTRAL_START)
        piece, self._held = self._held[:certain], self._held[certain:]
        if place >= 0:
            self._held, self._state = self._held[len(_MISTRAL_START) :], self._head
        return Delta(piece if piece.strip() or not self.calls else "")

    def _head(self) -> Delta:
        """Parse the text after the marker: a list, or a name."""
        begun = self._held.lstrip()
        if not begun:
            return Delta()
        if begun.startswith("[") and not any(marker.startswith(begun[: len(marker)]) for marker in _HEAD_END):
            self._held, self._state = begun[1:], self._list
            return Delta()
        place = self._held.find("{")
        if place < 0:
            return Delta()
        head = self._held[:place].strip()
        for marker in _HEAD_END:
            head = head.partition(marker)[0].strip()
        if not _NAME.fullmatch(head):  # not a call
            text, self._held, self._state = _MISTRAL_START + self._held[:place], self._held[place:], self._text
            return Delta(text)
        self._held, self._state, self._value = self._held[place:], self._arguments, _JsonValue()
        return Delta(tool_calls=(ToolCallDelta(self.calls, head, ""),))

    def _arguments(self) -> Delta:
        """Inside the arguments of a call whose name is known."""
        end = self._value.end(self._held)
        piece, self._held = self._held[:end], "" if end is None else self._held[end:]
        delta = Delta(tool_calls=(ToolCallDelta(self.calls, None, piece),)) if piece else Delta()
        if end is not None:
            self.calls, self._state = self.calls + 1, self._text
        return delta

    def _list(self) -> Delta:
        """Inside a list of calls."""
        if self._call is None:
            begun = self._held.lstrip(" \n\t,")
            if begun.startswith("]"):
                self._held, self._state = begun[1:], self._text
                return Delta()
            self._held = begun if begun.startswith("{") or not begun else begun[1:]
            if not begun.startswith("{"):
                return Delta()
            self._call, self._value = _JsonCall(), _JsonValue()
        end = self._value.end(self._held)
        piece, self._held = self._held[:end], "" if end is None else self._held[end:]
        delta = _grown(self._call, piece, self.calls)
        return delta if end is None else delta + self._finish()

    def _finish(self) -> Delta:
        call, self._call = self._call, None
        assert call is not None
        if (delta := _ended(call, self.calls)) is None:
            return Delta(call.text)
        self.calls += 1
        return delta


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_PARAMETER_END, _FUNCTION_END = "</parameter>", "</function>"

_Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each function, by the function's name."""


class Qwen3CoderParser(StateParser):
    """<tool_call><function=f><parameter=x>1</parameter></function></tool_call>, any number, with text around.

    A value has no quotes: the function's schema determines whether it is text, else it is JSON. Models sometimes omit
    the outer tags. A parameter is returned when it is complete.
    """

    def __init__(self, schemas: _Schemas) -> None:
        super().__init__(self._text)
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._parameters = 0

    def flush(self) -> Delta:
        held, self._held = self._held, ""
        return Delta(held) if self._state == self._text else Delta()

    def _text(self) -> Delta:
        """Outside of calls."""
        places = [(place, tag) for tag in (_OPEN, _FUNCTION) if (place := self._held.find(tag)) >= 0]
        place, tag = min(places, default=(len(self._held) - self._uncertain(), ""))
        piece, self._held = self._held[:place], self._held[place:]
        delta = Delta(piece if piece.strip() or not self.calls else "")
        inner = self._held[len(_OPEN) :].lstrip() if tag == _OPEN else self._held
        if tag and not inner.startswith(_FUNCTION):
            if _FUNCTION.startswith(inner):
                return delta  # it may become a call
            self._held = self._held[len(_OPEN) :]
            return delta + Delta(_OPEN)
        if not tag or (end := inner.find(">")) < 0:
            return delta
        name = inner[len(_FUNCTION) : end].strip()
        self._properties = self._schemas.get(name, {}).get("properties", {})
        self._held, self._state, self._parameters = inner[end + 1 :], self._function, 0
        return delta + Delta(tool_calls=(ToolCallDelta(self.calls, name, "{"),))

    def _uncertain(self) -> int:
        """How many characters at the end may begin a tag."""
        return max(overlap(self._held, tag) for tag in (_OPEN, _FUNCTION))

    def _function(self) -> Delta:
        """Inside a call, between its parameters."""
        begun = self._held.lstrip()
        if begun.startswith(_FUNCTION_END):
            self._held, self._state, self.calls = begun[len(_FUNCTION_END) :], self._behind, self.calls + 1
            return Delta(tool_calls=(ToolCallDelta(self.calls - 1, None, "}"),))
        if not begun.startswith(_PARAMETER):
            if begun and not _PARAMETER.startswith(begun) and not _FUNCTION_END.startswith(begun):
                self._held = begun[1:]  # unexpected text
            return Delta()
        name, closed, value = begun[len(_PARAMETER) :].partition(">")
        value, ended, rest = value.partition(_PARAMETER_END)
        if not closed or not ended:
            return Delta()
        name, self._held, self._parameters = name.strip(), rest, self._parameters + 1
        written = _json(value.removeprefix("\n").removesuffix("\n"), self._properties.get(name, {}))
        text = f"{', ' if self._parameters > 1 else ''}{json.dumps(name, ensure_ascii=False)}: {written}"
        return Delta(tool_calls=(ToolCallDelta(self.calls, None, text),))

    def _behind(self) -> Delta:
        """Parse the text after a call, where its outer tag may be closed."""
        begun = self._held.lstrip()
        if begun.startswith(_CLOSE):
            self._held, self._state = begun[len(_CLOSE) :], self._text
        elif not _CLOSE.startswith(begun):
            self._state = self._text
        return Delta()


def _json(value: str, schema: Mapping[str, Any]) -> str:
    """Return a value as JSON: the text itself if the schema takes strings, gives no type, or the text is not JSON."""
    kinds = schema.get("type", "string" if not schema.keys() & {"anyOf", "oneOf", "$ref"} else ())
    kinds = {kinds} if isinstance(kinds, str) else set(kinds)
    for other in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kinds |= {other["type"]} if isinstance(other.get("type"), str) else set()
    text = json.dumps(value, ensure_ascii=False)
    if value.strip().lower() in ("null", "none") and "null" in kinds:
        return "null"
    if "string" in kinds:
        return text
    if "boolean" in kinds and value.strip().lower() in ("true", "false"):
        return value.strip().lower()
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value.strip()


def _refuse(constant: str) -> None:
    raise ValueError(f"expected JSON, got {constant}; write null or a string")


class HermesParser:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, with text around: Hermes, Qwen."""

    ended = False
    _MISTRAL_START, _END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held, self.calls = "", 0
        self._call: _JsonCall | None = None

    def push(self, text: str) -> Delta:
        self._held += text
        delta = Delta()
        while True:
            marker = self._MISTRAL_START if self._call is None else self._END
            place = self._held.find(marker)
            certain = place if place >= 0 else len(self._held) - overlap(self._held, marker)
            piece, self._held = self._held[:certain], self._held[certain:]
            if self._call is None:
                delta += Delta(piece if piece.strip() or not self.calls else "")
            else:
                delta += _grown(self._call, piece, self.calls)
            if place < 0:
                return delta
            self._held = self._held[len(marker) :]
            if self._call is None:
                self._call = _JsonCall()
            else:
                delta += self._finish()

    def flush(self) -> Delta:
        held, self._held = self._held, ""
        if self._call is None:
            return Delta(held)
        return _grown(self._call, held, self.calls) + self._finish()

    def _finish(self) -> Delta:
        call, self._call = self._call, None
        assert call is not None
        if (delta := _ended(call, self.calls)) is None:  # not a call
            return Delta(f"{self._MISTRAL_START}{call.text}{self._END}")
        self.calls += 1
        return delta


class LlamaJsonParser:
    """Parser of Llama 3's format: the whole response is {"name": ..., "parameters": {...}}, several after each other or
    separated by ";".
    """

    ended = False

    def __init__(self) -> None:
        self._text, self.calls = "", 0
        self._plain = False
        self._call: _JsonCall | None = None
        self._value: _JsonValue | None = None

    def push(self, text: str) -> Delta:
        if self._plain:
            return Delta(text)
        delta, text = Delta(), self._text + text
        self._text = ""
        while text:
            if self._call is None:
                begun = text.lstrip(" \n;" if self.calls else " \n").removeprefix("<|python_tag|>")
                if begun and not begun.startswith("{") and not "<|python_tag|>".startswith(begun):
                    self._plain = True
                    return delta + Delta(text if not self.calls else begun)
                if not begun.startswith("{"):
                    self._text = text
                    return delta
                self._call, self._value, text = _JsonCall(), _JsonValue(), begun
            assert self._value is not None
            end = self._value.end(text)
            delta += _grown(self._call, text[:end], self.calls)
            if end is None:
                return delta
            text = text[end:]
            delta += self._finish()
        return delta

    def flush(self) -> Delta:
        held, self._text = self._text, ""
        return Delta(held if not self.calls else "") if self._call is None else self._finish()

    def _finish(self) -> Delta:
        call, self._call = self._call, None
        assert call is not None
        if (delta := _ended(call, self.calls)) is None:
            self._plain = True
            return Delta(call.text)
        self.calls += 1
        return delta


class PythonicParser:
    """Parser of a response that is a Python list of calls, [f(a=1), g(b="x")]: Llama 3.2 and 4. Returned when
    complete.
    """

    ended = False
    calls = 0  # none is known before the end

    def __init__(self) -> None:
        self._text = ""
        self._plain = False

    def push(self, text: str) -> Delta:
        if self._plain:
            return Delta(text)
        self._text += text
        begun = self._text.lstrip()
        if begun and not begun.startswith("["):
            self._plain, held, self._text = True, self._text, ""
            return Delta(held)
        return Delta()

    def flush(self) -> Delta:
        text, self._text = self._text, ""
        calls = _python_calls(text.strip())
        return Delta(text) if calls is None else Delta(tool_calls=calls)


class JsonListParser:
    """Parser of a response [{"name": ..., "parameters": {...}}, ...], as the grammar of tool_choice: required generates
    it.
    """

    ended = False

    def __init__(self) -> None:
        self._text, self.calls = "", 0
        self._call: _JsonCall | None = None
        self._value: _JsonValue | None = None

    def push(self, text: str) -> Delta:
        delta = Delta()
        while text:
            if self._call is None:
                place = text.find("{")
                if place < 0:
                    return delta
                self._call, self._value, text = _JsonCall(), _JsonValue(), text[place:]
            assert self._value is not None
            end = self._value.end(text)
            delta += _grown(self._call, text[:end], self.calls)
            if end is None:
                return delta
            text, call, self._call = text[end:], self._call, None
            if (rest := call.rest()) is not None:
                delta += Delta(tool_calls=(ToolCallDelta(self.calls, *rest),))
            self.calls += 1
        return delta

    def flush(self) -> Delta:
        return Delta()


class NamedCallParser:
    """Parser of a response with the arguments of one function, as the grammar of a tool_choice with a name generates
    it.
    """

    ended = False

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Delta:
        name, self._name = self._name, None
        return Delta(tool_calls=(ToolCallDelta(0, name, text),))

    def flush(self) -> Delta:
        return Delta()


class OneCallParser:
    """Parser that ends another parser after the first call."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    @property
    def ended(self) -> bool:
        return self._parser.calls > 0

    def push(self, text: str) -> Delta:
        return _first_call(self._parser.push(text))

    def flush(self) -> Delta:
        return _first_call(self._parser.flush())


def _first_call(delta: Delta) -> Delta:
    return replace(delta, tool_calls=tuple(call for call in delta.tool_calls if not call.index))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    name     vLLM's
    make     makes the parser of one response from the schemas of the offered functions
    markers  a template with all of these uses it
    tokens   strings that the parser searches for, which may be special tokens of the vocabulary
    """

    name: str
    make: Callable[[_Schemas], CallParser]
    markers: tuple[str, ...]
    tokens: tuple[str, ...] = ()


TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("qwen3_coder", Qwen3CoderParser, ("<tool_call>", "<function="), ("<tool_call>", "</tool_call>")),
    ToolFormat("hermes", lambda _: HermesParser(), ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    ToolFormat("mistral", lambda _: MistralParser(), (_MISTRAL_START,), (_MISTRAL_START, "[CALL_ID]", "[ARGS]")),
    ToolFormat("pythonic", lambda _: PythonicParser(), ("[func_name1(",)),
    ToolFormat("llama3_json", lambda _: LlamaJsonParser(), ('"parameters"', '"name"')),
)
"""Formats in the order in which templates are searched."""


def tool_format(template: str) -> ToolFormat | None:
    """The form that a chat template teaches, if it has a place for tools at all and the form is known."""
    if "tools" not in template:
        return None
    return next((row for row in TOOL_FORMATS if all(marker in template for marker in row.markers)), None)


def _python_calls(text: str) -> tuple[ToolCallDelta, ...] | None:
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
