"""Logits to probabilities and to sampled tokens: the only code that makes probabilities, for target and draft alike.

In float32 and Hugging Face's order: temperature, top-k, top-p, min-p. Greedy (temperature 0) is the one-hot
distribution of the largest logit, not a branch; of equal logits the lowest id wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core import noise, reduce
from paceline.core.types import SamplingTensors


def sample_tokens(
    logits: Tensor,
    positions: Tensor,
    sampling: SamplingTensors,
    *,
    stream: int = noise.TARGET,
    cut: bool = True,
) -> Tensor:
    """Sample a token for each row: argmax of the filtered, scaled logits plus the noise of its position.

    logits [B, T, V] float32, positions [B, T] int32 (of the token that is sampled) -> [B, T] int32
    ``cut=False`` skips top-k, top-p and min-p; the caller must know that they are off in every row.
    """
    scores = apply_top_k_top_p_min_p(logits, sampling) if cut else apply_temperature(logits, sampling)
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return reduce.argmax(add_gumbel(scores, positions, sampling, ids=ids, stream=stream))


def rank_tokens(
    logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, count: int, ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the first ``count`` choices of every row in their order, each as if those before it did not exist.

    logits [B, T, n] float32 of the ids [n] int32, ascending (None: all), positions [B, T] int32
    -> ids [B, T, count] int32, the first the one that `sample_tokens` returns; their log-probabilities [B, T, count]
    float32, where a row samples those of the distribution given the noise. Ids that the filters cut come last.
    """
    if ids is None:
        ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    hot = (sampling.params[:, 0] > 0).view(-1, 1, 1)
    scores = torch.where(hot, apply_top_k_top_p_min_p(logits, sampling), logits.to(torch.float32))
    drawn = add_gumbel(scores, positions, sampling, ids=ids)
    ordered, places = torch.sort(drawn, dim=-1, descending=True, stable=True)
    return ids[places[..., :count]], torch.log_softmax(ordered, -1)[..., :count]


def add_gumbel(
    scores: Tensor,
    positions: Tensor,
    sampling: SamplingTensors,
    *,
    ids: Tensor,
    stream: int = noise.TARGET,
) -> Tensor:
    """Add the noise of their position to filtered or scaled scores where a row samples: the largest is the choice.

    scores [B, T, V] float32 of the ids [V] or [B, T, V] int32, which may be only a part of the vocabulary
    -> [B, T, V] float32
    """
    hot = (sampling.params[:, 0] > 0).view(-1, 1, 1)
    drawn = noise.gumbel(sampling.seeds, positions, ids, stream=stream)
    return torch.where(hot, scores + drawn, scores)


def apply_temperature(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Divide logits by temperature; unchanged where it is 0. [B, T, V] -> [B, T, V] float32."""
    temperature = sampling.params[:, 0].view(-1, 1, 1)
    return logits.to(torch.float32) / torch.where(temperature > 0, temperature, 1.0)


def apply_top_k_top_p_min_p(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Set scaled logits to `reduce.NEGATIVE` where top-k, top-p or min-p cut. [B, T, V] -> [B, T, V] float32."""
    top_k, top_p, min_p = (sampling.params[:, i].view(-1, 1, 1) for i in range(1, 4))
    scores = apply_temperature(logits, sampling)
    count = torch.where(top_k > 0, top_k, float(logits.shape[-1])).expand(*scores.shape[:2], 1)
    scores = torch.where(reduce.topk_mask(scores, count.squeeze(-1)), scores, reduce.NEGATIVE)
    weights = softmax(scores)
    mass = top_p.expand(*scores.shape[:2], 1)
    inside = reduce.topp_mask(weights, mass.squeeze(-1)) | (mass >= 1.0)
    scores = torch.where(inside, scores, reduce.NEGATIVE)
    weights = softmax(scores)
    return torch.where(weights >= min_p * weights.amax(-1, keepdim=True), scores, reduce.NEGATIVE)


def probabilities(logits: Tensor, sampling: SamplingTensors, *, cut: bool = True) -> Tensor:
    """Return the distribution that `sample_tokens` samples from. [B, T, V] -> [B, T, V] float32, rows sum to one."""
    scores = apply_top_k_top_p_min_p(logits, sampling) if cut else apply_temperature(logits, sampling)
    hot = (sampling.params[:, 0] > 0).view(-1, 1, 1)
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    one_hot = (ids == reduce.argmax(scores).unsqueeze(-1)).to(torch.float32)
    return torch.where(hot, softmax(scores), one_hot)


def softmax(scores: Tensor) -> Tensor:
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)
