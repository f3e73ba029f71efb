"""Tool calls in the forms that chat templates teach their models, each found by a parser of its own.

`tool_format` tells from a template which one. Names are vLLM's (``--tool-call-parser``).
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.serving.parsers.base import CallParser, Delta, ToolCallDelta, overlap
from paceline.serving.parsers.json_call import JsonCall, JsonValue, ended, grown
from paceline.serving.parsers.mistral import START, MistralParser
from paceline.serving.parsers.qwen3_coder import Qwen3CoderParser, Schemas


class HermesParser:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, with text around: Hermes, Qwen."""

    ended = False
    _START, _END = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._held, self.calls = "", 0
        self._call: JsonCall | None = None

    def push(self, text: str) -> Delta:
        """See `Parser`."""
        self._held += text
        delta = Delta()
        while True:
            marker = self._START if self._call is None else self._END
            place = self._held.find(marker)
            certain = place if place >= 0 else len(self._held) - overlap(self._held, marker)
            piece, self._held = self._held[:certain], self._held[certain:]
            if self._call is None:
                delta += Delta(piece if piece.strip() or not self.calls else "")
            else:
                delta += grown(self._call, piece, self.calls)
            if place < 0:
                return delta
            self._held = self._held[len(marker) :]
            if self._call is None:
                self._call = JsonCall()
            else:
                delta += self._finish()

    def flush(self) -> Delta:
        """See `Parser`."""
        held, self._held = self._held, ""
        if self._call is None:
            return Delta(held)
        return grown(self._call, held, self.calls) + self._finish()

    def _finish(self) -> Delta:
        call, self._call = self._call, None
        assert call is not None
        if (delta := ended(call, self.calls)) is None:  # no call after all
            return Delta(f"{self._START}{call.text}{self._END}")
        self.calls += 1
        return delta


class LlamaJsonParser:
    """The whole answer is {"name": ..., "parameters": {...}}, several behind each other or parted by ";": Llama 3."""

    ended = False

    def __init__(self) -> None:
        self._text, self.calls = "", 0
        self._plain = False
        self._call: JsonCall | None = None
        self._value: JsonValue | None = None

    def push(self, text: str) -> Delta:
        """See `Parser`."""
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
                self._call, self._value, text = JsonCall(), JsonValue(), begun
            assert self._value is not None
            end = self._value.end(text)
            delta += grown(self._call, text[:end], self.calls)
            if end is None:
                return delta
            text = text[end:]
            delta += self._finish()
        return delta

    def flush(self) -> Delta:
        """See `Parser`."""
        held, self._text = self._text, ""
        return Delta(held if not self.calls else "") if self._call is None else self._finish()

    def _finish(self) -> Delta:
        call, self._call = self._call, None
        assert call is not None
        if (delta := ended(call, self.calls)) is None:
            self._plain = True
            return Delta(call.text)
        self.calls += 1
        return delta


class PythonicParser:
    """The whole answer is a Python list of calls, [f(a=1), g(b="x")]: Llama 3.2 and 4. Handed out when complete."""

    ended = False
    calls = 0  # none is known before the end

    def __init__(self) -> None:
        self._text = ""
        self._plain = False

    def push(self, text: str) -> Delta:
        """See `Parser`."""
        if self._plain:
            return Delta(text)
        self._text += text
        begun = self._text.lstrip()
        if begun and not begun.startswith("["):
            self._plain, held, self._text = True, self._text, ""
            return Delta(held)
        return Delta()

    def flush(self) -> Delta:
        """See `Parser`."""
        text, self._text = self._text, ""
        calls = _python_calls(text.strip())
        return Delta(text) if calls is None else Delta(tool_calls=calls)


class JsonListParser:
    """The whole answer is [{"name": ..., "parameters": {...}}, ...]: what a grammar makes of tool_choice: required."""

    ended = False

    def __init__(self) -> None:
        self._text, self.calls = "", 0
        self._call: JsonCall | None = None
        self._value: JsonValue | None = None

    def push(self, text: str) -> Delta:
        """See `Parser`."""
        delta = Delta()
        while text:
            if self._call is None:
                place = text.find("{")
                if place < 0:
                    return delta
                self._call, self._value, text = JsonCall(), JsonValue(), text[place:]
            assert self._value is not None
            end = self._value.end(text)
            delta += grown(self._call, text[:end], self.calls)
            if end is None:
                return delta
            text, call, self._call = text[end:], self._call, None
            if (rest := call.rest()) is not None:
                delta += Delta(tool_calls=(ToolCallDelta(self.calls, *rest),))
            self.calls += 1
        return delta

    def flush(self) -> Delta:
        """See `Parser`."""
        return Delta()


class NamedCallParser:
    """The whole answer is the arguments of one function: what a grammar makes of a tool_choice with a name."""

    ended = False

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> Delta:
        """See `Parser`."""
        name, self._name = self._name, None
        return Delta(tool_calls=(ToolCallDelta(0, name, text),))

    def flush(self) -> Delta:
        """See `Parser`."""
        return Delta()


class OneCallParser:
    """What another parser finds, up to the end of the first call."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    @property
    def ended(self) -> bool:
        """See `Parser`."""
        return self._parser.calls > 0

    def push(self, text: str) -> Delta:
        """See `Parser`."""
        return _first_call(self._parser.push(text))

    def flush(self) -> Delta:
        """See `Parser`."""
        return _first_call(self._parser.flush())


def _first_call(delta: Delta) -> Delta:
    return replace(delta, tool_calls=tuple(call for call in delta.tool_calls if not call.index))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A form of tool calls.

    name     vLLM's
    make     a parser for one answer, from the schemas of the functions that were offered
    markers  a template with all of these teaches it
    tokens   texts that the parser looks for, and that may be special tokens of the vocabulary
    """

    name: str
    make: Callable[[Schemas], CallParser]
    markers: tuple[str, ...]
    tokens: tuple[str, ...] = ()


TOOL_FORMATS: tuple[ToolFormat, ...] = (
    ToolFormat("qwen3_coder", Qwen3CoderParser, ("<tool_call>", "<function="), ("<tool_call>", "</tool_call>")),
    ToolFormat("hermes", lambda _: HermesParser(), ("<tool_call>",), ("<tool_call>", "</tool_call>")),
    ToolFormat("mistral", lambda _: MistralParser(), (START,), (START, "[CALL_ID]", "[ARGS]")),
    ToolFormat("pythonic", lambda _: PythonicParser(), ("[func_name1(",)),
    ToolFormat("llama3_json", lambda _: LlamaJsonParser(), ('"parameters"', '"name"')),
)
"""In the order in which templates are searched."""


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
