"""Drafters that need only the tokens: their base class, and the two simplest.

Write `TextDrafter.propose_text`, and, if scanning the whole sequence in every round costs too much, keep an index of it
with `TextDrafter.new_text` and `TextDrafter.extend`. The quickest way to try an idea is a plain function:
``SpeculativeGenerator(my_function, target, k=4)``.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from paceline.core.errors import ConfigurationError
from paceline.core.protocols import Drafter
from paceline.core.types import Commit, DraftShape, Proposal, RoundLimits, SamplingTensors

if TYPE_CHECKING:
    from torch import Tensor


Text = TypeVar("Text")
"""State of a drafter for one sequence: a ``list[int]`` of its tokens, unless `TextDrafter.new_text` makes another."""


class BatchTextDrafter(Drafter, Generic[Text]):
    """Base of `TextDrafter` without a proposal per sequence: `chains` is written for all slots at once."""

    def __init__(self, k: int) -> None:
        self.draft_shape = DraftShape.chain(k)
        self._texts: dict[int, Text] = {}

    def new_text(self, prompt: Sequence[int]) -> Text:
        """Return the data to keep of a new sequence. Default: a list of its tokens."""
        return list(prompt)  # type: ignore[return-value]  # Text is list[int] wherever this is not overridden

    def extend(self, text: Text, tokens: Sequence[int]) -> None:
        """Append committed tokens. Default: extend the list."""
        text += tokens  # type: ignore[operator]  # as in `new_text`

    def finish(self, text: Text) -> None:
        """Finish a sequence whose request is done. Default: do nothing."""

    def shortened(self, length: int) -> Self:
        """Return a copy with shorter proposals, which shares the sequences."""
        shorter = copy.copy(self)
        shorter.draft_shape = DraftShape.chain(length)
        return shorter

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        self._texts[slot] = self.new_text(prompt)

    def finish_request(self, slot: int) -> None:
        if slot in self._texts:
            self.finish(self._texts.pop(slot))

    @property
    def movable(self) -> bool:
        """True; override it if other data is stored by slot."""
        return True

    def move_request(self, slot: int, to: int, rows: int) -> None:
        if slot in self._texts:
            self._texts[to] = self._texts.pop(slot)

    def update(self, commit: Commit) -> None:
        for slot, (tokens, count) in enumerate(zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)):
            if slot in self._texts:
                self.extend(self._texts[slot], tokens[:count])

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        return Proposal.chains(self.chains(commit, sampling, limits), self.draft_lengths)

    @abstractmethod
    def chains(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> list[list[int]]:
        """Return the drafted continuation of every slot's sequence; no row is longer than ``k``."""


class TextDrafter(BatchTextDrafter[Text]):
    """Drafts chains of up to ``k`` tokens from the tokens only. A `paceline.core.protocols.Drafter`."""

    @abstractmethod
    def propose_text(self, text: Text, limit: int) -> Sequence[int]:
        """Return the tokens that may follow a sequence, at most ``limit`` of them (1 or more); empty = nothing to
        propose.

        Called once per round for every sequence; ``text`` must not be changed.
        """

    def chains(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> list[list[int]]:
        k, rows = self.draft_shape.num_draft_tokens, []
        for slot, limit in enumerate(limits.max_accept):
            most = min(k, limit)
            proposes = most > 0 and slot in self._texts
            rows.append(list(self.propose_text(self._texts[slot], most))[:most] if proposes else [])
        return rows


class NoDrafter(Drafter):
    """Proposes nothing, ever."""

    draft_shape = DraftShape.chain(0)
    movable = True

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """Do nothing."""

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        import torch

        return Proposal(torch.empty(len(commit.tokens), 0, dtype=torch.int32))


Function = Callable[[list[int]], Iterable[int] | None]


class FunctionDrafter(TextDrafter[list[int]]):
    """Calls ``function(tokens of the text) -> tokens`` for every sequence and round, to draft up to ``k`` tokens.

    The function may return any ids, or None for nothing: a chain ends at the first id that is out of range.
    ConfigurationError: it cannot be called, or ``k`` is negative.
    """

    def __init__(self, function: Function, k: int) -> None:
        if not callable(function):
            raise ConfigurationError(
                f"draft: expected a function from ids to ids, got a {type(function).__name__}; pass one to "
                "FunctionDrafter"
            )
        super().__init__(k)
        self._function = function

    def propose_text(self, text: list[int], limit: int) -> list[int]:
        answer = self._function(list(text))
        if answer is None:
            return []
        try:
            tokens = [int(token) for token in islice(answer, limit)]
        except (TypeError, ValueError, OverflowError) as error:
            raise ConfigurationError(
                f"draft: expected token ids or None from the drafting function, got {answer!r:.80}; change what it "
                "returns"
            ) from error
        illegal = next((i for i, token in enumerate(tokens) if not 0 <= token < 1 << 31), len(tokens))
        return tokens[:illegal]
