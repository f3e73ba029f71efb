"""The loop of a training run: steps, learning rate, a log, and a state from which an interrupted run resumes.
Subclasses define the loss.
"""

from __future__ import annotations

import json
import math
import re
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import atomic_write, save_pickle
from paceline.heads.features import Corpus
from paceline.heads.frozen_model import Texts, products
from paceline.heads.options import TEXTS_PER_FILE, DraftTraining, TrainingOptions

_SECONDS = 30.0  # between two saves
_SHARE = 0.05  # largest share of the time for saving a large state


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Defer Ctrl-C and SIGTERM to the end of the block: an update takes a large part of a step, and would be lost."""
    if threading.current_thread() is not threading.main_thread():  # Python delivers signals to the main thread
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


def rank() -> int:
    """Return the number of this process among those that train together (torchrun, accelerate)."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def ranks() -> int:
    """Return the number of processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def distributed(device: str) -> Iterator[None]:
    """Join the processes that torchrun or accelerate started, if there are any; "cuda" is then a GPU of this process's
    own.
    """
    if not (dist.is_available() and dist.is_torchelastic_launched()):
        yield
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _over_ranks(parameters: Iterable[nn.Parameter], losses: list[float], *, late: bool) -> tuple[list[float], bool]:
    """Average gradients and losses over all processes. Returns the losses, and whether one of them is late."""
    if ranks() == 1:
        return losses, late
    parameters = list(parameters)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= ranks()
    told = torch.tensor([*losses, float(late)], dtype=torch.float64, device=parameters[0].device)
    dist.all_reduce(told)
    return (told[:-1] / ranks()).tolist(), bool(told[-1] > 0)


class RunState:
    """State file of a run, written atomically at intervals and when the run ends for any reason.

    facts  what must be the same when the run resumes: names and plain values; a run with other facts is rejected
    state  returns the values to store: plain values and tensors
    """

    def __init__(self, path: Path, facts: Mapping[str, object], state: Callable[[], dict[str, object]]) -> None:
        self._path, self._facts, self._state = path, dict(facts), state
        self._whole = True
        self._due = perf_counter() + _SECONDS

    def restore(self) -> dict[str, Any] | None:
        if not self._path.is_file():
            return None
        saved = torch.load(self._path, map_location="cpu", weights_only=True)
        before: dict[str, object] = saved["facts"]
        for name in [*self._facts, *(name for name in before if name not in self._facts)]:
            if before.get(name) != self._facts.get(name):
                raise ConfigurationError(
                    f"{self._path}: expected a run with {name} {before.get(name)}, got {self._facts.get(name)}; "
                    "repeat that run's options and data to resume it, or give another work folder"
                )
        state: dict[str, Any] = saved["state"]
        return state

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of the run: saves at its end, also after an error, Ctrl-C or a `SystemExit`."""
        try:
            yield
        finally:
            if self._whole:
                self._save()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Context of an atomic update: if it fails, the previous save remains valid."""
        with _undisturbed():
            self._whole = False
            yield
            self._whole = True
        if perf_counter() > self._due:
            self._save()

    def _save(self) -> None:
        if rank():
            return
        began = perf_counter()
        save_pickle(self._path, {"facts": self._facts, "state": self._state()})
        now = perf_counter()
        self._due = now + max(_SECONDS, (now - began) / _SHARE)


Progress = Callable[[int, int, float], None]
"""(steps done, total steps, loss)"""

LOG_STEPS = 20
"""Steps between two lines of the log."""

_MEASURES = 10  # per run, evenly spaced
_TABLES = re.compile(r"(^|\.)lm_head|embed|codebook")  # tensors of a row for each id


class Trainer(ABC):
    """One run. ``folder/state.pt`` is its state, ``folder/log.jsonl`` its log.

    parameters  trained parameters by name
    optimizers  of the parameters, in a fixed order
    steps       total number
    key         identifies the run in addition to its options: heads, data

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
    def batches(self) -> Iterator[Texts]:
        """Yield batches from the current step on, one for every remaining step."""

    @abstractmethod
    def backward(self, batch: Texts) -> list[float]:
        """Add the gradients of a batch. Return its losses; their mean is the loss of the step."""

    @abstractmethod
    def rate(self) -> float:
        """Return the learning rate of the next step, relative to the largest one."""

    def log_row(self, losses: Sequence[float]) -> dict[str, object]:
        return {"loss": [round(loss, 4) for loss in losses]}

    def run(self, progress: Progress) -> bool:
        """Train to the end, or to the time limit (at least one step). Return whether training is complete."""
        began = perf_counter()
        with self._saved.saving():
            for batch in self.batches():
                losses = self.backward(batch)
                losses, late = _over_ranks(self._parameters.values(), losses, late=self._late(began))
                for loss in losses:
                    if not math.isfinite(loss):
                        raise ConfigurationError(
                            f"the training has diverged: the loss of step {self.step} is {loss}; start again with a "
                            "lower learning rate, in another work folder"
                        )
                torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
                self._update(sum(losses) / len(losses))
                progress(self.step, self.steps, self.loss)
                if self.step % LOG_STEPS == 0 or self.step == self.steps:
                    self._log(losses)
                if late:
                    break
        return self.step >= self.steps

    def _late(self, began: float) -> bool:
        minutes = self._options.max_minutes
        return minutes is not None and perf_counter() - began > 60 * minutes

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
        if rank():
            return
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


