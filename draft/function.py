"""A plain function from the tokens so far to the tokens that may follow, as a drafter.

The quickest way to try an idea: ``SpeculativeGenerator(my_function, target, k=4)``. The function may return any
ids, or None for nothing: a chain ends at the first id that is out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from paceline.core.errors import ConfigurationError
from paceline.draft.base import TextDrafter

Function = Callable[[list[int]], Iterable[int] | None]


class FunctionDrafter(TextDrafter[list[int]]):
    """Calls ``function(tokens of the text) -> tokens`` for every text and round, to draft up to ``k`` tokens.

    Raises:
        ConfigurationError: the function cannot be called, or ``k`` is negative.
    """

    def __init__(self, function: Function, k: int) -> None:
        if not callable(function):
            raise ConfigurationError(
                f"FunctionDrafter takes a function from ids to ids, not a {type(function).__name__}"
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
                f"the drafting function returned {answer!r:.80}; it must return token ids, or None for nothing"
            ) from error
        illegal = next((i for i, token in enumerate(tokens) if not 0 <= token < 1 << 31), len(tokens))
        return tokens[:illegal]
