"""A file of hidden states that speculators' own code writes, in 8 bits, is read as the states it was made of."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch

from paceline.heads.features import FeatureFiles
from paceline.heads.frozen_model import FrozenTarget
from paceline.heads.options import TEXTS_PER_FILE
from tests.decoder.tiny import Workshop
from tests.heads.speculators import needs_speculators, run_script

pytestmark = needs_speculators


def test_states_of_speculators_own_writer(workshop: Workshop, tmp_path: Path) -> None:
    run_script(Path(__file__).parent / "written" / "states.py", tmp_path / "hs_0.safetensors")
    for index in range(1, TEXTS_PER_FILE + 1):
        shutil.copy(tmp_path / "hs_0.safetensors", tmp_path / f"hs_{index}.safetensors")
    target = FrozenTarget(workshop.checkpoint(), (0, 1, 2))
    batch = FeatureFiles(target, tmp_path, longest=24, measured=1).batch(0)
    states = torch.randn(12, 4, 32, generator=torch.Generator().manual_seed(0))
    assert batch.tokens[0].tolist() == list(range(5, 17))
    torch.testing.assert_close(batch.streams[0].float(), states[:, :3].flatten(1), rtol=0.07, atol=0.07)
    torch.testing.assert_close(batch.last[0].float(), target.normed(states[:, 3]), rtol=0.1, atol=0.1)