def optimizers(network: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Create Muon (Jordan et al., 2024) for matrices, its updates scaled to AdamW's at the same rate (Liu et al., arXiv
    2502.16982), and AdamW for the rest.
    """
    parameters = {name: p for name, p in network.named_parameters() if p.requires_grad}
    matrices = {name: p for name, p in parameters.items() if p.dim() == 2 and not _TABLES.search(name)}
    vectors = [p for name, p in parameters.items() if name not in matrices]
    muon = torch.optim.Muon(
        list(matrices.values()), rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(vectors, rate, betas=(0.9, 0.98))]


class CorpusTrainer(Trainer):
    """Trains a network on a corpus, its matrices with Muon and the rest with AdamW.

    measure  what is logged at intervals; None = nothing
    """

    def __init__(
        self,
        network: nn.Module,
        corpus: Corpus,
        options: DraftTraining,
        *,
        folder: Path,
        key: Mapping[str, object],
        measure: Callable[[], list[float]] | None = None,
    ) -> None:
        if options.batch_size % ranks():
            raise ConfigurationError(
                f"batch_size: expected a multiple of {ranks()}, the number of processes, got {options.batch_size}; "
                "correct it"
            )
        self._corpus, self._rows, self._measure = corpus, options.batch_size // ranks(), measure
        super().__init__(
            options,
            parameters={name: p for name, p in network.named_parameters() if p.requires_grad},
            optimizers=optimizers(network, options.learning_rate),
            steps=math.ceil(options.tokens / (options.batch_size * corpus.length)),
            folder=folder,
            key={**key, "corpus": corpus.key, "ranks": ranks()},
        )

    @abstractmethod
    def objective(self, batch: Texts) -> Tensor:
        """Return the loss of a batch, a scalar."""

    def rate(self) -> float:
        return min(1.0, (self.step + 1) / 20) * (0.02 + 0.49 * (1 + math.cos(math.pi * self.step / self.steps)))

    def batches(self) -> Iterator[Texts]:
        texts: Texts | None = None
        while self.step < self.steps:
            number, index = divmod(self.step, TEXTS_PER_FILE // self._rows)
            if texts is None or not index:
                texts = self._corpus.batch(number * ranks() + rank())
            yield texts.rows(index, self._rows)

    def backward(self, batch: Texts) -> list[float]:
        with products(self._options.precision, self._options.device):
            loss = self.objective(batch)
        loss.backward()
        return [float(loss.detach())]

    def log_row(self, losses: Sequence[float]) -> dict[str, object]:
        row: dict[str, object] = {"loss": round(self.loss, 4)}
        every = max(LOG_STEPS, self.steps // _MEASURES // LOG_STEPS * LOG_STEPS)
        if self._measure is not None and (self.step % every == 0 or self.step == self.steps):
            row["greedy chains"] = [round(share, 4) for share in self._measure()]
        return row
