"""From a target and a stream of tokens to a folder with a trained and measured head.

What was done is kept in ``work``: the target's states as far as allowed, and the training's state, so that a run that
was stopped goes on when it is asked for again. Not here: reading text files, and showing progress.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.eagle import checkpoint, initial
from paceline.eagle.checkpoint import Checkpoint
from paceline.eagle.config import check_version
from paceline.eagle.corpus import Corpus, CorpusOptions, FrozenTarget
from paceline.eagle.network import TrainableHead
from paceline.eagle.training import Report, Trainer, TrainingOptions, Vocabulary, acceptance

MEASURED = "acceptance.json"


@dataclass(frozen=True, slots=True)
class Plan:
    """Which head is made.

    version           1 (also for EAGLE-2) or 3
    layers            version 3: the target's residual streams it reads; empty = a low, a middle and the last one.
                      For version 1 they only decide what is kept, so that a head of version 3 may use it too
    draft_vocab_size  version 3: the most frequent ids of the data, so many; None = all
    depth             of the chains whose acceptance is measured
    """

    version: int = 3
    layers: tuple[int, ...] = ()
    draft_vocab_size: int | None = None
    depth: int = 5


def train(
    target: Path,
    stream: np.ndarray,
    plan: Plan,
    *,
    corpus: CorpusOptions,
    options: TrainingOptions,
    work: Path,
    out: Path,
    report: Report,
) -> list[float] | None:
    """Train a head and write it to ``out`` in bfloat16, with acceptance.json; None if the minutes were over before.

    stream [n], token ids end to end. Returns the share of places where chains of 1, 2, ... drafts are all right.
    """
    sizes = ModelConfig.from_pretrained(target)
    check(plan, corpus, sizes)
    layers = plan.layers or (initial.default_layers(sizes.num_layers) if plan.version == 3 else ())
    frozen = FrozenTarget(target, layers)
    counts = torch.from_numpy(np.bincount(stream, minlength=sizes.vocab_size))
    kept = sizes.vocab_size if plan.draft_vocab_size is None else plan.draft_vocab_size
    vocabulary = Vocabulary.frequent(counts, kept)
    config = initial.default_config(sizes, version=plan.version, layers=layers, draft_vocab_size=len(vocabulary.ids))
    texts = Corpus(frozen, stream, corpus, folder=work / "states")
    network = initial.fresh(config, frozen, depth=sizes.num_layers, vocabulary=vocabulary)
    own = texts.measured()

    def measure(network: TrainableHead) -> list[float]:
        return acceptance(network, own, depth=plan.depth, head=frozen.head, vocabulary=vocabulary, skip=corpus.prompt)

    trainer = Trainer(network, texts, options, head=frozen.head, vocabulary=vocabulary, folder=work, measure=measure)
    if not trainer.run(report):
        return None
    shares = measure(network)
    write(out, network, vocabulary, shares=shares)
    return shares


def check(plan: Plan, corpus: CorpusOptions, sizes: ModelConfig) -> None:
    """Raise ConfigurationError, or CheckpointError for an unknown version, if the target cannot have such a head."""
    check_version(plan.version)
    if any(not 0 <= layer <= sizes.num_layers for layer in plan.layers):
        raise ConfigurationError(
            f"the target has {sizes.num_layers} layers, and residual streams are numbered 0 to {sizes.num_layers}; "
            f"{list(plan.layers)} is not among them"
        )
    if plan.draft_vocab_size is not None and (plan.version != 3 or not 1 <= plan.draft_vocab_size <= sizes.vocab_size):
        raise ConfigurationError(
            f"a head of version 3 drafts 1 to {sizes.vocab_size} ids of this target, and one of version 1 all of them; "
            f"{plan.draft_vocab_size} is not possible for version {plan.version}"
        )
    if not corpus.prompt + plan.depth < corpus.length <= sizes.max_position_embeddings:
        raise ConfigurationError(
            f"texts of {corpus.length} tokens do not do: the target reads {sizes.max_position_embeddings}, and behind "
            f"a prompt of {corpus.prompt} there must be room for {plan.depth} drafts"
        )


def write(out: Path, network: TrainableHead, vocabulary: Vocabulary, *, shares: list[float]) -> None:
    """A head in bfloat16 and how well it did."""
    weights: dict[str, Tensor] = {name: x.detach().bfloat16() for name, x in network.state_dict().items()}
    if network.config.version == 3:
        weights["ids"] = vocabulary.ids
    checkpoint.save(out, Checkpoint(network.config, weights, None))
    text = json.dumps({"greedy chains": [round(share, 4) for share in shares]})
    with atomic_write(out / MEASURED):
        (out / MEASURED).write_text(text + "\n", encoding="utf-8")
