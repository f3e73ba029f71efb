"""Training of a head on a frozen target: losses, the training-time test, a run that can be stopped and gone on with.

EAGLE-1 (arXiv 2401.15077, section 4.2): smooth L1 on the next hidden state, and cross-entropy against the target's law.
EAGLE-3 (arXiv 2503.01840): cross-entropy alone, over several passes in which the head reads its own output, each with
0.8 times the weight of the one before. Not here: where texts come from (`paceline.eagle.corpus`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.eagle.corpus import ROWS, Corpus, Texts
from paceline.eagle.network import Past, TrainableHead
from paceline.training.frozen_model import products
from paceline.training.state import RunState, check_loss

Report = Callable[[int, int, float], None]
"""(steps done, steps in all, running loss)"""

Measure = Callable[[TrainableHead], list[float]]
"""Shares of places where chains of 1, 2, ... drafts are all right."""

_LOGGED = 20  # steps from one line of the log to the next
_MEASURES = 10  # of a run, evenly


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """How a head is trained.

    tokens          in all, repeats of a text counted again
    passes          of the training-time test; 1 = only on the target's own features
    decay           weight of a pass, in terms of the one before
    feature_weight  of the feature loss (version 1 only)
    law_weight      of the cross-entropy
    rate            largest learning rate; it rises over the first steps and falls along a cosine
    rows            texts in a step; a divisor of `ROWS`, so that every text has its turn
    precision       of products of matrices, "f32" or "bf16"
    minutes         stop after so long, to go on later; None = to the end

    Raises:
        ConfigurationError: a number is out of range.
    """

    tokens: int
    passes: int = 7
    decay: float = 0.8
    feature_weight: float = 1.0
    law_weight: float = 0.1
    rate: float = 2e-3
    rows: int = 8
    precision: str = "f32"
    minutes: float | None = None

    def __post_init__(self) -> None:
        products(self.precision)
        if min(self.tokens, self.passes, self.rows) < 1 or not 0 < self.rate < math.inf or not 0 < self.decay <= 1:
            raise ConfigurationError("tokens, passes and rows must be positive, rate above 0 and decay in (0, 1]")
        if not (0 <= self.feature_weight < math.inf and 0 <= self.law_weight < math.inf):
            raise ConfigurationError("feature_weight and law_weight must be 0 or more")
        if self.minutes is not None and not self.minutes >= 0:
            raise ConfigurationError(f"minutes={self.minutes} is no time; give 0 or more, or None to train to the end")
        if ROWS % self.rows:
            raise ConfigurationError(f"rows={self.rows} leaves texts out: give a divisor of {ROWS}")

    def lasting(self) -> dict[str, object]:
        """What must not change when a run is taken up again."""
        return {name: value for name, value in asdict(self).items() if name != "minutes"}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which ids a head drafts: ids [U] int64, ascending; all of the target's for version 1."""

    ids: Tensor
    size: int

    @classmethod
    def frequent(cls, counts: Tensor, keep: int) -> Vocabulary:
        """The ``keep`` most frequent ids, the lower one of equals. counts [V]"""
        order = torch.argsort(counts, descending=True, stable=True)
        return cls(order[:keep].sort().values, len(counts))

    @property
    def offsets(self) -> Tensor:
        """d2t [U] int64: the target's id of draft id i is i + d2t[i]."""
        return self.ids - torch.arange(len(self.ids))

    @property
    def mask(self) -> Tensor:
        """t2d [V] bool: whether the head can draft that id."""
        return torch.zeros(self.size, dtype=torch.bool).index_fill(0, self.ids, True)


