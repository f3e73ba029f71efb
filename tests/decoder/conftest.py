"""Shared by the tests of native kernels and of weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.decoder.native.ops import Native
from tests.decoder.checkpoints import State, small_model


@pytest.fixture(scope="session")
def native(compile_cache: None) -> Native:
    return Native()


@pytest.fixture
def restored_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def state(tmp_path: Path) -> State:
    return small_model(tmp_path)
