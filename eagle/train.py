"""From a target and a stream of tokens to a folder with a trained and measured head.

What was done is kept in ``work``: the target's states as far as allowed, and the training's state, so that a run that
was stopped resumes when it is asked for again. Not here: what is learned (`paceline.eagle.objective`), reading text
files, and showing progress.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.eagle import checkpoint, initial
from paceline.eagle.aux_layers import default_layers
from paceline.eagle.checkpoint import Checkpoint
from paceline.eagle.config import check_version
from paceline.eagle.network import TrainableHead
from paceline.eagle.objective import DraftVocab, acceptance, objective, text_part
from paceline.eagle.options import EagleHeadOptions, EagleTraining
from paceline.training.features import FeatureCache
from paceline.training.frozen_model import FrozenTarget, Texts, products
from paceline.training.options import TEXTS_PER_FILE, CachedTextOptions
from paceline.training.trainer import LOG_STEPS, Progress, Trainer

Measure = Callable[[TrainableHead], list[float]]
"""Shares of places where chains of 1, 2, ... drafts are all right."""

_MEASURES = 10  # of a run, evenly


def muon(matrices: Sequence[Tensor], rate: float) -> torch.optim.Muon:
    """Muon (Jordan et al., 2024), its updates sized like AdamW's at the same rate (Liu et al., arXiv 2502.16982)."""
    return torch.optim.Muon(matrices, rate, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw")


class Corpus(Protocol):
    """Batches of `TEXTS_PER_FILE` texts with the target's states, by number: `FeatureCache`, or another maker of them.

    key     tells these texts from others
    length  tokens of a text, on average
    """

    key: str

    @property
    def length(self) -> float: ...

    def batch(self, number: int) -> Texts: ...

    def eval_texts(self) -> Texts: ...


class EagleTrainer(Trainer[Texts]):
    """Trains a head in place; ``measure`` is logged now and then.

    head        [V, H], the target's output layer
    vocabulary  which ids the head drafts

    Raises:
        ConfigurationError: the folder holds the state of a run with another head, target, other data or options.
    """

    def __init__(
        self,
        network: TrainableHead,
        corpus: Corpus,
        options: EagleTraining,
        *,
        head: Tensor,
        vocabulary: DraftVocab,
        folder: Path,
        measure: Measure | None = None,
    ) -> None:
        self.network, self._corpus, self._training = network, corpus, options
        self._measure, self._head, self._vocabulary = measure, head, vocabulary
        parameters = dict(network.named_parameters())
        matrices = {name: p for name, p in parameters.items() if p.dim() == 2 and not name.startswith("lm_head")}
        vectors = [p for name, p in parameters.items() if name not in matrices]
        rate = options.learning_rate
        super().__init__(
            options,
            parameters=parameters,
            optimizers=[muon(list(matrices.values()), rate), torch.optim.AdamW(vectors, rate, betas=(0.9, 0.98))],
            steps=math.ceil(options.tokens / (options.batch_size * corpus.length)),
            folder=folder,
            key={
                **asdict(network.config),
                "corpus": corpus.key,
                "drafted ids": hashlib.sha256(vocabulary.ids.cpu().numpy().tobytes()).hexdigest()[:16],
                "start": network.start,
            },
        )

    def rate(self) -> float:
        return min(1.0, (self.step + 1) / 20) * (0.02 + 0.49 * (1 + math.cos(math.pi * self.step / self.steps)))

    def batches(self) -> Iterator[Texts]:
        rows = self._training.batch_size
        texts: Texts | None = None
        while self.step < self.steps:
            number, index = divmod(self.step, TEXTS_PER_FILE // rows)
            if texts is None or not index:
                texts = self._corpus.batch(number)
            yield text_part(texts, index, rows)

    def backward(self, batch: Texts) -> list[float]:
        with products(self._training.precision, self._training.device):
            loss = objective(self.network, batch, self._training, head=self._head, vocabulary=self._vocabulary)
        loss.backward()
        return [float(loss.detach())]

    def log_row(self, losses: Sequence[float]) -> dict[str, object]:
        row: dict[str, object] = {"loss": round(self.loss, 4)}
        every = max(LOG_STEPS, self.steps // _MEASURES // LOG_STEPS * LOG_STEPS)
        if self._measure is not None and (self.step % every == 0 or self.step == self.steps):
            row["greedy chains"] = [round(share, 4) for share in self._measure(self.network)]
        return row


MEASURED = "acceptance.json"


def train(
    target: Path,
    stream: np.ndarray,
    head: EagleHeadOptions,
    *,
    texts: CachedTextOptions,
    options: EagleTraining,
    work: Path,
    out: Path,
    report: Progress,
) -> list[float] | None:
    """Train a head and write it to ``out`` in bfloat16, with acceptance.json; None if the minutes were over before.

    stream [n], token ids end to end. Returns the share of places where chains of 1, 2, ... drafts are all right.
    """
    sizes = ModelConfig.from_pretrained(target)
    check(head, texts, sizes)
    frozen, network, vocabulary = _begin(target, stream, head, sizes=sizes, options=options)
    features = FeatureCache(frozen, stream, texts, folder=work / "states")
    eval_texts, output = features.eval_texts(), frozen.output.detach()

    def measure(network: TrainableHead) -> list[float]:
        skip = texts.prompt_length
        return acceptance(network, eval_texts, depth=head.depth, head=output, vocabulary=vocabulary, skip=skip)

    trainer = EagleTrainer(network, features, options, head=output, vocabulary=vocabulary, folder=work, measure=measure)
    if not trainer.run(report):
        return None
    shares = measure(network)
    write(out, network, vocabulary, shares=shares)
    return shares


def _begin(
    target: Path, stream: np.ndarray, head: EagleHeadOptions, *, sizes: ModelConfig, options: EagleTraining
) -> tuple[FrozenTarget, TrainableHead, DraftVocab]:
    """The target, and the head as it is before the first step: a fresh one, or the one to train on."""
    if head.start is not None:
        found = checkpoint.load(head.start, sizes)
        frozen = FrozenTarget(target, found.config.layers, precision=options.precision, device=options.device)
        vocabulary = DraftVocab(found.weights.get("ids", torch.arange(sizes.vocab_size)), sizes.vocab_size)
        return frozen, initial.continued(found, frozen, where=head.start), vocabulary.to(options.device)
    layers = head.layers or (default_layers(sizes.num_layers) if head.version == 3 else ())
    frozen = FrozenTarget(target, layers, precision=options.precision, device=options.device)
    counts = torch.from_numpy(np.bincount(stream, minlength=sizes.vocab_size))
    drafted = sizes.vocab_size if head.draft_vocab_size is None else head.draft_vocab_size
    vocabulary = DraftVocab.frequent(counts, drafted).to(options.device)
    config = initial.default_config(sizes, version=head.version, layers=layers, draft_vocab_size=len(vocabulary.ids))
    return frozen, initial.fresh(config, frozen, depth=sizes.num_layers, vocabulary=vocabulary), vocabulary


def check(head: EagleHeadOptions, texts: CachedTextOptions, sizes: ModelConfig) -> None:
    """Raise ConfigurationError, or CheckpointError for an unknown version, if the target cannot have such a head."""
    check_version(head.version)
    if head.start is not None:
        if head.layers or head.draft_vocab_size is not None:
            raise ConfigurationError("start: the layers and the drafted ids are those of that head; give no others")
        version = checkpoint.load(head.start, sizes).config.version
        if version != head.version:
            raise ConfigurationError(f"{head.start} is a head of version {version}; give version={version}")
    if any(not 0 <= layer <= sizes.num_layers for layer in head.layers):
        raise ConfigurationError(
            f"the target has {sizes.num_layers} layers, and residual streams are numbered 0 to {sizes.num_layers}; "
            f"{list(head.layers)} is not among them"
        )
    if head.draft_vocab_size is not None and (head.version != 3 or not 1 <= head.draft_vocab_size <= sizes.vocab_size):
        raise ConfigurationError(
            f"a head of version 3 drafts 1 to {sizes.vocab_size} ids of this target, and one of version 1 all of them; "
            f"{head.draft_vocab_size} is not possible for version {head.version}"
        )
    if not texts.prompt_length + head.depth < texts.length <= sizes.max_position_embeddings:
        raise ConfigurationError(
            f"texts of {texts.length} tokens do not fit: the target reads {sizes.max_position_embeddings}, and after "
            f"a prompt of {texts.prompt_length} there must be room for {head.depth} drafts"
        )
    if head.version == 3 and not head.layers and head.start is None:
        default_layers(sizes.num_layers)


def write(out: Path, network: TrainableHead, vocabulary: DraftVocab, *, shares: list[float]) -> None:
    """A head in bfloat16 and how well it did."""
    state = network.state_dict()
    weights: dict[str, Tensor] = {name: x.detach().to("cpu", torch.bfloat16) for name, x in state.items()}
    if network.config.version == 3:
        weights["ids"] = vocabulary.ids.cpu()
    checkpoint.save(out, Checkpoint(network.config, weights, None))
    text = json.dumps({"greedy chains": [round(share, 4) for share in shares]})
    with atomic_write(out / MEASURED):
        (out / MEASURED).write_text(text + "\n", encoding="utf-8")
