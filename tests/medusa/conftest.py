"""Heads trained for a moment on the small target: right now and then, and wrong now and then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.heads.features import TrainingData
from paceline.heads.frozen_model import FrozenTarget
from paceline.medusa import train
from paceline.medusa.config import MedusaConfig, MedusaTexts, MedusaTraining
from paceline.medusa.tree import Choices
from tests.decoder.tiny import VOCABULARY, Workshop


@pytest.fixture(scope="session")
def heads_folder(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tied heads of one block each, with a tree."""
    out, work = tmp_path_factory.mktemp("heads"), tmp_path_factory.mktemp("heads-work")
    target = FrozenTarget(workshop.checkpoint("target"))
    stream = np.random.default_rng(1).integers(0, VOCABULARY, 9000).astype(np.int32)
    plan = MedusaTexts(tokens=0, self_distill_tokens=128 * 40, length=40, prompt=4, eval_samples=4)
    states = train.gather(target, TrainingData(stream), plan, work=work, report=lambda *_: None)
    config = MedusaConfig(3, 1, 32, VOCABULARY, tied=True)
    torch.manual_seed(0)
    options = MedusaTraining(epochs=6, batch_size=8, learning_rate=5e-3)
    train.train(target, config, options, states=states, work=work, out=out, prompt=4, report=lambda *_: None)
    tree = Choices.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [3], [0, 0, 1]])
    tree.write(out / "tree.json")
    return out
