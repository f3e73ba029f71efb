"""Training of Medusa heads on a frozen target's states (Medusa-1 of Cai et al., arXiv 2401.10774).

Head i reads the state at place t of a text and learns the token at t + i + 2. Its label is, by default, not that token
but the target's whole distribution for it (distillation), which says more for every place. Heads share nothing, so
their losses are simply added. Only the heads change. A run can be interrupted at any time and goes on from its last
saved state. Not here: what the states come from (`paceline.medusa.corpus`), measuring (`paceline.medusa.accuracy`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.medusa.corpus import Windows
from paceline.medusa.network import Heads
from paceline.training.frozen_model import products
from paceline.training.state import RunState, check_loss

LABELS = ("target", "text")
_WARM = 0.02  # share of the steps in which the rate rises

Progress = Callable[[int, int, float], None]
"""(steps done, steps in all, loss)"""


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How heads are trained.

    epochs     passes over the kept windows
    rows       windows in a step
    rate       largest learning rate of Adam; it rises for a short while and falls along a cosine to a tenth
    labels     "target": the target's distribution; "text": the tokens that came
    precision  of products of matrices, "f32" or "bf16"
    minutes    stop after so long, to go on later; None: run to the end
    seed       of the order of the windows

    Raises:
        ConfigurationError: a value is out of range.
    """

    epochs: float = 1.0
    rows: int = 8
    rate: float = 1e-3
    labels: str = "target"
    precision: str = "f32"
    minutes: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        products(self.precision)
        if self.labels not in LABELS:
            raise ConfigurationError(f"labels={self.labels!r} is unknown; use one of {', '.join(LABELS)}")
        if not (0 < self.epochs < math.inf and 0 < self.rate < math.inf) or self.rows < 1:
            raise ConfigurationError("epochs, rows and rate of a training must be positive")
        if self.minutes is not None and not self.minutes >= 0:
            raise ConfigurationError(f"minutes={self.minutes} is no time; give 0 or more, or None to train to the end")

    def lasting(self) -> dict[str, object]:
        """What must not change when a run is taken up again."""
        return {name: value for name, value in asdict(self).items() if name != "minutes"}


class Trainer:
    """Trains heads in place.

    output  [V, H], the target's output layer
    folder  holds the state of the run and its log
    data    tells these windows from others

    Raises:
        ConfigurationError: the windows are too short, or the folder is of a run with other heads, windows or options.
    """

    def __init__(
        self,
        heads: Heads,
        windows: Sequence[Windows],
        options: TrainingOptions,
        *,
        output: Tensor,
        folder: Path,
        data: str,
    ) -> None:
        self.heads, self._windows, self._options, self._folder = heads, windows, options, folder
        self._output = output.detach()
        shortest = min((w.tokens.shape[1] for w in windows), default=0)
        if shortest < heads.config.heads + 2:
            raise ConfigurationError(
                f"windows of {shortest} tokens are too short for {heads.config.heads} heads; keep longer ones"
            )
        for parameter in heads.own().values():
            parameter.requires_grad_(True)
        self._optimiser = torch.optim.AdamW(heads.own().values(), lr=options.rate, betas=(0.9, 0.99), weight_decay=0.0)
        total = sum(math.ceil(len(w) / options.rows) for w in windows)
        self.steps = max(1, math.ceil(total * options.epochs))
        self.step = 0
        sizes = {name: value for name, value in asdict(heads.config).items() if name != "base"}
        facts = {"data": data, **sizes, **options.lasting(), "steps": self.steps}
        self._kept = RunState(folder / "state.pt", facts, self._state)
        self._resume()

    def run(self, progress: Progress) -> bool:
        """Train until the end or until the minutes are over; whether it came to the end."""
        begin = perf_counter()
        with self._kept.saving():
            for tokens, states in self._batches():
                if self._options.minutes is not None and perf_counter() - begin > 60 * self._options.minutes:
                    break
                losses = self._learn(tokens, states)
                mean = sum(losses) / len(losses)
                progress(self.step, self.steps, mean)
                if self.step % 20 == 0 or self.step == self.steps:
                    self._log(losses)
        return self.step == self.steps

    def _learn(self, tokens: Tensor, states: Tensor) -> list[float]:
        """One step; the loss of every head. tokens [n, L], states [n, L, H]."""
        for group in self._optimiser.param_groups:
            group["lr"] = self._options.rate * _schedule(self.step, self.steps)
        found, linear, precision = [], torch.nn.functional.linear, self._options.precision
        with torch.no_grad(), products(precision):
            wanted = self._options.labels == "target"
            law = torch.softmax(linear(states, self._output).float(), -1) if wanted else None
        for index in range(self.heads.config.heads):
            ahead = index + 1  # state t has read token t and predicts t + 1; state t + ahead predicts this head's token
            x = states[:, : -ahead - 1].flatten(0, 1)
            with products(precision):
                logits = self.heads.project(index, self.heads.heads[index](x, linear), linear).float()
            if law is None:
                loss = torch.nn.functional.cross_entropy(logits, tokens[:, ahead + 1 :].flatten())
            else:
                loss = torch.nn.functional.cross_entropy(logits, law[:, ahead:-1].flatten(0, 1))
            loss.backward()
            found.append(float(loss.detach()))
            check_loss(found[-1], self.step)
        torch.nn.utils.clip_grad_norm_(self.heads.own().values(), 1.0)
        with self._kept.changing():
            self._optimiser.step()
            self._optimiser.zero_grad(set_to_none=True)
            self.step += 1
        return found

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """From the step that the run is at; the order depends on the seed and the pass alone."""
        places = [(f, a) for f, w in enumerate(self._windows) for a in range(0, len(w), self._options.rows)]
        step = 0
        while True:
            order = torch.randperm(len(places), generator=torch.Generator().manual_seed(self._options.seed + step))
            for index in order.tolist():
                if step == self.steps:
                    return
                step += 1
                if step > self.step:
                    file, at = places[index]
                    part = slice(at, at + self._options.rows)
                    yield self._windows[file].tokens[part], self._windows[file].states[part].float()

    def _log(self, losses: list[float]) -> None:
        row = {"step": self.step, "of": self.steps, "loss": [round(x, 4) for x in losses]}
        log = self._folder / "log.jsonl"
        with atomic_write(log), log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _state(self) -> dict[str, object]:
        weights = {name: p.detach() for name, p in self.heads.own().items()}
        return {"step": self.step, "weights": weights, "optimiser": self._optimiser.state_dict()}

    def _resume(self) -> None:
        state = self._kept.restore()
        if state is not None:
            self.heads.fill(state["weights"])
            self._optimiser.load_state_dict(state["optimiser"])
            self.step = state["step"]


def _schedule(step: int, steps: int) -> float:
    warm = max(1, round(_WARM * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))
