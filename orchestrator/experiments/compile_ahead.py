"""Compiles the graphs of an experiment's cells before the first of them is measured, in two processes.

A graph is traced and compiled on one core. So while this process makes the generators of the cells from the first one
on, which it needs anyway, another one makes those from the last one on and throws them away: their graphs are in the
cache that both share. It is started when something had to be compiled here, so there is none where the cache is full;
it loads the models once more, so there is none where memory is short; and it has ended before anything is measured.
What fails here fails again, and is told, when its cell is run.
"""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from threading import Thread
from time import monotonic
from types import TracebackType

from paceline.core.errors import PacelineError
from paceline.decoder import environment
from paceline.experiments.cells import Cell, checkpoint_bytes, model_paths
from paceline.experiments.config import ExperimentConfig
from paceline.experiments.measure import Bench
from paceline.experiments.prompts import Prompts
from paceline.placement.host.environment import beside_another

log = logging.getLogger("paceline")

Work = tuple[Cell, Prompts]

_FAILS = (PacelineError, RuntimeError, ValueError, ArithmeticError, LookupError)
_SHARE = 0.25  # of the memory that is free, which the models of another process may take


def compile_ahead(
    bench: Bench, config: ExperimentConfig, cells: Sequence[Work], *, report: Callable[[str], None], deadline: float
) -> None:
    """Make the generators of cells of one target, and with them all graphs of their rounds.

    report    is told which cell's are made
    deadline  of `time.monotonic`, behind which none is begun
    """
    left = deque(cells)
    with ExitStack() as stack:
        alone = config.backend != "inductor" or environment.cores() < 2
        while left and monotonic() <= deadline:
            cell, prompts = left.popleft()
            report(f"graphs of {cell.title()}")
            before = bench.compiled
            try:
                bench.generator(cell, prompts)
            except _FAILS:
                continue
            if not alone and bench.compiled > before and left:
                alone = True  # no second one
                if _fits(list(left)):
                    stack.enter_context(_Helper(config, left))


def _fits(cells: Sequence[Work]) -> bool:
    """Whether there is room for their models in another process."""
    paths = {path for cell, _ in cells for path in model_paths(cell)}
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return sum(map(checkpoint_bytes, paths)) < _SHARE * free


class _Helper:
    """The other process, and a thread that hands it the last cell of those that are left, one after the other."""

    def __init__(self, config: ExperimentConfig, left: deque[Work]) -> None:
        self._left, self._config = left, config
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=beside_another(),
        )  # fmt: skip
        self._thread = Thread(target=self._hand_out, name="compile-ahead")

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._left.clear()
            self._process.kill()
        self._thread.join()
        self._process.kill()  # it has nothing to put in order
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):  # of what was not sent yet to a process that had ended
                pipe.close()

    def _hand_out(self) -> None:
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        try:
            pickle.dump(self._config, asked)
            while self._left:
                pickle.dump(self._left.pop(), asked)
                asked.flush()
                if not answers.readline():
                    raise BrokenPipeError  # as where it ends before it is asked
        except IndexError:
            return  # the other thread took the last cell
        except OSError:
            if self._left:  # there is none where this process gives up
                log.warning("the process that compiled beside this one has ended; what it left is compiled here")


def serve() -> None:
    """What the other process does: make generators as they are asked for, until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is no answer
    asked = sys.stdin.buffer
    with Bench(pickle.load(asked)) as bench:
        while True:
            try:
                cell, prompts = pickle.load(asked)
            except EOFError:
                return
            try:
                bench.generator(cell, prompts)
            except _FAILS:
                answers.write("failed\n")
            else:
                answers.write("done\n")
            answers.flush()
