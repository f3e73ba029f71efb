"""Prompt lookup: propose the tokens after an earlier occurrence of the last tokens.

The longest match wins; among equals the most recent one, or the first (``prefer="first"``). Sources: A. Saxena,
"Prompt Lookup Decoding" (2023); the two preferences are those of llama.cpp and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from paceline.core.errors import ConfigurationError
from paceline.draft.base import TextDrafter


class NgramIndex:
    """One text and, for every n-gram in it, where its continuation begins."""

    def __init__(self, sizes: range, *, first: bool) -> None:
        self._sizes, self._first = sizes, first
        self.tokens: list[int] = []
        self._continuation: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text. An n-gram is entered when the token after it is known."""
        for token in tokens:
            end = len(self.tokens)
            for size in self._sizes:
                if size <= end:
                    ngram = tuple(self.tokens[end - size : end])
                    if self._first:
                        self._continuation.setdefault(ngram, end)
                    else:
                        self._continuation[ngram] = end
            self.tokens.append(token)

    def lookup(self, length: int) -> list[int]:
        """Up to ``length`` tokens that followed the longest match."""
        for size in reversed(self._sizes):
            if size > len(self.tokens):
                continue
            start = self._continuation.get(tuple(self.tokens[-size:]))
            if start is not None:
                return self.tokens[start : start + length]
        return []


class NgramDrafter(TextDrafter[NgramIndex]):
    """Drafts chains of ``k`` tokens after n-grams of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens.

    Raises:
        ConfigurationError: a number is out of range, or ``prefer`` is unknown.
    """

    def __init__(
        self,
        k: int,
        *,
        prompt_lookup_max: int = 3,
        prompt_lookup_min: int = 1,
        prefer: Literal["recent", "first"] = "recent",
    ) -> None:
        super().__init__(k)
        if not 1 <= prompt_lookup_min <= prompt_lookup_max:
            raise ConfigurationError(
                f"prompt_lookup_min: expected 1 <= prompt_lookup_min <= prompt_lookup_max, got {prompt_lookup_min} "
                f"and prompt_lookup_max={prompt_lookup_max}; correct one of them"
            )
        if prefer not in ("recent", "first"):
            raise ConfigurationError(f"prefer: expected 'recent' or 'first', got {prefer!r}; use one of them")
        self._sizes, self._first = range(prompt_lookup_min, prompt_lookup_max + 1), prefer == "first"

    def new_text(self, prompt: Sequence[int]) -> NgramIndex:
        index = NgramIndex(self._sizes, first=self._first)
        index.extend(prompt)
        return index

    def extend(self, text: NgramIndex, tokens: Sequence[int]) -> None:
        text.extend(tokens)

    def propose_text(self, text: NgramIndex, limit: int) -> list[int]:
        return text.lookup(limit)
