"""Train a drafter of the target on conversations for a given time: an EAGLE-3 head, Medusa heads or a draft decoder.

    python examples/smollm2/recipe/drafters.py eagle3 --target smollm2 --data conversations.bin --device cuda \
        --minutes 6 --work WORK --out HEAD

The learning rate falls along the time and not along the steps, so that a GPU that is lent for minutes is used to the
end. `conversations-eval.bin`, beside the data, is what is measured on.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from conversations import Markers, split
from torch import Tensor

import draft
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.token_files import read_tokens
from paceline.eagle import train
from paceline.eagle.config import EagleTraining, default_layers
from paceline.eagle.train import EagleTrainer, acceptance, write
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import Conversations
from paceline.heads.frozen_model import FrozenTarget
from paceline.heads.trainer import LOG_STEPS, Trainer
from paceline.medusa import checkpoint, search
from paceline.medusa.config import MedusaConfig, MedusaTraining
from paceline.medusa.network import fresh
from paceline.medusa.train import MedusaTrainer
from paceline.text.tokenizer import load_tokenizer

ENDLESS = 10**15  # tokens; the time ends the training
DEPTH = 5  # of the chains that are measured


class ByTime(Trainer):
    """A training whose learning rate follows the clock: a short rise, then a cosine to a fiftieth."""

    minutes: float
    measured: Callable[[], object]
    _began: float | None = None
    _tenth = 0

    def rate(self) -> float:
        self._began = perf_counter() if self._began is None else self._began
        return min(1.0, (self.step + 1) / 50) * (0.02 + 0.49 * (1 + math.cos(math.pi * self.share())))

    def share(self) -> float:
        """Share of the time that is over."""
        return 0.0 if self._began is None else min(1.0, (perf_counter() - self._began) / (60 * self.minutes))

    def log_row(self, losses: Sequence[float]) -> dict[str, object]:
        row: dict[str, object] = {"loss": round(self.loss, 4), "time": round(self.share(), 3)}
        if int(10 * self.share()) > self._tenth:
            self._tenth = int(10 * self.share())
            row["measured"] = self.measured()
        return row


class EagleByTime(ByTime, EagleTrainer):
    """EAGLE heads by the clock."""


class DraftByTime(ByTime, draft.DraftTrainer):
    """A draft decoder by the clock."""


class MedusaByTime(ByTime, MedusaTrainer):
    """Medusa heads by the clock."""


def show(step: int, _: int, loss: float) -> None:
    """A line now and then."""
    if step % (10 * LOG_STEPS) == 0:
        print(f"step {step}, loss {loss:.3f}", flush=True)


def eagle3(given: argparse.Namespace, target: FrozenTarget, corpus: Conversations, counts: Tensor) -> dict[str, object]:
    """Train a head and write it. Returns the share of places where chains of 1, 2, ... drafts are all right."""
    sizes = ModelConfig.from_pretrained(given.target)
    vocabulary = DraftVocab.frequent(counts, given.ids or 8192)
    config = train.default_config(sizes, version=3, layers=target.layers, draft_vocab_size=len(vocabulary.ids))
    network = train.fresh(config, target, depth=sizes.num_layers, vocabulary=vocabulary)
    vocabulary, output = vocabulary.to(given.device), target.output.detach()
    texts = corpus.eval_texts()
    options = EagleTraining(
        batch_size=given.batch_size,
        learning_rate=given.learning_rate or 2e-3,
        precision=given.precision,
        device=given.device,
        max_minutes=given.minutes,
        tokens=ENDLESS,
        ttt_steps=DEPTH,
    )

    def measure() -> list[float]:
        return acceptance(network, texts, depth=DEPTH, head=output, vocabulary=vocabulary, skip=0)

    trainer = EagleByTime(network, corpus, options, head=output, vocabulary=vocabulary, folder=given.work)
    trainer.minutes, trainer.measured = given.minutes, measure
    trainer.run(show)
    shares = measure()
    write(given.out, network, vocabulary, shares=shares)
    return {"steps": trainer.step, "greedy chains": [round(x, 4) for x in shares]}


def decoder(
    given: argparse.Namespace, target: FrozenTarget, corpus: Conversations, counts: Tensor
) -> dict[str, object]:
    """Train a draft decoder and write it. Returns the share of places where its best id is the target's."""
    sizes = ModelConfig.from_pretrained(given.target)
    tokenizer = json.loads((given.target / "tokenizer.json").read_text())
    vocabulary = DraftVocab(draft.kept_ids(tokenizer, counts, given.ids or 3072), sizes.vocab_size)
    torch.manual_seed(0)
    model = draft.cut(target, sizes, given.target, vocabulary.ids)
    options = draft.DraftTraining(
        batch_size=given.batch_size,
        learning_rate=given.learning_rate or 2e-3,
        precision=given.precision,
        device=given.device,
        max_minutes=given.minutes,
        tokens=ENDLESS,
    )
    trainer = DraftByTime(
        model, corpus, options, output=target.output.detach(), vocabulary=vocabulary, folder=given.work
    )
    trainer.minutes, trainer.measured = given.minutes, trainer.agreement
    trainer.run(show)
    agreement = trainer.agreement()
    draft.write(given.out, model, vocabulary, folder=given.target)
    return {"steps": trainer.step, "agreement": round(agreement, 4)}


