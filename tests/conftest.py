"""What every test shares: a cache of its own for compiled things, and small checkpoints with decoders over them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from transformers.utils import logging

from tests.decoder.tiny import Workshop
from tests.simulation import check_nothing_left, simulated


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled graphs of a test run stay in its own folder, unless PACELINE_CACHE names one to be used again."""
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("PACELINE_CACHE"):
            patch.setenv("PACELINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        logging.disable_progress_bar()
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # small products gain nothing from a second thread and wait long for it when busy
        yield
        torch.set_num_threads(before)


@pytest.fixture(scope="session")
def workshop(compile_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Decoders over small checkpoints, each made once for all tests."""
    return Workshop(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def cluster(compile_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Ray, started once for all tests that need it."""
    with simulated(str(tmp_path_factory.mktemp("locks"))) as made:
        yield made


@pytest.fixture
def nothing_left(cluster: object) -> Iterator[None]:
    """After the test no actor of ours and no core is in use."""
    yield
    check_nothing_left()
