"""Losses of a draft against the target's distribution, and weights of the drafts of a chain."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.heads import options
from paceline.heads.checkpoint import DraftVocab

_SMOOTHING = 0.5  # of a rate in D-PACE, as in the paper


@torch.no_grad()
def target_probs(last: Tensor, head: Tensor, vocabulary: DraftVocab) -> tuple[Tensor, Tensor]:
    """Return the target's distribution over the drafted ids [..., U], and whether its best id is one of them [...].
    last [..., H]
    """
    logits = F.linear(last, head).float()
    if len(vocabulary.ids) == vocabulary.size:
        return logits.softmax(-1), torch.ones(last.shape[:-1], dtype=torch.bool, device=last.device)
    return logits[..., vocabulary.ids].softmax(-1), vocabulary.mask[logits.argmax(-1)]


def cross_entropy(logits: Tensor, probs: Tensor) -> Tensor:
    """logits [..., U] of the head, probs [..., U] of the target -> [...]"""
    return -(probs * F.log_softmax(logits, -1)).sum(-1)


def overlap(logits: Tensor, probs: Tensor) -> Tensor:
    """Return the rate at which `Reject` accepts a draft: 1 less the total variation distance. -> [...]"""
    return torch.minimum(logits.softmax(-1), probs).sum(-1)


def negative_log_acceptance(logits: Tensor, probs: Tensor) -> Tensor:
    """The likelihood loss of LK (arXiv 2602.23881): the negative logarithm of the acceptance rate."""
    return -overlap(logits, probs).clamp(min=1e-5).log()


def lk_hybrid(logits: Tensor, probs: Tensor) -> Tensor:
    """The hybrid loss of LK (arXiv 2602.23881): the divergence of Kullback and Leibler where little would be accepted,
    the total variation distance where much would be; the weight falls with e to the power of -3 times the rate.
    """
    rate = overlap(logits, probs)
    weight = torch.exp(-3.0 * rate.detach())
    divergence = cross_entropy(logits, probs) + torch.xlogy(probs, probs).sum(-1)
    return weight * divergence + (1 - weight) * (1 - rate)


LOSSES = dict(zip(options.LOSSES, (cross_entropy, lk_hybrid, negative_log_acceptance), strict=True))


@torch.no_grad()
def dpace(rates: Tensor, known: Tensor) -> Tensor:
    """Return D-PACE's weights of the drafts of chains (arXiv 2605.18810): the expected number of accepted drafts from a
    position on, so that training moves to the positions that limit a chain.

    rates [..., k] at which drafts 1, 2, ... are right; known [..., k] bool, where there is a draft to learn.
    """
    smooth = _SMOOTHING + (1 - _SMOOTHING) * torch.where(known, rates, 0.0)  # a chain ends where none is known
    reached = smooth.cumprod(-1) * known
    return reached.flip(-1).cumsum(-1).flip(-1) * known


def right(logits: Tensor, probs: Tensor) -> Tensor:
    """Return the probability in the head of the target's best id. logits, probs [..., U] -> [...]"""
    best = probs.argmax(-1, keepdim=True)
    return (logits.gather(-1, best) - logits.logsumexp(-1, keepdim=True)).exp().squeeze(-1)


def chain_loss(losses: Tensor, rates: Tensor, known: Tensor, *, decay: float | None) -> Tensor:
    """Combine the losses [..., k] of drafts 1, 2, ... of chains. ``decay``: weight of a draft relative to the one
    before; None: D-PACE's weights. ``rates`` and ``known``: see `dpace`.
    """
    if decay is None:
        weights = dpace(rates, known)
        return (losses * weights).sum() / weights.sum().clamp(min=1e-6)
    means = (losses * known).flatten(0, -2).sum(0) / known.flatten(0, -2).sum(0).clamp(min=1)
    return (means * decay ** torch.arange(len(means), device=means.device)).sum()
