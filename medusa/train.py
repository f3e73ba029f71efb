"""Training of Medusa heads on a frozen target's states (Medusa-1 of Cai et al., arXiv 2401.10774).

Head i reads the state at position t of a sequence and learns the token at t + i + 2. Its label is, by default, not that
token but the target's whole distribution (distillation), which has more information per position. Heads share nothing,
so their losses are simply added. Only the heads change. Each stage of `train` is skipped if its files exist.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.heads import features
from paceline.heads.features import Corpus, PartProgress, TrainingData, read_features, write_features
from paceline.heads.frozen_model import FrozenTarget, Texts, products
from paceline.heads.options import TEXTS_PER_FILE, CachedTextOptions
from paceline.heads.trainer import Trainer, rank, ranks
from paceline.medusa import checkpoint, search
from paceline.medusa.config import MedusaConfig, MedusaTexts, MedusaTraining
from paceline.medusa.network import Heads, Linear, fresh
from paceline.medusa.search import Accuracy

_WARMUP = 0.02  # share of the steps in which the learning rate rises


class MedusaTrainer(Trainer):
    """Trains heads in place.

    output  [V, H], the target's output layer
    folder  holds the state of the run and its log
    data    identifies these windows
    """

    def __init__(
        self,
        heads: Heads,
        windows: Sequence[Texts],
        options: MedusaTraining,
        *,
        output: Tensor,
        folder: Path,
        data: str,
    ) -> None:
        self.heads, self._windows, self._training = heads, windows, options
        self._output, self._places = output.detach(), None
        if 0 < options.loss_vocab_size < len(output):
            self._output, self._places = _frequent(heads.config, windows, output.detach(), keep=options.loss_vocab_size)
        shortest = min((w.tokens.shape[1] for w in windows), default=0)
        if shortest < heads.config.heads + 2:
            raise ConfigurationError(
                f"length: expected sequences of at least {heads.config.heads + 2} tokens for "
                f"{heads.config.heads} heads, got {shortest}; give longer ones"
            )
        parameters = heads.own()
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        optimizer = torch.optim.AdamW(
            parameters.values(), lr=options.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        per_epoch = sum(math.ceil(len(w) / options.batch_size) for w in windows)
        steps = max(1, math.ceil(per_epoch * options.epochs))
        sizes = {name: value for name, value in asdict(heads.config).items() if name != "base"}
        super().__init__(
            options,
            parameters=parameters,
            optimizers=[optimizer],
            steps=steps,
            folder=folder,
            key={"data": data, **sizes, "steps": steps, "ranks": ranks()},
        )

    def rate(self) -> float:
        return _schedule(self.step, self.steps)

    def backward(self, batch: Texts) -> list[float]:
        tokens, states, counted = batch.tokens, batch.last.float(), batch.counted
        block = partial(products, self._training.precision, self._training.device)
        if self._places is not None:
            tokens = self._places[tokens]
        losses, linear = [], cast(Linear, torch.nn.functional.linear)
        with torch.no_grad(), block():
            distill = self._training.loss_target == "target"
            labels = torch.softmax(linear(states, self._output).float(), -1) if distill else None
        for index in range(self.heads.config.heads):
            ahead = index + 1  # state t has read token t and predicts t + 1; state t + ahead predicts this head's token
            x = states[:, : -ahead - 1].flatten(0, 1)
            with block():
                hidden = self.heads.hidden(index, x, linear)
                tied = self.heads.config.tied
                table = self._output if tied else self.heads.get_parameter(f"heads.{index}.projection.weight")
                logits = linear(hidden, table).float()
            targets = tokens[:, ahead + 1 :].flatten()
            label = targets if labels is None else labels[:, ahead:-1].flatten(0, 1)
            seen = targets >= 0
            if counted is not None:
                seen &= counted[:, ahead:-1].flatten()
            if self._places is not None or counted is not None:
                logits, label = logits[seen], label[seen]
            loss = torch.nn.functional.cross_entropy(logits, label)
            loss.backward()
            losses.append(float(loss.detach()))
        return losses

    def batches(self) -> Iterator[Texts]:
        """Yield batches in an order that depends only on the seed and the pass."""
        rows = self._training.batch_size
        places = [(file, at) for file, w in enumerate(self._windows) for at in range(0, len(w), rows)]
        step = 0
        while True:
            order = torch.randperm(len(places), generator=torch.Generator().manual_seed(self._training.seed + step))
            for index in order.tolist():
                if step == self.steps:
                    return
                step += 1
                if step > self.step:
                    file, at = places[index]
                    part = self._windows[file].part(slice(at, at + rows))
                    shared = part.part(slice(rank(), None, ranks())) if len(part) >= ranks() else part
                    yield shared.to(self._training.device)


def _frequent(config: MedusaConfig, windows: Sequence[Texts], output: Tensor, *, keep: int) -> tuple[Tensor, Tensor]:
    """Return the rows [keep, H] of the most frequent ids, and the index of every id [V] among them: -1 if absent."""
    if not config.tied:
        raise ConfigurationError(
            "loss_vocab_size: expected 0 for heads with their own output layer, whose other rows would stay "
            f"untrained, got {keep}; set it to 0, or tie the heads"
        )
    counts = torch.zeros(len(output), dtype=torch.int64)
    for part in windows:
        counts += part.tokens.flatten().bincount(minlength=len(output))
    ids = torch.argsort(counts, descending=True, stable=True)[:keep].sort().values
    places = torch.full((len(output),), -1).index_copy(0, ids, torch.arange(keep))
    return output[ids.to(output.device)], places.to(output.device)


def _schedule(step: int, steps: int) -> float:
    warm = max(1, round(_WARMUP * steps))
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def gather(target: FrozenTarget, data: TrainingData, texts: MedusaTexts, *, work: Path, report: PartProgress) -> Path:
    """Make every requested file of states that does not exist; of conversations, only answers count. -> their folder

    Raises:
        ConfigurationError: there is too little data, or continuations of conversations are asked for.
    """
    texts.check_data(marked=data.marked)
    corpus: Corpus | None = None
    if data.marked:
        options = CachedTextOptions(length=texts.length, prompt=texts.prompt, eval_samples=texts.eval_samples)
        corpus = data.corpus(target, options, folder=work)
    key = hashlib.sha256(np.ascontiguousarray(data.stream).tobytes()).hexdigest() if corpus is None else corpus.key
    facts = json.dumps([target.fingerprint(), asdict(texts), key])
    states = work / f"states-{hashlib.sha256(facts.encode()).hexdigest()[:16]}"
    if corpus is not None:
        count = min(corpus.batches, math.ceil(texts.tokens / (TEXTS_PER_FILE * corpus.length)))
        batches = [partial(corpus.batch, number) for number in range(count)]
        write_features(states / "train", "data", batches=batches, report=report)
        write_features(states / "measure", "data", batches=[corpus.eval_texts], report=report)
        return states
    length, prompt = texts.length, texts.prompt_length
    counts = [texts.tokens // length, texts.self_distill_tokens // length, texts.eval_samples]
    real, distilled, measured = features.cut(data.stream, sum(counts), length, seed=0).split(counts)

    def read(make: Callable[[], Tensor]) -> Texts:
        return target.read(make())

    def write(kind: str, name: str, made: Sequence[Callable[[], Tensor]]) -> None:
        write_features(states / kind, name, batches=[partial(read, one) for one in made], report=report)

    write("train", "data", [part.clone for part in real.split(TEXTS_PER_FILE)] if len(real) else [])
    if len(distilled):
        prompts = distilled[:, :prompt]
        write("train", "own", features.self_generate(target, prompts, length, temperatures=texts.temperature))
    write("measure", "own", features.self_generate(target, measured[:, :prompt], length, temperatures=(0.0,)))
    return states


def train(
    target: FrozenTarget,
    config: MedusaConfig,
    options: MedusaTraining,
    *,
    states: Path,
    work: Path,
    out: Path,
    prompt: int,
    report: PartProgress,
) -> Accuracy | None:
    """Train on ``states`` that `gather` made; write bf16 heads to ``out``. None if the time limit ended the run.

    Also writes ``accuracy.json``: for every head the share of positions at which the target's token is among the best
    1..10, on the evaluation sequences, after the first ``prompt`` tokens.
    """
    checkpoint.check_place(out)
    heads = fresh(config, target.output).to(target.device)
    windows = read_features(states / "train")
    trainer = MedusaTrainer(heads, windows, options, output=target.output, folder=work, data=states.name)
    if not trainer.run(lambda step, steps, loss: report(f"training, loss {loss:.3f}", step, steps)):
        return None
    weights = {name: p.detach().to("cpu", torch.bfloat16) for name, p in heads.own().items()}
    if not rank():
        checkpoint.save(out, config, weights)
    measured = search.measure(heads, read_features(states / "measure", prompt=prompt), target.output.detach())
    if not rank():
        measured.write(out / "accuracy.json")
    return measured
