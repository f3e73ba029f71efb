"""A call to a target, as its caller sees it: what each request has so far, and a stream that may be closed early.

Not here: how it is served and what happens when a target dies (`deployment`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import ray

from paceline.placement.cluster.roles import GenerateRequest, TokenDelta


@dataclass(slots=True)
class Call:
    """A call under way: what each request has so far. ``params``: `paceline.engine.request.SamplingParams`."""

    prompts: tuple[tuple[int, ...], ...]
    params: object
    emitted: list[list[int]]
    open: list[int]
    deaths: int = 0
    unwanted: bool = False
    abort: Callable[[], object] | None = None

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], params: object) -> Call:
        """A call that has not begun."""
        ids = tuple(tuple(prompt) for prompt in prompts)
        return cls(ids, params, [[] for _ in ids], list(range(len(ids))))

    def request(self, ticket: str) -> GenerateRequest:
        """What a target is asked for: all that is not finished."""
        return GenerateRequest(ticket, self.prompts, self.params, tuple(map(tuple, self.emitted)), tuple(self.open))

    def give_up(self) -> None:
        """From any thread: abort the request, if a target is serving it."""
        self.unwanted = True
        if self.abort is not None:
            with suppress(ray.exceptions.RayError):
                self.abort()


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
