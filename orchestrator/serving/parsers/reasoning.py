"""Reasoning, told from the answer by the markers that a chat template knows: <think> ... </think>."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.serving.parsers.base import Delta, Parser, overlap


@dataclass(frozen=True, slots=True)
class ReasoningRow:
    """A way to mark reasoning. ``name`` is vLLM's for the same."""

    name: str
    start: str
    end: str


REASONING: tuple[ReasoningRow, ...] = (
    ReasoningRow("deepseek_r1", "<think>", "</think>"),
    ReasoningRow("mistral", "[THINK]", "[/THINK]"),
    ReasoningRow("seed_oss", "<seed:think>", "</seed:think>"),
)


def reasoning_of(template: str) -> ReasoningRow | None:
    """The markers that a chat template contains, if it contains any."""
    return next((row for row in REASONING if row.end in template), None)


class ReasoningParser:
    """Text before the end marker is reasoning, if a start marker opens the text or the prompt ended with one.

    The rest goes to another parser. ``started``: whether the prompt ended with the start marker.
    """

    def __init__(self, row: ReasoningRow, inner: Parser, *, started: bool) -> None:
        self._row, self._inner = row, inner
        self._held = ""
        self._state = "inside" if started else "before"

    @property
    def ended(self) -> bool:
        return self._inner.ended

    def push(self, text: str) -> Delta:
        if self._state == "after":
            return self._inner.push(text)
        self._held += text
        delta = Delta()
        if self._state == "before":
            begun = self._held.lstrip()
            if not begun.startswith(self._row.start):
                if self._row.start.startswith(begun):
                    return delta  # it may become the marker
                return self._answer(self._held)
            self._state, self._held = "inside", begun[len(self._row.start) :]
        if self._state == "inside":
            place = self._held.find(self._row.end)
            if place >= 0:
                reasoning, rest = self._held[:place], self._held[place + len(self._row.end) :]
                self._state = "gap"
                self._held = rest
                delta += Delta(reasoning=reasoning)
            else:
                certain = len(self._held) - overlap(self._held, self._row.end)
                piece, self._held = self._held[:certain], self._held[certain:]
                return delta + Delta(reasoning=piece)
        answer = self._held.lstrip("\n")  # templates put empty lines after the marker
        return delta + self._answer(answer) if answer else delta

    def flush(self) -> Delta:
        if self._state == "after":
            return self._inner.flush()
        held, self._held = self._held, ""
        if self._state == "inside":
            return Delta(reasoning=held) + self._inner.flush()
        return self._inner.push(held if self._state == "before" else "") + self._inner.flush()

    def _answer(self, text: str) -> Delta:
        self._state, self._held = "after", ""
        return self._inner.push(text)
