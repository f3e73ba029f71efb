"""Inputs of the training tests: a tiny target, easy text, and a head to begin with; no tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.decoder.models.config import ModelConfig
from paceline.eagle import train
from paceline.eagle.config import EagleHeadOptions, EagleTraining
from paceline.eagle.network import TrainableHead
from paceline.eagle.train import EagleTrainer
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import FeatureCache, TrainingData
from paceline.heads.frozen_model import FrozenTarget
from paceline.heads.options import CachedTextOptions
from tests.decoder.tiny import VOCABULARY, Workshop

SHORT = CachedTextOptions(length=24, prompt=6, eval_samples=8, feature_cache_gb=1)
LAYERS = (0, 1, 2)


def output(frozen: FrozenTarget) -> torch.Tensor:
    return frozen.output.detach()


def stream(texts: int = 160) -> np.ndarray:
    """Text that is easy to continue: runs of neighbouring ids."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, VOCABULARY, texts * 6)
    return ((starts[:, None] + np.arange(4)) % VOCABULARY).astype(np.uint16).flatten()


def parts(
    workshop: Workshop, folder: Path, version: int, **changes: object
) -> tuple[FrozenTarget, FeatureCache, TrainableHead, DraftVocab]:
    frozen = FrozenTarget(workshop.checkpoint(), LAYERS)
    sizes = ModelConfig.from_pretrained(workshop.checkpoint())
    counts = torch.from_numpy(np.bincount(stream(), minlength=VOCABULARY))
    vocabulary = DraftVocab.frequent(counts, 60 if version == 3 else VOCABULARY)
    made = train.default_config(sizes, version=version, layers=LAYERS, draft_vocab_size=len(vocabulary.ids), **changes)
    network = train.fresh(made, frozen, depth=sizes.num_layers, vocabulary=vocabulary)
    return frozen, FeatureCache(frozen, stream(), SHORT, folder=folder / "states"), network, vocabulary


def trainer(
    made: tuple[FrozenTarget, FeatureCache, TrainableHead, DraftVocab],
    options: EagleTraining,
    folder: Path,
    **more: Any,
) -> EagleTrainer:
    """A training of what `parts` made."""
    frozen, corpus, network, vocabulary = made
    given = {"head": output(frozen), "vocabulary": vocabulary, "folder": folder, **more}
    return EagleTrainer(network, corpus, options, **given)


def trained(workshop: Workshop, folder: Path, head: EagleHeadOptions, data: np.ndarray, **options: Any) -> Path:
    """The folder of a head that was trained for a few steps."""
    train.train(
        workshop.checkpoint(),
        TrainingData(data),
        head,
        texts=SHORT,
        options=EagleTraining(**{"tokens": 24 * 8 * 2, "ttt_steps": 2, "batch_size": 8, **options}),
        work=folder.with_name(f"{folder.name}-work"),
        out=folder,
        report=lambda *_: None,
    )
    return folder
