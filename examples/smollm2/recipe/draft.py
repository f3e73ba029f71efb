"""Cut a small draft decoder out of the target, and distil it on the target's own answers.

    python examples/smollm2/recipe/draft.py --target smollm2 --data answers.bin --out examples/smollm2/draft --work W

The draft begins with two of the target's layers and with the embedding of the ids that are most frequent in the data:
its tokenizer holds these alone, so that `--vocabulary intersection` maps between the two. The loss is the KL divergence
from the target's distribution over those ids, plus half of the total variation distance: one minus that is the chance
that a sampled draft token is accepted. A run that was stopped continues where it was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.cli.train import token_stream
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.hub import checkpoint_path
from paceline.eagle.config import default_layers
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import Corpus, FeatureCache
from paceline.heads.frozen_model import FrozenTarget, Texts
from paceline.heads.losses import target_probs
from paceline.heads.options import CachedTextOptions, DraftTraining
from paceline.heads.trainer import LOG_STEPS, CorpusTrainer

LAYERS = (0, -1)  # of the target, which the draft begins with
DISTANCE = 0.5  # weight of the total variation distance


class DraftTrainer(CorpusTrainer):
    """Trains ``model`` in place. ``output`` [V, H] is the target's output layer."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        corpus: Corpus,
        options: DraftTraining,
        *,
        output: Tensor,
        vocabulary: DraftVocab,
        folder: Path,
    ) -> None:
        self._model, self._output, self._vocabulary = model, output, vocabulary.to(options.device)
        self._measured = corpus.eval_texts()
        places = torch.zeros(vocabulary.size, dtype=torch.int64)  # what is unknown is read as id 0
        places[vocabulary.ids] = torch.arange(len(vocabulary.ids))
        self._places = places.to(options.device)
        super().__init__(
            model,
            corpus,
            options,
            folder=folder,
            key={"ids": len(vocabulary.ids), "layers": LAYERS},
            measure=lambda: [self.agreement()],
        )

    def objective(self, batch: Texts) -> Tensor:
        probs, inside = target_probs(batch.last.float(), self._output, self._vocabulary)
        found = self._model(self._places[batch.tokens], use_cache=False).logits.float().log_softmax(-1)
        divergence = (probs * (probs.clamp(min=1e-9).log() - found)).sum(-1)
        distance = 1 - torch.minimum(probs, found.exp()).sum(-1)
        weights = (inside if batch.counted is None else inside & batch.counted).float()
        return ((divergence + DISTANCE * distance) * weights).sum() / weights.sum().clamp(min=1)

    @torch.no_grad()
    def agreement(self) -> float:
        """Share of places, in texts that the target wrote greedily, where the draft's best id is the target's."""
        agreed = []
        for index in range(len(self._measured.tokens) // 8):
            part = self._measured.rows(index, 8)
            wanted = F.linear(part.last.float(), self._output).argmax(-1)
            found = self._model(self._places[part.tokens], use_cache=False).logits.argmax(-1)
            right = self._vocabulary.ids[found] == wanted
            agreed.append((right if part.counted is None else right[part.counted]).flatten())
        return float(torch.cat(agreed).double().mean())


def cut(target: FrozenTarget, sizes: ModelConfig, folder: Path, ids: Tensor) -> LlamaForCausalLM:
    """The draft to begin with."""
    facts = json.loads((folder / "config.json").read_text())
    shown = {name: facts[name] for name in ("bos_token_id", "eos_token_id") if name in facts}
    config = LlamaConfig(**{**facts, **shown, "vocab_size": len(ids), "num_hidden_layers": len(LAYERS)})
    config.tie_word_embeddings = True
    model = LlamaForCausalLM(config)
    state = {"model.embed_tokens.weight": target.embedding[ids], "model.norm.weight": target.norm}
    for place, layer in enumerate(LAYERS):
        block = target.block(layer % sizes.num_layers)
        state |= {f"model.layers.{place}.{name}": value for name, value in block.items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict({name: value.clone() for name, value in state.items()})
    model.tie_weights()
    return model.train().to(target.device)


def write(out: Path, model: LlamaForCausalLM, vocabulary: DraftVocab, *, folder: Path) -> None:
    """The draft in bfloat16, with the part of the target's tokenizer that it knows."""
    model.to("cpu", torch.bfloat16).save_pretrained(out)
    tokenizer = cut_tokenizer(json.loads((folder / "tokenizer.json").read_text()), vocabulary.ids.cpu())
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    (out / "tokenizer_config.json").write_text((folder / "tokenizer_config.json").read_text())


def kept_ids(tokenizer: Mapping[str, object], counts: Tensor, keep: int) -> Tensor:
    """Special tokens, the 256 bytes, and the most frequent ids, ``keep`` in all."""
    model = tokenizer["model"]
    assert isinstance(model, dict)
    always = [entry["id"] for entry in tokenizer["added_tokens"]]  # type: ignore[attr-defined]
    always += [number for token, number in model["vocab"].items() if len(token) == 1]
    weights = counts.double()
    weights[always] += counts.sum().double()
    return torch.argsort(weights, descending=True, stable=True)[:keep].sort().values


def cut_tokenizer(tokenizer: dict[str, object], ids: Tensor) -> dict[str, object]:
    """The tokenizer reduced to these ids, in their order."""
    model = tokenizer["model"]
    assert isinstance(model, dict)
    places = {int(old): new for new, old in enumerate(ids.tolist())}
    vocabulary = {token: places[number] for token, number in model["vocab"].items() if number in places}
    merges = [[a, b] for a, b in model["merges"] if {a, b, a + b} <= vocabulary.keys()]
    added = [{**entry, "id": places[entry["id"]]} for entry in tokenizer["added_tokens"]]  # type: ignore[attr-defined]
    return {**tokenizer, "added_tokens": added, "model": {**model, "vocab": vocabulary, "merges": merges}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="token ids, as answers.py writes them")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder for the run's state")
    parser.add_argument("--states", type=Path, help="the target's states; those of `paceline train eagle` are used too")
    parser.add_argument("--ids", type=int, default=3072)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="to train on, repeats counted")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--feature-cache-gb", type=float, default=8.0)
    parser.add_argument("--minutes", type=float, help="stop after so long")
    given = parser.parse_args()
    folder = checkpoint_path(given.target)
    sizes = ModelConfig.from_pretrained(folder)
    stream = token_stream([given.data], folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    counts = torch.from_numpy(np.bincount(stream, minlength=sizes.vocab_size))
    vocabulary = DraftVocab(kept_ids(tokenizer, counts, given.ids), sizes.vocab_size)
    target = FrozenTarget(folder, default_layers(sizes.num_layers), precision=given.precision)
    texts = CachedTextOptions(feature_cache_gb=given.feature_cache_gb)
    corpus = FeatureCache(target, stream, texts, folder=given.states or given.work / "states")
    torch.manual_seed(0)
    model = cut(target, sizes, folder, vocabulary.ids)
    options = DraftTraining(
        given.batch_size, given.learning_rate, given.precision, max_minutes=given.minutes, tokens=given.tokens
    )
    trainer = DraftTrainer(
        model, corpus, options, output=target.output.detach(), vocabulary=vocabulary, folder=given.work
    )

    def show(step: int, steps: int, loss: float) -> None:
        if step % LOG_STEPS == 0:
            print(f"{step} of {steps}, loss {loss:.3f}", flush=True)

    if trainer.run(show):
        print(json.dumps({"agreement": round(trainer.agreement(), 4)}))
        write(given.out, model, vocabulary, folder=folder)


if __name__ == "__main__":
    main()
