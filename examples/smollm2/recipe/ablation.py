"""Train drafters on the same texts in the same order, one after another, and list how often each is right: what a loss,
a norm or another kind of head gains at equal tokens.

    python examples/smollm2/recipe/ablation.py --target smollm2 --data answers.bin --out WORK --tokens 32000

`make ablation` makes the data, too: answers.bin and answers-eval.bin, by `answers.py`.

Each result is written to ``results.jsonl`` when its training ends; a run that was stopped goes on with the next one.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from conversations import Markers, split

from paceline.decoder.models.config import ModelConfig
from paceline.decoder.token_files import read_tokens
from paceline.decoder.weights.hub import checkpoint_path
from paceline.draft.dflash import train as dflash
from paceline.draft.dflash.config import DFlashHeadOptions
from paceline.eagle import checkpoint, train
from paceline.eagle.config import EagleTraining, default_layers
from paceline.heads import blocks
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import Conversations
from paceline.heads.frozen_model import FrozenTarget, Texts, products
from paceline.heads.options import TEXTS_PER_FILE, BlockTraining
from paceline.text.tokenizer import load_tokenizer

SHIPPED = Path(__file__).resolve().parents[1] / "eagle3"
DEPTH = 4
RATES = {"shipped": 3e-4, "parallel": 1e-3}  # of heads that are trained already; others 2e-3


@dataclass(frozen=True)
class Variant:
    """A drafter to train. ``parts``: of the head; ``options``: of its training."""

    name: str
    kind: str = "eagle"
    parts: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


VARIANTS = (
    Variant("EAGLE-3"),
    Variant("EAGLE-3, lk_hybrid", options={"loss": "lk_hybrid"}),
    Variant("EAGLE-3, nla", options={"loss": "nla"}),
    Variant("EAGLE-3, D-PACE", options={"dpace": True}),
    Variant("EAGLE-3, q/k norms", parts={"qk_norm": True}),
    Variant("EAGLE-3, fc-norm", parts={"fc_norm": True}),
    Variant("EAGLE-3.1", parts={"fc_norm": True, "norm_output": True}),
    Variant("EAGLE-3, replay", options={"replay": 0.5}),
    Variant("P-EAGLE", "peagle"),
    Variant("DFlash", "dflash"),
    Variant("DFlash, D-PACE", "dflash", options={"dpace": True}),
    Variant("P-EAGLE, D-PACE", "peagle", options={"dpace": True}),
    Variant("P-EAGLE from the shipped head", "parallel"),
    Variant("shipped, one tiny step", "shipped", options={"tokens": 1, "learning_rate": 1e-9}),  # as it is
    Variant("shipped", "shipped"),
    Variant("shipped, lk_hybrid", "shipped", options={"loss": "lk_hybrid"}),
    Variant("shipped, replay", "shipped", options={"replay": 0.5}),
)


@dataclass(frozen=True)
class Groups:
    """A batch of texts, cut into the groups of its steps; each has the length of its longest text."""

    groups: list[Texts]

    def rows(self, index: int, _count: int) -> Texts:
        """The texts of a step."""
        return self.groups[index]


class Kept:
    """Groups of conversations whose states were computed once, in an order of ``seed``. A corpus of a trainer, whose
    log has the acceptance on ``measured``.
    """

    def __init__(self, groups: list[Texts], seed: int, *, measured: Texts) -> None:
        self._groups, self._seed, self._measured = groups, seed, measured
        self._each = TEXTS_PER_FILE // len(groups[0])
        self.key, self.batches = f"kept, seed {seed}", len(groups) // self._each
        self.length = sum(x.tokens.shape[1] for x in groups) / len(groups)

    def batch(self, number: int) -> Any:
        """Batch ``number``; the order changes after all of them."""
        epoch, index = divmod(number, self.batches)
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._groups))
        return Groups([self._groups[i] for i in order[index * self._each : (index + 1) * self._each]])

    def eval_texts(self) -> Texts:
        """The texts to measure on while a head learns."""
        return self._measured


def trimmed(texts: Texts, count: int) -> list[Texts]:
    """Groups of ``count`` texts, as long as the longest answer of each."""
    assert texts.counted is not None
    groups, order = [], texts.counted.int().cumsum(1).argmax(1).argsort()
    for rows in order.split(count):
        tokens, last, streams, counted = (x[rows] for x in (texts.tokens, texts.last, texts.streams, texts.counted))
        size = int(counted.any(0).nonzero().max()) + 2
        groups.append(Texts(tokens[:, :size], last[:, :size], streams[:, :size], counted[:, :size]))
    return groups


class Ablation:
    """The target, and what every drafter learns from.

    counts  [V], of ids in the data
    ids     that are drafted, the most frequent ones
    """

    def __init__(self, folder: Path, data: Path, work: Path, *, ids: int, precision: str) -> None:
        folder = checkpoint_path(folder)
        self.sizes = ModelConfig.from_pretrained(folder)
        paths = (data, data.with_name(f"{data.stem}-eval.bin"))
        stream, measured = (np.asarray(read_tokens(path, self.sizes.vocab_size)) for path in paths)
        self.target = FrozenTarget(folder, default_layers(self.sizes.num_layers), precision=precision)
        self.output, self.precision = self.target.output.detach(), precision
        self.counts = torch.from_numpy(np.bincount(stream, minlength=self.sizes.vocab_size))
        self.vocabulary = DraftVocab.frequent(self.counts, ids)
        kept = work / "states.pt"
        if not kept.exists():
            markers = Markers.of(load_tokenizer(folder))
            corpus = Conversations(self.target, split(stream, markers), split(measured, markers), longest=512)
            texts = [corpus.eval_texts(), *(corpus.batch(number) for number in range(corpus.batches))]
            torch.save([[x.tokens, x.last, x.streams, x.counted] for x in texts], kept)
        measured, *batches = (Texts(*parts) for parts in torch.load(kept))
        self.measured, self.batches = trimmed(measured, 8), batches

    def run(self, variant: Variant, out: Path, *, tokens: int, seed: int, rows: int) -> dict[str, object]:
        """Train a drafter, write it to ``out``, and return what was measured."""
        groups, work = [x for batch in self.batches for x in trimmed(batch, rows)], out / "work"
        corpus = Kept(groups, seed, measured=self.measured[0])
        train_it = self._dflash if variant.kind == "dflash" else self._eagle
        rate = RATES.get(variant.kind, 2e-3)
        options = {
            "batch_size": rows,
            "tokens": tokens,
            "precision": self.precision,
            "learning_rate": rate,
        } | variant.options
        began = perf_counter()
        shares, parameters = train_it(variant, corpus, options, work)
        shutil.rmtree(work)
        found = {"tau": round(1 + sum(shares), 3), "accepted": [round(x, 3) for x in shares]}
        return found | {"parameters": parameters, "tokens": options["tokens"], "seconds": round(perf_counter() - began)}

    def _eagle(self, variant: Variant, corpus: Kept, options: dict[str, Any], work: Path) -> tuple[list[float], int]:
        vocabulary, unknown = self.vocabulary, int(self.counts.argmin())
        if variant.kind in RATES:
            found = checkpoint.load(SHIPPED, self.sizes)
            vocabulary = DraftVocab(found.weights["ids"], self.sizes.vocab_size)
            network = train.continued(found, self.target, where=SHIPPED)
            if variant.kind == "parallel":
                known, config = network.state_dict(), replace(found.config, mask_token=unknown)
                network = train.TrainableHead(config, self.target.embedding, None)
                network.load_state_dict({**network.state_dict(), **known})
        else:
            mask = {"mask_token": unknown} if variant.kind == "peagle" else {}
            config = train.default_config(
                self.sizes,
                version=3,
                layers=self.target.layers,
                draft_vocab_size=len(vocabulary.ids),
                **mask,
                **variant.parts,
            )
            network = train.fresh(config, self.target, depth=self.sizes.num_layers, vocabulary=vocabulary)
        trainer = train.EagleTrainer(
            network,
            corpus,
            EagleTraining(ttt_steps=DEPTH, **options),
            head=self.output,
            vocabulary=vocabulary,
            folder=work,
            target=self.target,
        )
        if options["tokens"]:
            trainer.run(show)
        given: dict[str, Any] = {"head": self.output, "vocabulary": vocabulary}
        shares = self._mean(lambda texts: train.acceptance(network, texts, depth=DEPTH, skip=0, **given))
        train.write(work.parent, network, vocabulary, shares=shares)
        return shares, trained(network)

    def _dflash(self, variant: Variant, corpus: Kept, options: dict[str, Any], work: Path) -> tuple[list[float], int]:
        head = DFlashHeadOptions(layers=self.target.layers, draft_vocab_size=len(self.vocabulary.ids), **variant.parts)
        config = dflash.config_of(head, self.sizes, self.counts, k=DEPTH)
        network = dflash.fresh(config, self.target, self.vocabulary, depth=self.sizes.num_layers)
        given = blocks.Supervision(self.output, self.vocabulary)
        learning = BlockTraining(k=DEPTH, **options)
        blocks.train(network, corpus, learning, given=given, skip=0, folder=work, key={}, report=show)
        shares = self._mean(lambda texts: blocks.acceptance(network, texts, given, k=DEPTH, skip=0))
        dflash.write(work.parent, network, self.vocabulary, depth=self.sizes.num_layers, shares=shares)
        return shares, trained(network)

    def _mean(self, measure: Callable[[Texts], list[float]]) -> list[float]:
        """Shares over all measured texts; the places of an answer count alike."""
        weights = [float(texts.counted.sum()) for texts in self.measured if texts.counted is not None]
        with products(self.precision):
            parts = [measure(texts) for texts in self.measured]
        rows = [sum(w * x for w, x in zip(weights, column, strict=True)) for column in zip(*parts, strict=True)]
        return [x / sum(weights) for x in rows]


def trained(network: torch.nn.Module) -> int:
    """Number of trained parameters."""
    return sum(x.numel() for x in network.parameters() if x.requires_grad)


def show(step: int, steps: int, loss: float) -> None:
    """A line now and then."""
    if step % 10 == 0 or step == 1:
        print(f"  step {step} of {steps}, loss {loss:.3f}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="conversations, as token ids")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=32_000, help="that each drafter learns from")
    parser.add_argument("--only", nargs="*", choices=[one.name for one in VARIANTS], help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the texts")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--ids", type=int, default=4096, help="that are drafted by new heads")
    parser.add_argument("--precision", default="bf16")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results.jsonl"
    done = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    ablation = Ablation(given.target, given.data, given.out, ids=given.ids, precision=given.precision)
    for variant in VARIANTS:
        key = {"drafter": variant.name, "seed": given.seed}
        if (given.only and variant.name not in given.only) or any(key.items() <= row.items() for row in done):
            continue
        print(key, flush=True)
        folder = given.out / f"{variant.name.replace('/', '').replace(', ', '-').replace(' ', '-')}-{given.seed}"
        made = ablation.run(variant, folder, tokens=given.tokens, seed=given.seed, rows=given.batch_size)
        with results.open("a") as file:
            file.write(json.dumps(key | made) + "\n")
        print(made, flush=True)


if __name__ == "__main__":
    main()
