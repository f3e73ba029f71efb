"""The state of a long run, in one file, so that the run can be stopped at any time and gone on with.

It is written whole or not at all, now and then and when the run ends for whatever reason, and it says what the run
depends on: a run of anything else is refused and not silently continued. Not here: what runs.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import save_pickle

_SECONDS = 30.0  # between two saves
_SHARE = 0.05  # of the time may go into saving, where a state is large


def check_loss(loss: float, step: int) -> None:
    """Raise ConfigurationError if a loss is no number any more: a model made of NaN is no result."""
    if not math.isfinite(loss):
        raise ConfigurationError(
            f"the loss of step {step} is {loss}: the run has diverged; begin again with a lower rate, in another work "
            "folder"
        )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ctrl-C and requests to end are heard behind it: a change takes a good part of a step, and would be lost."""
    if threading.current_thread() is not threading.main_thread():  # where Python hears signals
        yield
        return
    heard: list[int] = []
    before = {number: signal.getsignal(number) or signal.SIG_DFL for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        signal.raise_signal(heard[0])


class RunState:
    """The file of a run.

    facts  what must be the same when the run is taken up again: names and plain values
    state  gives what is to be kept: plain values and tensors
    """

    def __init__(self, path: Path, facts: Mapping[str, object], state: Callable[[], dict[str, object]]) -> None:
        self._path, self._facts, self._state = path, dict(facts), state
        self._whole = True
        self._due = perf_counter() + _SECONDS

    def restore(self) -> dict[str, Any] | None:
        """What was kept, if anything was.

        Raises:
            ConfigurationError: it is of a run with other facts.
        """
        if not self._path.is_file():
            return None
        saved = torch.load(self._path, map_location="cpu", weights_only=True)
        before: dict[str, object] = saved["facts"]
        for name in [*self._facts, *(name for name in before if name not in self._facts)]:
            if before.get(name) != self._facts.get(name):
                raise ConfigurationError(
                    f"{self._path} is of a run with another {name} ({before.get(name)}, now {self._facts.get(name)}); "
                    "repeat that run's options and data to go on with it, or give another work folder"
                )
        state: dict[str, Any] = saved["state"]
        return state

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the run: saves at its end, after an error, Ctrl-C or a `SystemExit` too."""
        try:
            yield
        finally:
            if self._whole:
                self._save()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Around a change that must be kept whole: if it fails, what was saved before stands."""
        with _undisturbed():
            self._whole = False
            yield
            self._whole = True
        if perf_counter() > self._due:
            self._save()

    def _save(self) -> None:
        began = perf_counter()
        save_pickle(self._path, {"facts": self._facts, "state": self._state()})
        now = perf_counter()
        self._due = now + max(_SECONDS, (now - began) / _SHARE)
