"""Tool calls of Mistral's templates: behind the token [TOOL_CALLS], in either of its two forms."""

from __future__ import annotations

import re

from paceline.serving.parsers.base import Delta, StateParser, ToolCallDelta, overlap
from paceline.serving.parsers.json_call import JsonCall, JsonValue, ended, grown

START = "[TOOL_CALLS]"
_HEAD_END = ("[CALL_ID]", "[ARGS]")
_NAME = re.compile(r"[\w.\-]+")


class MistralParser(StateParser):
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...}, any number of the latter.

    The first form is that of tokenizers up to version 7, the second that of version 11 and later, where version 11 has
    [CALL_ID] and an id before [ARGS]. Text may come before and between.
    """

    def __init__(self) -> None:
        super().__init__(self._text)
        self._call: JsonCall | None = None
        self._value = JsonValue()

    def flush(self) -> Delta:
        """See `Parser`."""
        held, self._held = self._held, ""
        if self._state == self._text:
            return Delta(held)
        if self._state == self._head:
            return Delta(START + held)
        return self._finish() if self._call is not None else Delta()

    def _text(self) -> Delta:
        """Outside of calls."""
        place = self._held.find(START)
        certain = place if place >= 0 else len(self._held) - overlap(self._held, START)
        piece, self._held = self._held[:certain], self._held[certain:]
        if place >= 0:
            self._held, self._state = self._held[len(START) :], self._head
        return Delta(piece if piece.strip() or not self.calls else "")

    def _head(self) -> Delta:
        """Behind the marker: a list, or a name."""
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
        if not _NAME.fullmatch(head):  # no call after all
            text, self._held, self._state = START + self._held[:place], self._held[place:], self._text
            return Delta(text)
        self._held, self._state, self._value = self._held[place:], self._arguments, JsonValue()
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
            self._call, self._value = JsonCall(), JsonValue()
        end = self._value.end(self._held)
        piece, self._held = self._held[:end], "" if end is None else self._held[end:]
        delta = grown(self._call, piece, self.calls)
        return delta if end is None else delta + self._finish()

    def _finish(self) -> Delta:
        call, self._call = self._call, None
        assert call is not None
        if (delta := ended(call, self.calls)) is None:
            return Delta(call.text)
        self.calls += 1
        return delta
