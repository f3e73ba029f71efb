"""Shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Whatever a test enters here is left at its end."""
    with ExitStack() as made:
        yield made
