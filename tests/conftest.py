"""Shared by all tests: a separate cache for compiled things, and small checkpoints with decoders over them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging

from paceline.decoder import environment
from tests import order
from tests.decoder.tiny import Workshop, fresh
from tests.simulation import check_nothing_left, simulated

settings.register_profile("any machine", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=2000)  # pytest --hypothesis-profile=thorough
settings.load_profile("any machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first."""
    order.arrange(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """Distribute files over processes in the order of the tests; files that use Ray run in one process."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return order.scope_of(nodeid)

    config.option.loadscopereorder = False  # it would put files with many tests first
    return ByFile(config, log)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name files that became long, so that the order does not grow stale unseen."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    for file, seconds in order.unnamed(reports).items():
        terminalreporter.write_line(f"{file} took {seconds:.0f} s: name it in tests/order.py, so that it starts early")


@pytest.fixture(scope="session", autouse=True)
def compile_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled graphs of a test run stay in its own folder, unless PACELINE_CACHE names one to be used again.

    Native libraries are those of the user's cache: their names say what they were built from.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not os.environ.get("PACELINE_CACHE"):
            cache, libraries = _common(tmp_path_factory) / "compiled", environment.cache_root() / "native"
            cache.mkdir(exist_ok=True)
            with suppress(OSError):  # another process has made the link; or that cache cannot be written
                libraries.mkdir(parents=True, exist_ok=True)
                (cache / "native").symlink_to(libraries)
            patch.setenv("PACELINE_CACHE", str(cache))
        logging.disable_progress_bar()
        # A fifth of the time of tracing a step. PyTorch 2.9, which torch_xla needs, does not have it.
        patch.setattr(torch.fx.config, "do_not_emit_stack_traces", True, raising=False)
        before = torch.get_num_threads()
        torch.set_num_threads(1)  # small products gain nothing from a second thread and wait long for it when busy
        yield
        torch.set_num_threads(before)


def _common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run: that of all processes, where there are several."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if os.environ.get("PYTEST_XDIST_WORKER") else own


@pytest.fixture(scope="session", autouse=True)
def fair_share() -> Iterator[None]:
    """Ray's workers get as much of a busy machine as the tests and compilers, and Serve waits longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")  # Ray's own is 15, a thirtieth of what others get
        patch.setenv("RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD", "0")  # as in clusters that `paceline serve` starts
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")  # Serve's own is 5
        yield


@pytest.fixture(autouse=True)
def drawn_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever chooses by measured time gets times drawn from a fixed seed: no test depends on the machine's load."""
    dice, now = random.Random(0), [0.0]

    def perf_counter() -> float:
        now[0] += dice.uniform(0.0005, 0.0015)
        return now[0]

    for module in ("paceline.draft.choice", "paceline.engine.rounds"):
        monkeypatch.setattr(f"{module}.perf_counter", perf_counter)


@pytest.fixture(scope="session")
def workshop(compile_cache: None, tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Decoders over small checkpoints, each made once for all tests."""
    return Workshop(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def two_ranks(workshop: Workshop) -> Iterator[None]:
    """A model on two ranks stays loaded, and so do their processes: each takes seconds to start."""
    kept = fresh(workshop.checkpoint(), backend="eager", tp_degree=2)
    yield
    kept.close()


@pytest.fixture(scope="session")
def cluster(compile_cache: None, fair_share: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """Ray, started once for all tests that need it."""
    with simulated(str(tmp_path_factory.mktemp("locks"))) as made:
        yield made


@pytest.fixture
def nothing_left(cluster: object) -> Iterator[None]:
    """After the test no actor of ours and no core is in use."""
    yield
    check_nothing_left()