def muon(matrices: Sequence[Tensor], rate: float) -> torch.optim.Muon:
    """Muon (Jordan et al., 2024), its updates sized like AdamW's at the same rate (Liu et al., arXiv 2502.16982)."""
    return torch.optim.Muon(matrices, rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")


class Trainer:
    """One run. ``folder/state.pt`` is its state; ``folder/log.jsonl`` has the running loss and what ``measure`` finds.

    Raises:
        ConfigurationError: the folder holds the state of a run with another head, target, other data or options.
    """

    def __init__(
        self,
        network: TrainableHead,
        corpus: Corpus,
        options: TrainingOptions,
        *,
        head: Tensor,
        vocabulary: Vocabulary,
        folder: Path,
        measure: Measure | None = None,
    ) -> None:
        self.network, self._corpus, self._options, self._folder = network, corpus, options, folder
        self._measure = measure
        self._head, self._vocabulary = head, vocabulary
        named = list(network.named_parameters())
        matrices = [p for n, p in named if p.dim() == 2 and not n.startswith("lm_head")]
        others = [p for n, p in named if not (p.dim() == 2 and not n.startswith("lm_head"))]
        self._optimizers = [
            muon(matrices, options.rate),
            torch.optim.AdamW(others, options.rate, betas=(0.9, 0.98)),
        ]
        self._per_batch = ROWS // options.rows
        self.steps = math.ceil(options.tokens / (options.rows * corpus.length))
        self.done, self.loss = 0, math.nan
        with atomic_write(folder):
            folder.mkdir(parents=True, exist_ok=True)
        facts = {
            **options.lasting(),
            **asdict(network.config),
            "corpus": corpus.key,
            "drafted ids": hashlib.sha256(vocabulary.ids.numpy().tobytes()).hexdigest()[:16],
        }
        self._kept = RunState(folder / "state.pt", facts, self._state)
        self._restore()

    def run(self, report: Report) -> bool:
        """Train to the end, or until the minutes are over (at least one step); whether it is the end."""
        began, minutes = perf_counter(), self._options.minutes
        texts: Texts | None = None
        with self._kept.saving():
            while self.done < self.steps:
                number, part = divmod(self.done, self._per_batch)
                if texts is None or not part:
                    texts = self._corpus.batch(number)
                self._step(_part(texts, part, self._options.rows))
                report(self.done, self.steps, self.loss)
                if self.done % _LOGGED == 0 or self.done == self.steps:
                    self._log()
                if minutes is not None and perf_counter() - began > 60 * minutes:
                    break
        return self.done >= self.steps

    def _step(self, texts: Texts) -> None:
        with products(self._options.precision):
            loss = objective(self.network, texts, self._options, head=self._head, vocabulary=self._vocabulary)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        scale = min(1.0, (self.done + 1) / 20) * (0.02 + 0.49 * (1 + math.cos(math.pi * self.done / self.steps)))
        value = float(loss.detach())
        check_loss(value, self.done)
        with self._kept.changing():
            for optimizer in self._optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = self._options.rate * scale
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.done += 1
            self.loss = value if math.isnan(self.loss) else 0.95 * self.loss + 0.05 * value

    def _log(self) -> None:
        row: dict[str, object] = {"step": self.done, "of": self.steps, "loss": round(self.loss, 4)}
        every = max(_LOGGED, self.steps // _MEASURES // _LOGGED * _LOGGED)
        if self._measure is not None and (self.done % every == 0 or self.done == self.steps):
            row["greedy chains"] = [round(share, 4) for share in self._measure(self.network)]
        log = self._folder / "log.jsonl"
        with atomic_write(log), log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _state(self) -> dict[str, object]:
        return {
            "done": self.done,
            "loss": self.loss,
            "network": self.network.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
        }

    def _restore(self) -> None:
        state = self._kept.restore()
        if state is None:
            return
        self.done, self.loss = state["done"], state["loss"]
        self.network.load_state_dict(state["network"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)


def objective(
    network: TrainableHead, texts: Texts, options: TrainingOptions, *, head: Tensor, vocabulary: Vocabulary
) -> Tensor:
    """The loss of a few texts, a scalar. ``head`` [V, H] is the target's output layer."""
    last = texts.last.float()
    law, inside = target_law(last, head, vocabulary)
    first, second, total = options.feature_weight, options.law_weight, last.new_zeros(())
    if network.config.version == 3:
        first, second = 0.0, 1.0
    for index, (hidden, ahead) in enumerate(passes(network, texts, options.passes)):
        logits = network.logits(hidden).float()
        weights = inside[:, ahead:].float()
        surprise = -(law[:, ahead:] * F.log_softmax(logits, -1)).sum(-1)
        loss = second * (surprise * weights).sum() / weights.sum().clamp(min=1)
        if first:
            loss = loss + first * F.smooth_l1_loss(hidden.float(), last[:, ahead:])
        total = total + options.decay**index * loss
    return total


def passes(network: TrainableHead, texts: Texts, count: int) -> list[tuple[Tensor, int]]:
    """The training-time test. For every pass: hidden [b, S - a, H] and how far ahead, a, of it its target's state lies.

    Row i of pass j has read the target's features up to place i and the tokens up to i + 1 + j, and predicts the token
    that the target's state at place i + a, a = 1 + j, predicts.
    """
    past: Past = []
    size = texts.tokens.shape[1]
    features = texts.last if network.config.version == 1 else texts.streams
    hidden = network.fuse(features.float())
    found = []
    for index in range(min(count, size - 1)):
        hidden = network(texts.tokens.roll(-1 - index, 1), hidden, past)
        found.append((hidden[:, : size - 1 - index], 1 + index))
    return found


@torch.no_grad()
def target_law(last: Tensor, head: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """The target's law over the drafted ids [b, S, U], and whether its best id is one of them [b, S]."""
    logits = F.linear(last, head).float()
    if len(vocabulary.ids) == vocabulary.size:
        return logits.softmax(-1), torch.ones(last.shape[:2], dtype=torch.bool)
    return logits[..., vocabulary.ids].softmax(-1), vocabulary.mask[logits.argmax(-1)]


@torch.no_grad()
def acceptance(
    network: TrainableHead, texts: Texts, *, depth: int, head: Tensor, vocabulary: Vocabulary, skip: int
) -> list[float]:
    """Share of places from ``skip`` on where drafts 1, 2, ... are all the target's greedy choice.

    On texts that the target wrote greedily this is the acceptance of greedy chains, each place being a beginning.
    """
    agreed: Tensor | None = None
    found = []
    for part in range(0, len(texts.tokens), 8):
        found.append(_agreements(network, _part(texts, part // 8, 8), depth, head=head, vocabulary=vocabulary))
    agreed = torch.cat(found)[:, :, skip:]
    return [float(x) for x in agreed.double().mean((0, 2))]


def _agreements(network: TrainableHead, texts: Texts, count: int, *, head: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[b, passes, places] bool: whether drafts up to this pass were all right."""
    choices = F.linear(texts.last.float(), head).argmax(-1)
    size = texts.tokens.shape[1] - count
    standing = torch.ones(len(texts.tokens), size, dtype=torch.bool)
    rows = []
    for hidden, ahead in passes(network, texts, count):
        drafts = vocabulary.ids[network.logits(hidden).argmax(-1)]
        standing = standing & (drafts[:, :size] == choices[:, ahead : ahead + size])
        rows.append(standing)
    return torch.stack(rows, 1)


def _part(texts: Texts, index: int, rows: int) -> Texts:
    at = slice(index * rows, (index + 1) * rows)
    return Texts(texts.tokens[at], texts.last[at], texts.streams[at])
