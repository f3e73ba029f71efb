"""What a head learns: losses, the training-time test, and the acceptance that it is measured by.

EAGLE-1 (arXiv 2401.15077, section 4.2): smooth L1 on the next hidden state, and cross-entropy against the target's
distribution. EAGLE-3 (arXiv 2503.01840): cross-entropy alone, over several passes in which the head reads its own
output, each with 0.8 times the weight of the one before. Not here: the run (`paceline.eagle.train`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.core.errors import ConfigurationError
from paceline.eagle.network import Past, TrainableHead
from paceline.eagle.options import EagleTraining
from paceline.training.frozen_model import Texts


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """Which ids a head drafts: ids [U] int64, ascending; all of the target's for version 1."""

    ids: Tensor
    size: int

    @classmethod
    def frequent(cls, counts: Tensor, keep: int) -> DraftVocab:
        """The ``keep`` most frequent ids, the lower one of equals. counts [V]"""
        order = torch.argsort(counts, descending=True, stable=True)
        return cls(order[:keep].sort().values, len(counts))

    def to(self, device: str) -> DraftVocab:
        """The same on another device."""
        return DraftVocab(self.ids.to(device), self.size)

    @property
    def offsets(self) -> Tensor:
        """d2t [U] int64: the target's id of draft id i is i + d2t[i]."""
        return self.ids - torch.arange(len(self.ids), device=self.ids.device)

    @property
    def mask(self) -> Tensor:
        """t2d [V] bool: whether the head can draft that id."""
        return torch.zeros(self.size, dtype=torch.bool, device=self.ids.device).index_fill(0, self.ids, True)


def objective(
    network: TrainableHead, texts: Texts, options: EagleTraining, *, head: Tensor, vocabulary: DraftVocab
) -> Tensor:
    """The loss of a few texts, a scalar. ``head`` [V, H] is the target's output layer."""
    last = texts.last.float()
    probs, inside = target_probs(last, head, vocabulary)
    if texts.counted is not None:
        inside = inside & texts.counted
    first, second, total = options.feature_weight, options.ce_weight, last.new_zeros(())
    if network.config.version == 3:
        first, second = 0.0, 1.0
    for index, (hidden, ahead) in enumerate(passes(network, texts, options.passes(network.config.version))):
        logits = network.logits(hidden).float()
        weights = inside[:, ahead:].float()
        surprise = -(probs[:, ahead:] * F.log_softmax(logits, -1)).sum(-1)
        loss = second * (surprise * weights).sum() / weights.sum().clamp(min=1)
        if first:
            errors = F.smooth_l1_loss(hidden.float(), last[:, ahead:], reduction="none").mean(-1)
            if texts.counted is not None:
                errors = errors[texts.counted[:, ahead:]]
            loss = loss + first * errors.mean()
        total = total + options.ttt_decay**index * loss
    return total


def passes(network: TrainableHead, texts: Texts, count: int) -> list[tuple[Tensor, int]]:
    """The training-time test. For every pass: hidden [b, S - a, H] and how far ahead, a, of it its target's state lies.

    Row i of pass j has read the target's features up to place i and the tokens up to i + 1 + j, and predicts the token
    that the target's state at place i + a, a = 1 + j, predicts.
    """
    past: Past = []
    size = texts.tokens.shape[1]
    features = texts.last if network.config.version == 1 else texts.streams
    hidden = network.fuse(features.float())
    predictions = []
    for index in range(min(count, size - 1)):
        hidden = network(texts.tokens.roll(-1 - index, 1), hidden, past)
        predictions.append((hidden[:, : size - 1 - index], 1 + index))
    return predictions


@torch.no_grad()
def target_probs(last: Tensor, head: Tensor, vocabulary: DraftVocab) -> tuple[Tensor, Tensor]:
    """The target's distribution over the drafted ids [b, S, U], and whether its best id is one of them [b, S]."""
    logits = F.linear(last, head).float()
    if len(vocabulary.ids) == vocabulary.size:
        return logits.softmax(-1), torch.ones(last.shape[:2], dtype=torch.bool, device=last.device)
    return logits[..., vocabulary.ids].softmax(-1), vocabulary.mask[logits.argmax(-1)]


@torch.no_grad()
def acceptance(
    network: TrainableHead, texts: Texts, *, depth: int, head: Tensor, vocabulary: DraftVocab, skip: int
) -> list[float]:
    """Share of places from ``skip`` on where drafts 1, 2, ... are all the target's greedy choice.

    On texts that the target wrote greedily this is the acceptance of greedy chains, each place being a beginning.

    Raises:
        ConfigurationError: there is no such place.
    """
    parts = [text_part(texts, index, 8) for index in range(-(-len(texts.tokens) // 8))]
    agreements = [_agreements(network, part, depth, head=head, vocabulary=vocabulary) for part in parts]
    agreed = torch.cat(agreements)
    places = torch.ones_like(agreed[:, 0])
    if texts.counted is not None:  # a chain counts where all that it drafts does
        places = texts.counted.unfold(1, depth + 1, 1).all(-1)
    places[:, :skip] = False
    if not bool(places.any()):
        raise ConfigurationError(
            f"no text to measure on has a place that counts with room for {depth} drafts; give more or longer ones"
        )
    return [float(row[places].double().mean()) for row in agreed.unbind(1)]


def _agreements(network: TrainableHead, texts: Texts, count: int, *, head: Tensor, vocabulary: DraftVocab) -> Tensor:
    """[b, passes, places] bool: whether drafts up to this pass were all right."""
    choices = F.linear(texts.last.float(), head).argmax(-1)
    size = texts.tokens.shape[1] - count
    standing = torch.ones(len(texts.tokens), size, dtype=torch.bool, device=choices.device)
    rows = []
    for hidden, ahead in passes(network, texts, count):
        drafts = vocabulary.ids[network.logits(hidden).argmax(-1)]
        standing = standing & (drafts[:, :size] == choices[:, ahead : ahead + size])
        rows.append(standing)
    return torch.stack(rows, 1)


def text_part(texts: Texts, index: int, rows: int) -> Texts:
    """Part ``index`` of some texts, ``rows`` of them."""
    return texts.part(slice(index * rows, (index + 1) * rows))
