"""Training of PARD decoders (An et al., arXiv 2504.18583): a decoder learns to draft a block from mask tokens.

It begins as a decoder with the target's vocabulary, or as some of the target's own layers. A text is read once; the
mask tokens of blocks at random anchors follow it, at the positions after their anchors (`paceline.heads.blocks`).
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.decoder.models.config import ModelConfig
from paceline.draft.options import PardOptions
from paceline.heads.blocks import BlockNetwork, Supervision, seen, train
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import TrainingData
from paceline.heads.frozen_model import FrozenTarget, Texts, transformers_model
from paceline.heads.layouts import write_json
from paceline.heads.options import BlockTraining, CachedTextOptions
from paceline.heads.trainer import Progress, rank


class TrainablePard(BlockNetwork):
    """A decoder of transformers in training; ``mask`` is the id of its mask token."""

    def __init__(self, model: Any, mask: int) -> None:
        super().__init__()
        self.model, self.mask = model.float().train(), mask
        self.model.requires_grad_(True)

    def blocks(self, texts: Texts, anchors: Tensor, k: int) -> Tensor:
        size, (b, count) = texts.tokens.shape[1], anchors.shape
        masks = texts.tokens.new_full((b, count * (k - 1)), self.mask)
        ahead = (anchors.unsqueeze(-1) + torch.arange(1, k, device=anchors.device)).flatten(1)
        positions = torch.cat([torch.arange(size, device=anchors.device).expand(b, -1), ahead], 1)
        text = torch.ones(size, size + count * (k - 1), dtype=torch.bool, device=anchors.device).tril()
        every = [text.expand(b, 1, -1, -1), seen(anchors, size, k - 1, last=0, causal=True)]
        hidden = self.model.get_decoder()(
            input_ids=torch.cat([texts.tokens, masks], 1),
            position_ids=positions,
            attention_mask=torch.zeros(()).masked_fill(~torch.cat(every, 2), torch.finfo(torch.float32).min),
            use_cache=False,
        ).last_hidden_state
        first = hidden.gather(1, anchors.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])).unsqueeze(2)
        later = hidden[:, size:].unflatten(1, (count, k - 1)) if k > 1 else first[:, :, :0]
        logits: Tensor = self.model.get_output_embeddings()(torch.cat([first, later], 2))
        return logits


def cut(model: Any, count: int) -> Any:
    """Return a copy of a model with its first ``count`` - 1 layers and its last."""
    made = deepcopy(model)
    layers, config = made.get_decoder().layers, made.config
    chosen = [*range(count - 1), len(layers) - 1]
    made.get_decoder().layers = nn.ModuleList(layers[index] for index in chosen)
    config.num_hidden_layers = count
    for name in ("layer_types", "no_rope_layers"):
        if values := getattr(config, name, None):
            setattr(config, name, [values[index] for index in chosen])
    return made


def train_pard(
    target: Path,
    data: TrainingData,
    decoder: PardOptions,
    *,
    texts: CachedTextOptions,
    options: BlockTraining,
    work: Path,
    out: Path,
    report: Progress,
) -> list[float] | None:
    """Train a decoder and write it to ``out`` in bfloat16, with acceptance.json; None if the time limit ended the run.
    Returns the share of blocks whose drafts 1, 2, ... are all right.
    """
    sizes = ModelConfig.from_pretrained(target)
    decoder.check(sizes)
    texts.check_room(sizes.max_position_embeddings, options.k)
    counts = data.counts(sizes.vocab_size)
    mask = int(counts.argmin()) if decoder.mask_token is None else decoder.mask_token
    frozen = FrozenTarget(target, precision=options.precision, device=options.device)
    if decoder.start is None:
        model = cut(frozen.model, decoder.num_layers)
    else:
        model = transformers_model(decoder.start, torch.float32)
    network = TrainablePard(model, mask).to(options.device)
    vocabulary = DraftVocab.frequent(counts, sizes.vocab_size).to(options.device)
    given = Supervision(frozen.output.detach(), vocabulary)
    corpus = data.corpus(frozen, texts, folder=work / "states")
    key = {"mask token": mask, "layers": model.config.num_hidden_layers, "start": str(decoder.start)}
    shares = train(network, corpus, options, given=given, folder=work, key=key, skip=data.skip(texts), report=report)
    if shares is not None and not rank():
        model.config.pard_token = mask
        model.to(torch.bfloat16).save_pretrained(out)
        write_json(out / "acceptance.json", {"greedy chains": [round(share, 4) for share in shares]})
    return shares
