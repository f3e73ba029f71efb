"""Training of drafters that draft a block in one pass: DFlash and PARD.

A block begins at an anchor, a random position p of a text. Its draft j, from 0 on, is of position p + 1 + j, which the
target's state at p + j predicts. Blocks do not see each other.

Letters: b texts, S their length, A anchors of a text, k drafts of a block, U ids that can be drafted, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.core.errors import ConfigurationError
from paceline.heads.checkpoint import DraftVocab
from paceline.heads.features import Corpus
from paceline.heads.frozen_model import Texts
from paceline.heads.losses import LOSSES, chain_loss, right, target_probs
from paceline.heads.options import BlockTraining
from paceline.heads.trainer import CorpusTrainer, Progress

_MEASURED = 64  # anchors of a text to measure on


class BlockNetwork(nn.Module, ABC):
    """A drafter in training."""

    @abstractmethod
    def blocks(self, texts: Texts, anchors: Tensor, k: int) -> Tensor:
        """Return the logits [b, A, k, U] of blocks at anchors [b, A]."""


@dataclass(frozen=True, slots=True)
class Supervision:
    """The target's output layer [V, H], and the ids that are drafted."""

    head: Tensor
    vocabulary: DraftVocab


def seen(anchors: Tensor, size: int, rows: int, *, last: int, causal: bool) -> Tensor:
    """Return what rows of blocks see of a text and of the blocks, [b, 1, A * rows, size + A * rows] bool.

    last    offset from the anchor of the last position of the text that they see
    causal  a row of a block sees the rows before it; otherwise all rows of its block
    """
    b, count = anchors.shape
    text = torch.arange(size, device=anchors.device) <= (anchors + last).unsqueeze(-1)
    inner = torch.ones(rows, rows, dtype=torch.bool, device=anchors.device)
    own = torch.block_diag(*[(inner.tril() if causal else inner).float()] * count).bool()
    return torch.cat([text.repeat_interleave(rows, 1), own.expand(b, -1, -1)], -1).unsqueeze(1)


def anchors_of(texts: Texts, count: int, k: int, *, skip: int = 0, seed: int) -> Tensor:
    """Return random anchors [b, A] from position ``skip`` on, at most ``count``, those first whose drafts count."""
    size = texts.tokens.shape[1] - k
    if size < 1:
        raise ConfigurationError(
            f"k: expected fewer drafts than the {texts.tokens.shape[1]} tokens of the shortest texts, got {k}; lower "
            "it, or give longer texts"
        )
    order = torch.rand(len(texts.tokens), size, generator=torch.Generator().manual_seed(seed)).to(texts.tokens.device)
    order[:, :skip] += 2
    if texts.counted is not None:
        order += (~texts.counted[:, :size]).float()
    return order.topk(min(count, size), 1, largest=False).indices.sort(1).values


def _at(values: Tensor, anchors: Tensor, k: int) -> Tensor:
    """Return values [b, S, ...] at the positions of blocks, [b, A, k, ...]."""
    places = anchors.unsqueeze(-1) + torch.arange(k, device=anchors.device)
    return values[torch.arange(len(values), device=anchors.device).view(-1, 1, 1), places]


def _known(texts: Texts, anchors: Tensor, k: int) -> Tensor:
    """Return whether a draft and all before it in its block count, [b, A, k] bool."""
    counted = torch.ones_like(texts.tokens, dtype=torch.bool) if texts.counted is None else texts.counted
    return _at(counted, anchors, k).cumprod(-1).bool()


def objective(network: BlockNetwork, texts: Texts, options: BlockTraining, *, given: Supervision, seed: int) -> Tensor:
    k = options.k
    anchors = anchors_of(texts, options.anchors, k, seed=seed)
    known = _known(texts, anchors, k)
    probs, inside = target_probs(_at(texts.last, anchors, k)[known].float(), given.head, given.vocabulary)
    logits = network.blocks(texts, anchors, k)[known].float()
    losses, rates = torch.zeros(known.shape, device=known.device), torch.ones(known.shape, device=known.device)
    losses[known] = LOSSES[options.loss](logits, probs)
    rates[known] = right(logits.detach(), probs)
    drafted = known.clone()
    drafted[known] = inside
    return chain_loss(losses, rates, drafted, decay=None if options.dpace else options.decay)


@torch.no_grad()
def acceptance(network: BlockNetwork, texts: Texts, given: Supervision, *, k: int, skip: int) -> list[float]:
    """Return the share of blocks whose drafts 1, 2, ... are all the target's greedy token, from ``skip`` on."""
    agreed: list[Tensor] = []
    for index in range(len(texts.tokens)):
        part = texts.rows(index, 1)
        anchors = anchors_of(part, _MEASURED, k, skip=skip, seed=index)
        whole = _known(part, anchors, k).all(-1) & (anchors >= skip)
        wanted = F.linear(_at(part.last, anchors, k).float(), given.head).argmax(-1)
        found = given.vocabulary.ids[network.blocks(part, anchors, k).argmax(-1)]
        agreed.append((found == wanted).cumprod(-1)[whole])
    shares = torch.cat(agreed).double()
    if not len(shares):
        raise ConfigurationError(
            f"data: expected at least one sequence to evaluate on with space for {k} draft tokens, got none; give "
            "more or longer ones"
        )
    return [float(share) for share in shares.mean(0)]


def train(
    network: BlockNetwork,
    corpus: Corpus,
    options: BlockTraining,
    *,
    given: Supervision,
    folder: Path,
    key: Mapping[str, object],
    skip: int,
    report: Progress,
) -> list[float] | None:
    """Train a network; None if the time limit ended the run. Returns the share of blocks whose drafts 1, 2, ... are all
    right, from position ``skip`` of a text on.
    """
    measured = corpus.eval_texts()

    def measure() -> list[float]:
        return acceptance(network, measured, given, k=options.k, skip=skip)

    class Blocks(CorpusTrainer):
        def objective(self, batch: Texts) -> Tensor:
            return objective(network, batch, options, given=given, seed=self.step)

    key = {**key, "drafted ids": given.vocabulary.key}
    trainer = Blocks(network, corpus, options, folder=folder, key=key, measure=measure)
    return measure() if trainer.run(report) else None
