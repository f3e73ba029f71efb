"""Reading a prompt in pieces, with a pause after each, in which others may work. Not here: what reads."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")


def finish(reading: Generator[None, None, Result]) -> Result:
    """What a reading comes to, without pauses."""
    while True:
        try:
            next(reading)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # a generator of that type returns it
