"""A predicted output as a source of drafts: what the asker expects the answer to be, mostly a text with some changes.

It is followed from its beginning, over tokens that differ, and found again behind a longer change by the longest end
of the output that occurs in it. It is drafted from and never decided by. Not here: who drafts where it has nothing to
say (`paceline.draft.row_drafting`).
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.draft.copy_tracker import CopyTracker
from paceline.draft.suffix_index import SuffixAutomaton

_BORDER = -2  # behind the prediction; no token is negative, so nothing matches across it
_TRUST = 8  # tokens that the beginning of an answer counts as repeated: the asker says that it is the prediction's
_MIN_MATCH = 2  # tokens that the output must share with a place to go on from there


class PredictedText:
    """The output of one request beside its prediction. Ids that no tokenizer gave are of no harm: none of them is
    accepted.
    """

    def __init__(self, prediction: Sequence[int]) -> None:
        self._automaton = SuffixAutomaton()
        for token in (*(max(0, token) for token in prediction), _BORDER):
            self._automaton.append(token)
        self._copies = CopyTracker()
        self._copies.begin(self._automaton.tokens, 0, _TRUST)
        self._state = self._length = 0

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens were added to the output."""
        self._copies.follow(tokens)
        for token in tokens:
            self._state, self._length = self._automaton.follow(self._state, self._length, token)
        if self._length > self._copies.run:
            self._copies.begin(self._automaton.tokens, self._automaton.end_of(self._state), self._length)

    def ahead(self, limit: int) -> list[int]:
        """What the prediction says will follow, at most ``limit`` tokens; [] where the output has parted from it."""
        if self._copies.run < _MIN_MATCH:
            return []
        tokens = self._copies.ahead(limit)
        return tokens[: tokens.index(_BORDER)] if _BORDER in tokens else tokens
