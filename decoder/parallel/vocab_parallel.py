"""Embedding, output layer and sampling of a token with the vocabulary sharded over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core import noise, probs, reduce
from paceline.core.types import SamplingTensors
from paceline.decoder.kernels.protocol import Kernels
from paceline.decoder.parallel.collectives import Collectives
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.decoder.weights.quantize import MatrixLike


@dataclass(frozen=True, slots=True)
class SharedHead:
    """Weights that a drafter may share with a target: this rank's rows of both tables [n, H], and their ids [n]."""

    embedding: MatrixLike
    head: MatrixLike
    ids: Tensor
    group: Collectives


def embedded(tokens: Tensor, table: MatrixLike, ids: Tensor, *, group: Collectives, kernels: Kernels) -> Tensor:
    """tokens [b, T] int32, this rank's rows of the table [n, H] and their ids [n] int32 -> [b, T, H] float32

    One rank has the row of a token and the others add zeros, so nothing is rounded.
    """
    if group.degree == 1:
        return kernels.embed(table, tokens)
    place = tokens - ids[0]
    own = (place >= 0) & (place < table.shape[0])
    rows = kernels.embed(table, torch.where(own, place, 0))
    return group.reduce(torch.where(own.unsqueeze(-1), rows, 0.0))


def whole(logits: Tensor, size: int, group: Collectives) -> Tensor:
    """Gather logits of this rank's ids [b, T, n] to all ids [b, T, V], on every rank."""
    if group.degree == 1:
        return logits
    return group.gather(logits).movedim(0, -2).flatten(-2)[..., :size]


def choose(
    logits: Tensor,
    positions: Tensor,
    sampling: SamplingTensors,
    *,
    part: VocabPart,
    kernels: Kernels,
    stream: int = noise.TARGET,
) -> Tensor:
    """Sample tokens from logits of this rank's ids, as `Kernels.sample_tokens`: [b, T, n] -> [b, T] int32

    Ranks exchange the best score and its id. If a filter may be on, kernels that read values gather whole rows, on
    which the kept tokens depend; kernels with sampling modes gather the largest, and may have ids with gaps.
    """
    if kernels.sampling_kinds and (part.divided or part.gaps):
        return kernels.sample_tokens(logits, positions, sampling, stream=stream, part=part)
    assert not part.gaps, "only graphs of a kind of sampling choose among some ids"
    if not part.divided:
        return kernels.sample_tokens(logits, positions, sampling, stream=stream)
    ids, size, group = part.ids, part.size, part.group
    if kernels.cuts(sampling):
        every = probs.apply_top_k_top_p_min_p(whole(logits, size, group), sampling)
        scores = every.index_select(-1, ids.clamp(max=size - 1))
    else:
        scores = probs.apply_temperature(logits, sampling)
    scores = probs.add_gumbel(scores, positions, sampling, ids=ids, stream=stream)
    scores = torch.where(ids < size, scores, 2 * reduce.NEGATIVE)  # padding rows of the last rank's part
    pair = group.gather(torch.stack(reduce.max_with_index(scores, ids.to(torch.float32), size), -1))
    _, winner = reduce.max_with_index(pair[..., 0].movedim(0, -1), pair[..., 1].movedim(0, -1), size)
    return reduce.clamp_ids(winner, size)


def rank(
    logits: Tensor,
    positions: Tensor,
    sampling: SamplingTensors,
    *,
    count: int,
    part: VocabPart,
    kernels: Kernels,
) -> tuple[Tensor, Tensor]:
    """Rank tokens from logits of this rank's ids, as `Kernels.rank_tokens`: [b, T, n] -> twice [b, T, count]"""
    if part.divided and kernels.sampling_kinds:
        return kernels.rank_tokens(logits, positions, sampling, count=count, part=part)
    every = whole(logits, part.size, part.group).contiguous()
    return kernels.rank_tokens(every, positions, sampling, count=count, part=part if part.gaps else None)
