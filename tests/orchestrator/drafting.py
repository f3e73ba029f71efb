"""Drafters with a known acceptance, for the tests of the loop; no tests."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Function = Callable[[list[int]], list[int]]


def oracle(texts: Sequence[Sequence[int]], length: int) -> Function:
    """Knows the whole texts."""

    def function(text: list[int]) -> list[int]:
        whole = next(t for t in texts if list(t[: len(text)]) == text)
        return list(whole[len(text) : len(text) + length])

    return function


def anti_oracle(texts: Sequence[Sequence[int]], length: int, *, vocab_size: int) -> Function:
    """Knows the texts, and always says something else."""
    knows = oracle(texts, length)
    return lambda text: [(token + 1) % vocab_size for token in knows(text)]


def coin(texts: Sequence[Sequence[int]], length: int, *, vocab_size: int, alpha: float, seed: int) -> Function:
    """Right with probability alpha at every place, independently."""
    knows, dice = oracle(texts, length), random.Random(seed)
    return lambda text: [t if dice.random() < alpha else (t + 1) % vocab_size for t in knows(text)]
