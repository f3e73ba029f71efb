"""A call to a target, as its caller sees it: what each request has so far, and a stream that may be closed early.

Not here: who serves it and what happens when a target dies (`deployment`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass

import ray

from paceline.core.errors import ConfigurationError
from paceline.placement.cluster.roles import TokenDelta


@dataclass(slots=True)
class Call:
    """A call under way: what each request has so far."""

    prompts: list[list[int]]
    emitted: list[list[int]]
    ask: dict[str, object]
    open: list[int]
    deaths: int = 0
    unwanted: bool = False
    leave: Callable[[], object] | None = None

    def give_up(self) -> None:
        """From any thread: the target is told, if one is at it."""
        self.unwanted = True
        if self.leave is not None:
            with suppress(ray.exceptions.RayError):
                self.leave()


class Stream:
    """Pieces of a call, as they come. ``close`` may be called from any thread, while another waits for a piece."""

    def __init__(self, pieces: Generator[TokenDelta, None, None], call: Call) -> None:
        self._pieces, self._call = pieces, call

    def __iter__(self) -> Iterator[TokenDelta]:
        return self

    def __next__(self) -> TokenDelta:
        return next(self._pieces)

    def close(self) -> None:
        """Nobody wants the rest."""
        self._call.give_up()
        with suppress(ValueError):  # it runs in another thread, and ends there by itself
            self._pieces.close()

    def __del__(self) -> None:
        if self._call.open:
            self._call.give_up()


def seeded(ask: dict[str, object], count: int) -> dict[str, object]:
    """The same keywords with a seed for every request, so that a part of the call can be made again."""
    seed = ask.get("seed", 0)
    if isinstance(seed, int):
        return {**ask, "seed": [seed + row for row in range(count)]}
    if not isinstance(seed, list | tuple) or len(seed) != count:
        raise ConfigurationError(f"seed must be a number, or {count} of them for {count} prompts")
    return {**ask, "seed": list(seed)}
