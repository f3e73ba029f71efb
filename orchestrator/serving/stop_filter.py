"""Ids to text for one choice: pieces as they are certain, and nothing of a stop string or what comes after it."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.text.tokenizer import IncrementalDetokenizer, Tokenizer


class StopStringFilter:
    """Takes tokens, gives text; holds back what may turn out to begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._text, self._stops = IncrementalDetokenizer(tokenizer, prompt), list(stops)
        self._held, self._done = "", False

    def push(self, tokens: Sequence[int]) -> str:
        """Text that is certain after these tokens."""
        return self._cut("".join(map(self._text.push, tokens)), last=False)

    def end(self) -> str:
        """The rest."""
        return self._cut(self._text.flush(), last=True)

    def _cut(self, more: str, *, last: bool) -> str:
        if self._done:
            return ""
        self._held += more
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._done = True
            return self._held[: min(found)]
        keep = 0 if last else max((_overlap(self._held, stop) for stop in self._stops), default=0)
        sure, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return sure


def _overlap(text: str, stop: str) -> int:
    """How much of the end of the text is a beginning of the stop string."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
