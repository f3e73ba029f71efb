"""Waiting for what another thread, process or task does; no tests."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, TypeVar

Value = TypeVar("Value")
Given = ParamSpec("Given")


def until(holds: Callable[[], Value], seconds: float = 120, *, what: object = "", pause_s: float = 0.01) -> Value:
    """Return what the function returns as soon as that is true. ``what``: named if it never is; called if it can be."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(pause_s)
    return found


def in_loop(test: Callable[Given, Coroutine[Any, Any, None]]) -> Callable[Given, None]:
    """Run a test in an event loop, for a minute at most."""

    @functools.wraps(test)
    def run(*given: Given.args, **named: Given.kwargs) -> None:
        asyncio.run(asyncio.wait_for(test(*given, **named), 60))

    return run
