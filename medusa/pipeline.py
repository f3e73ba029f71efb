"""From a target and a stream of tokens to a folder with trained and measured heads.

Each stage leaves files behind and is passed over when they are there: states of the target in a folder of ``work`` that
is named by the target, the plan and the data, the training in ``work/state.pt``. Not here: reading text files, showing
progress.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.medusa import accuracy, checkpoint, corpus
from paceline.medusa.accuracy import Accuracy
from paceline.medusa.config import MedusaConfig
from paceline.medusa.corpus import FrozenTarget, Report
from paceline.medusa.network import fresh
from paceline.medusa.training import Trainer, TrainingOptions


@dataclass(frozen=True, slots=True)
class Plan:
    """What heads are trained on.

    tokens        of the data, as they are
    generated     tokens of the target's own continuations of the data (self-distillation)
    temperatures  at which it writes them, by turns; 0 is greedy
    window        tokens in one text
    prompt        of them, how many come from the data where the target goes on
    measured      texts, written greedily, on which the accuracy is measured; they are not trained on

    Raises:
        ConfigurationError: a size is out of range.
    """

    tokens: int = 300_000
    generated: int = 0
    temperatures: tuple[float, ...] = (0.0, 1.0)
    window: int = 256
    prompt: int = 64
    measured: int = 64

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.generated < 0 or self.tokens + self.generated < self.window:
            raise ConfigurationError("train on at least one window of tokens: raise tokens or generated")
        if not 1 <= self.prompt < self.window or self.measured < 1 or not self.temperatures:
            raise ConfigurationError("prompt must be shorter than window, and measured and temperatures not be empty")
        if not all(0 <= temperature < math.inf for temperature in self.temperatures):
            raise ConfigurationError("temperatures must be 0 (greedy) or more")

    def check(self, config: MedusaConfig, sizes: ModelConfig) -> None:
        """Raise ConfigurationError unless such heads can be trained and measured on such texts of this target."""
        if not self.prompt + config.heads < self.window <= sizes.max_position_embeddings:
            raise ConfigurationError(
                f"texts of {self.window} tokens do not do: the target reads {sizes.max_position_embeddings}, and "
                f"behind a prompt of {self.prompt} there must be room for what {config.heads} heads predict"
            )


def gather(target: FrozenTarget, stream: np.ndarray, plan: Plan, *, work: Path, report: Report) -> Path:
    """Make every file of states that the plan asks for and that is not there yet. -> the folder they are in"""
    facts = [target.fingerprint(), asdict(plan), hashlib.sha256(np.ascontiguousarray(stream).tobytes()).hexdigest()]
    states = work / f"states-{hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]}"
    counts = [plan.tokens // plan.window, plan.generated // plan.window, plan.measured]
    texts = corpus.cut(stream, sum(counts), plan.window, seed=0)
    real, own, measured = texts.split(counts)
    batches = [lambda part=part: part for part in real.split(corpus.SHARD)] if len(real) else []
    corpus.keep(target, states / "train", "data", batches=batches, report=report)
    if len(own):
        written = corpus.own_text(target, own[:, : plan.prompt], plan.window, temperatures=plan.temperatures)
        corpus.keep(target, states / "train", "own", batches=written, report=report)
    greedy = corpus.own_text(target, measured[:, : plan.prompt], plan.window, temperatures=(0.0,))
    corpus.keep(target, states / "measure", "own", batches=greedy, report=report)
    return states


def train(
    target: FrozenTarget,
    config: MedusaConfig,
    options: TrainingOptions,
    *,
    states: Path,
    work: Path,
    out: Path,
    first: int,
    report: Report,
) -> Accuracy | None:
    """Train on ``states`` that `gather` made; write bf16 heads to ``out``. None if the minutes were over before.

    Also writes ``accuracy.json``: for every head the share of places where the target's token is among the best 1..10,
    on the texts kept for that, from place ``first`` on.
    """
    checkpoint.check_place(out)
    heads = fresh(config, target.output)
    windows = corpus.kept(states / "train")
    trainer = Trainer(heads, windows, options, output=target.output, folder=work, data=states.name)
    done = trainer.run(lambda step, steps, loss: report(f"training, loss {loss:.3f}", step, steps))
    if not done:
        return None
    weights = {name: p.detach().to(torch.bfloat16) for name, p in heads.own().items()}
    checkpoint.save(out, config, weights)
    found = accuracy.measure(heads, corpus.kept(states / "measure", first=first), target.output.detach())
    found.write(out / "accuracy.json")
    return found
