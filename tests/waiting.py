"""Waiting for what another thread or process does; no tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")


def until(holds: Callable[[], Value], seconds: float = 120, *, what: object = "", pause_s: float = 0.01) -> Value:
    """Return what the function returns as soon as that is true. ``what``: named if it never is; called if it can be."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(pause_s)
    return found
