"""Tool calls of Qwen3-Coder's template: tags with the function's name and one for each of its parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from paceline.serving.parsers.base import Delta, StateParser, ToolCallDelta, overlap

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_PARAMETER_END, _FUNCTION_END = "</parameter>", "</function>"

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each function, by the function's name."""


class Qwen3CoderParser(StateParser):
    """<tool_call><function=f><parameter=x>1</parameter></function></tool_call>, any number, with text around.

    A value is written as it is, without quotes: the function's schema says whether it is a text, else it is JSON.
    Models sometimes leave the outer tags out. A parameter is handed out when it is complete.
    """

    def __init__(self, schemas: Schemas) -> None:
        super().__init__(self._text)
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._parameters = 0

    def flush(self) -> Delta:
        """See `Parser`."""
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
                self._held = begun[1:]  # nothing that belongs here
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
        """Behind a call: its outer tag may be closed."""
        begun = self._held.lstrip()
        if begun.startswith(_CLOSE):
            self._held, self._state = begun[len(_CLOSE) :], self._text
        elif not _CLOSE.startswith(begun):
            self._state = self._text
        return Delta()


def _json(value: str, schema: Mapping[str, Any]) -> str:
    """A value as JSON: the text itself where the schema takes texts or says nothing, or where it is no JSON."""
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
    raise ValueError(f"{constant} is no JSON")
