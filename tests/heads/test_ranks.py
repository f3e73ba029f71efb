"""Processes of torchrun train one head, as one process does on all their sequences."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.eagle.config import EagleTraining
from paceline.eagle.train import EagleTrainer
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import FeatureCache
from paceline.heads.frozen_model import Texts
from paceline.heads.trainer import distributed, rank, ranks
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.lessons import output, parts

STEPS = 2


class Joined:
    """Batches that hold the sequences which two processes read in the same steps."""

    key, length = "joined", 24.0

    def __init__(self, corpus: FeatureCache) -> None:
        self._corpus = corpus

    def batch(self, number: int) -> Texts:
        one, two = (self._corpus.batch(2 * number + which) for which in (0, 1))
        every = [part.rows(index, 4) for index in range(8) for part in (one, two)]
        return Texts(*(torch.cat([getattr(part, name) for part in every]) for name in ("tokens", "last", "streams")))

    def eval_texts(self) -> Texts:
        return self._corpus.eval_texts()


def trained(workshop: Workshop, folder: Path, *, joined: bool) -> dict[str, torch.Tensor]:
    frozen, corpus, _, _ = parts(workshop, folder, 1)
    network = parts(workshop, folder, 1)[2]
    options = EagleTraining(tokens=24 * 8 * STEPS, ttt_steps=1, batch_size=8)
    vocabulary = DraftVocab(torch.arange(VOCABULARY), VOCABULARY)
    trainer = EagleTrainer(
        network,
        Joined(corpus) if joined else corpus,
        options,
        head=output(frozen),
        vocabulary=vocabulary,
        folder=folder / "work",
    )
    assert trainer.run(lambda *_: None) and trainer.step == STEPS
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


@pytest.mark.full
def test_two_processes_train_as_one(compile_cache: None, tmp_path: Path) -> None:
    Workshop(tmp_path / "models").checkpoint()
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, "-m", "tests.heads.test_ranks", str(tmp_path)], check=True, cwd=root, timeout=600)
    one, two = (torch.load(tmp_path / f"rank-{index}.pt", weights_only=True) for index in (0, 1))
    whole = trained(Workshop(tmp_path / "models"), tmp_path / "alone", joined=True)
    for name, value in whole.items():
        assert torch.equal(one[name], two[name]), "every process has the same head"
        torch.testing.assert_close(one[name], value, rtol=2e-3, atol=2e-4)
    assert (tmp_path / "both" / "work" / "state.pt").is_file()


def main() -> None:
    folder = Path(sys.argv[1])
    with distributed("cpu"):
        assert ranks() == 2
        made = trained(Workshop(folder / "models"), folder / "both", joined=False)
        torch.save(made, folder / f"rank-{rank()}.pt")


if __name__ == "__main__":
    main()
