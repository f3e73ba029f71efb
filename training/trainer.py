"""The loop of a training run: steps, learning rate, a log, and a state that the run resumes from.

A run can be interrupted at any time. `RunState` says what must be the same when it is resumed. Not here: what is
learned, which a subclass says (`paceline.medusa.train`, `paceline.eagle.train`).
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Generic, TypeVar

import torch
from torch import nn

from paceline.decoder.weights.atomic_write import atomic_write
from paceline.training.options import TrainingOptions
from paceline.training.state import RunState, check_loss

Batch = TypeVar("Batch")

Progress = Callable[[int, int, float], None]
"""(steps done, steps in all, loss)"""

LOG_STEPS = 20
"""Steps from one line of the log to the next."""


class Trainer(ABC, Generic[Batch]):
    """One run. ``folder/state.pt`` is its state, ``folder/log.jsonl`` its log.

    parameters  what learns, by name
    optimizers  of these, in a fixed order
    steps       in all
    key         what tells this run from others besides its options: heads, data

    Raises:
        ConfigurationError: the folder holds the state of a run with other options or another key.
    """

    def __init__(
        self,
        options: TrainingOptions,
        *,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Sequence[torch.optim.Optimizer],
        steps: int,
        folder: Path,
        key: Mapping[str, object],
    ) -> None:
        self.step, self.steps, self.loss = 0, steps, math.nan
        self._options, self._parameters, self._optimizers, self._folder = options, parameters, optimizers, folder
        with atomic_write(folder):
            folder.mkdir(parents=True, exist_ok=True)
        self._saved = RunState(folder / "state.pt", {**key, **options.resume_key()}, self._state)
        self._resume()

    @abstractmethod
    def batches(self) -> Iterator[Batch]:
        """Batches from the step that the run is at, one for every step that is left."""

    @abstractmethod
    def backward(self, batch: Batch) -> list[float]:
        """Add the gradients of a batch. Returns its losses; their mean is the loss of the step."""

    @abstractmethod
    def rate(self) -> float:
        """The learning rate of the next step, in terms of the largest one."""

    def log_row(self, losses: Sequence[float]) -> dict[str, object]:
        """What the log says of a step besides its number."""
        return {"loss": [round(loss, 4) for loss in losses]}

    def run(self, progress: Progress) -> bool:
        """Train to the end, or until the minutes are over (at least one step). Returns whether it is the end."""
        began, minutes = perf_counter(), self._options.max_minutes
        with self._saved.saving():
            for batch in self.batches():
                losses = self.backward(batch)
                for loss in losses:
                    check_loss(loss, self.step)
                torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
                self._update(sum(losses) / len(losses))
                progress(self.step, self.steps, self.loss)
                if self.step % LOG_STEPS == 0 or self.step == self.steps:
                    self._log(losses)
                if minutes is not None and perf_counter() - began > 60 * minutes:
                    break
        return self.step >= self.steps

    def _update(self, loss: float) -> None:
        rate = self._options.learning_rate * self.rate()
        with self._saved.changing():
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = rate
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.step += 1
            self.loss = loss if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * loss

    def _log(self, losses: Sequence[float]) -> None:
        row = {"step": self.step, "of": self.steps, **self.log_row(losses)}
        log = self._folder / "log.jsonl"
        with atomic_write(log), log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _state(self) -> dict[str, object]:
        return {
            "step": self.step,
            "loss": self.loss,
            "weights": {name: parameter.detach() for name, parameter in self._parameters.items()},
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    @torch.no_grad()
    def _resume(self) -> None:
        state = self._saved.restore()
        if state is None:
            return
        self.step, self.loss = state["step"], state["loss"]
        for name, parameter in self._parameters.items():
            parameter.copy_(state["weights"][name])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
