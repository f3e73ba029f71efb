"""Prompt lookup: propose the tokens after an earlier occurrence of the last tokens.

The longest match wins; among equals the most recent one, or the first (``prefer="first"``). Sources: A. Saxena,
"Prompt Lookup Decoding" (2023); the two preferences are those of llama.cpp and vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from paceline.core.errors import ConfigurationError
from paceline.draft.base import TextDrafter


@dataclass(frozen=True, slots=True)
class NgramText:
    """The tokens of one sequence and, for every n-gram in it, where its continuation begins."""

    tokens: list[int] = field(default_factory=list)
    continuation: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafter(TextDrafter[NgramText]):
    """Drafts chains of ``k`` tokens after n-grams of ``prompt_lookup_min`` to ``prompt_lookup_max`` tokens."""

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

    def new_text(self, prompt: Sequence[int]) -> NgramText:
        text = NgramText()
        self.extend(text, prompt)
        return text

    def extend(self, text: NgramText, tokens: Sequence[int]) -> None:
        """Append to the text. An n-gram is entered when the token after it is known."""
        known, continuation = text.tokens, text.continuation
        for token in tokens:
            end = len(known)
            for size in self._sizes:
                if size <= end:
                    ngram = tuple(known[end - size : end])
                    if self._first:
                        continuation.setdefault(ngram, end)
                    else:
                        continuation[ngram] = end
            known.append(token)

    def propose_text(self, text: NgramText, limit: int) -> list[int]:
        known = text.tokens
        for size in reversed(self._sizes):
            start = text.continuation.get(tuple(known[-size:])) if size <= len(known) else None
            if start is not None:
                return known[start : start + limit]
        return []