def medusa(given: argparse.Namespace, target: FrozenTarget, corpus: Conversations, _: Tensor) -> dict[str, object]:
    """Train three heads and write them. Returns the shares of places where their best token is right."""
    sizes = ModelConfig.from_pretrained(given.target)
    config = MedusaConfig(3, 1, sizes.hidden_size, sizes.vocab_size, True, base="SmolLM2-135M-Instruct")
    made = (corpus.batch(number) for number in range(min(corpus.batches, given.medusa_batches)))
    windows = [texts.to("cpu") for texts in made]
    measured = [corpus.eval_texts()]
    heads, output = fresh(config, target.output).to(given.device), target.output.detach()
    options = MedusaTraining(
        batch_size=given.batch_size,
        learning_rate=given.learning_rate or 2e-3,
        precision=given.precision,
        device=given.device,
        max_minutes=given.minutes,
        epochs=1e6,
        loss_vocab_size=given.ids or 8192,
    )
    trainer = MedusaByTime(heads, windows, options, output=target.output, folder=given.work, data=corpus.key)
    trainer.minutes, trainer.measured = given.minutes, lambda: search.measure(heads, measured, output).top()[0][:1]
    trainer.run(show)
    given.out.mkdir(parents=True, exist_ok=True)
    checkpoint.save(given.out, config, {n: p.detach().to("cpu", torch.bfloat16) for n, p in heads.own().items()})
    found = search.measure(heads, measured, output)
    found.write(given.out / "accuracy.json")
    return {"steps": trainer.step, "top 1": [round(row[0], 4) for row in found.top()]}


KINDS = {"eagle3": eagle3, "draft": decoder, "medusa": medusa}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--target", type=Path, required=True, help="folder")
    parser.add_argument("--data", type=Path, required=True, help="conversations, as token ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the run's state")
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--ids", type=int, help="that are drafted, or that Medusa's losses see")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a conversation")
    parser.add_argument("--medusa-batches", type=int, default=400, help="batches whose states are kept for Medusa")
    given = parser.parse_args()
    sizes = ModelConfig.from_pretrained(given.target)
    measure = given.data.with_name(f"{given.data.stem}-eval.bin")
    stream, measured = (np.asarray(read_tokens(path, sizes.vocab_size)) for path in (given.data, measure))
    target = FrozenTarget(
        given.target, default_layers(sizes.num_layers), precision=given.precision, device=given.device
    )
    markers = Markers.of(load_tokenizer(given.target))
    texts, kept = split(stream, markers), split(measured, markers)
    corpus = Conversations(target, texts, kept, longest=given.longest)
    counts = torch.from_numpy(np.bincount(stream, minlength=sizes.vocab_size))
    print(json.dumps({"kind": given.kind, **KINDS[given.kind](given, target, corpus, counts)}))


if __name__ == "__main__":
    main()
