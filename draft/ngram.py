"""Prompt lookup: propose what followed the last tokens when they stood earlier in the text.

The longest match wins; among equals the most recent one, or the first (``prefer="first"``). Sources: A. Saxena,
"Prompt Lookup Decoding" (2023); the two preferences are those of llama.cpp and vLLM.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.core.types import Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors


class NgramIndex:
    """One text and, for every n-gram in it, where what follows begins."""

    def __init__(self, sizes: range, *, first: bool) -> None:
        self._sizes, self._first = sizes, first
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append to the text. An n-gram is entered when the token after it is known."""
        for token in tokens:
            end = len(self.tokens)
            for size in self._sizes:
                if size <= end:
                    gram = tuple(self.tokens[end - size : end])
                    if self._first:
                        self._after.setdefault(gram, end)
                    else:
                        self._after[gram] = end
            self.tokens.append(token)

    def lookup(self, length: int) -> list[int]:
        """Up to ``length`` tokens that followed the longest match."""
        for size in reversed(self._sizes):
            if size > len(self.tokens):
                continue
            at = self._after.get(tuple(self.tokens[-size:]))
            if at is not None:
                return self.tokens[at : at + length]
        return []


class NgramDrafter:
    """Drafts chains of ``length`` tokens from n-grams of ``shortest`` to ``longest`` tokens."""

    reads: FeatureSpec | None = None
    max_positions: int | None = None

    def __init__(
        self,
        length: int,
        *,
        longest: int = 3,
        shortest: int = 1,
        prefer: Literal["recent", "first"] = "recent",
    ) -> None:
        if not 1 <= shortest <= longest:
            raise ConfigurationError(
                f"n-grams of {shortest} to {longest} tokens make no sense; 1 <= shortest <= longest"
            )
        if prefer not in ("recent", "first"):
            raise ConfigurationError(f"prefer={prefer!r} is unknown; use 'recent' or 'first'")
        self.draft_shape = DraftShape.chain(length)
        self._sizes, self._first = range(shortest, longest + 1), prefer == "first"
        self._texts: dict[int, NgramIndex] = {}

    def shortened(self, length: int) -> NgramDrafter:
        """See `paceline.core.protocols.Shortens`."""
        made = copy.copy(self)
        made.draft_shape = DraftShape.chain(length)
        return made

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        self._texts[slot] = NgramIndex(self._sizes, first=self._first)
        self._texts[slot].extend(prompt)

    def finish_request(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def update(self, commit: Commit) -> None:
        for slot, (tokens, count) in enumerate(zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)):
            if slot in self._texts:
                self._texts[slot].extend(tokens[:count])

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        return Proposal.chains(self.guess(bounds.max_accept.tolist()), (self.draft_shape.num_draft_tokens,))

    def guess(self, limits: Sequence[int]) -> list[list[int]]:
        """See `paceline.core.protocols.Guesses`."""
        nodes = self.draft_shape.num_draft_tokens
        return [self._texts[s].lookup(nodes) if s in self._texts else [] for s in range(len(limits))]
