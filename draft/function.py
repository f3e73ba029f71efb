"""A plain function from the tokens so far to the tokens that may follow, as a drafter.

The quickest way to try an idea: ``SpeculativeGenerator(lift(my_function, 4), target)``. The function may return any
ids, or None for nothing: ids out of range and what goes past the length are cut.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.core.types import Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors

Function = Callable[[list[int]], Iterable[int] | None]


class FunctionDrafter:
    """Calls ``function(tokens of the text) -> tokens`` for every slot and round."""

    reads: FeatureSpec | None = None
    max_positions: int | None = None

    def __init__(self, function: Function, length: int) -> None:
        self._function, self.draft_shape = function, DraftShape.chain(length)
        self._texts: dict[int, list[int]] = {}

    def shortened(self, length: int) -> FunctionDrafter:
        """See `paceline.core.protocols.Shortens`."""
        made = copy.copy(self)
        made.draft_shape = DraftShape.chain(length)
        return made

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        self._texts[slot] = list(prompt)

    def finish_request(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def update(self, commit: Commit) -> None:
        for slot, (tokens, count) in enumerate(zip(commit.tokens.tolist(), commit.count.tolist(), strict=True)):
            if slot in self._texts:
                self._texts[slot] += tokens[:count]

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        return Proposal.chains(self.guess(bounds.max_accept.tolist()), (self.draft_shape.num_draft_tokens,))

    def guess(self, limits: Sequence[int]) -> list[list[int]]:
        """See `paceline.core.protocols.Guesses`."""
        rows, nodes = [], self.draft_shape.num_draft_tokens
        for slot, limit in enumerate(limits):
            wanted = slot in self._texts and limit > 0
            found = _ids(self._function(list(self._texts[slot])), nodes) if wanted else []
            bad = next((i for i, token in enumerate(found) if not 0 <= token < 1 << 31), len(found))
            rows.append(found[:bad])
        return rows


def lift(function: Function, length: int) -> FunctionDrafter:
    """A drafter of up to ``length`` tokens a round from a plain function.

    Raises:
        ConfigurationError: it cannot be called, or the length is negative.
    """
    _check(function)
    return FunctionDrafter(function, length)


def _ids(found: Iterable[int] | None, most: int) -> list[int]:
    if found is None:
        return []
    try:
        return [int(token) for token in islice(found, most)]
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"the drafting function returned {found!r:.80}; it must return token ids, or None for nothing"
        ) from error


def _check(function: object) -> None:
    if not callable(function):
        raise ConfigurationError(f"lift takes a function from ids to ids, not a {type(function).__name__}")
