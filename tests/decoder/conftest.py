"""Shared by the tests of the native kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from paceline.decoder.native.ops import Native


@pytest.fixture(scope="session")
def native(compile_cache: None) -> Native:
    return Native()


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
