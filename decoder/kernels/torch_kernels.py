"""The kernels of a decoder in plain PyTorch: for tests and debugging, and the reference for other kernels.

A row's result does not depend on its position in the window or on the other rows. Not made for speed.
"""

from __future__ import annotations

import math
from functools import reduce as fold

import torch
from torch import Tensor

from paceline.core import noise, probs, reduce
from paceline.core.types import SamplingTensors
from paceline.decoder.kernels.cache_rows import pack, unpack
from paceline.decoder.kernels.plain import PlainOperations, gate_with
from paceline.decoder.kernels.protocol import (
    PLAIN_ATTENTION,
    AttentionRule,
    CachePosition,
    ExpertWeights,
    MixtureKernels,
)
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.decoder.weights.quantize import MatrixLike, PackedMatrix

_BY_ROW = 128  # up to this many rows (every window, no large prefill chunk) `TorchKernels.linear` computes row by row
_BLOCK = 128  # cache columns that `TorchKernels.attend` computes at a time


class TorchKernels(PlainOperations):
    """Plain PyTorch on one device, eager."""

    batch_invariant = False  # matmuls of attention sum in an order that may depend on the number of rows
    sampling_kinds = False  # they read the values of every row
    skips_padding = False
    layers = None

    @property
    def mixture(self) -> MixtureKernels:
        return self

    def linear(self, x: Tensor, weight: MatrixLike, count: Tensor | None = None) -> Tensor:
        weight = weight.dequantize() if isinstance(weight, PackedMatrix) else weight.float()
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > _BY_ROW:
            return torch.nn.functional.linear(x, weight)
        # A matmul may sum a row in another order according to its position among the rows; this one does not.
        return torch.stack([torch.mv(weight, row) for row in rows]).view(*x.shape[:-1], -1)

    def attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        place: CachePosition,
        *,
        rule: AttentionRule = PLAIN_ATTENTION,
    ) -> Tensor:
        q, k, v = qkv
        batch, window, heads, width = q.shape
        groups = k.shape[2]
        steps = torch.arange(window, dtype=torch.int32, device=q.device)
        rows = place.row.unsqueeze(1) + steps  # [b, T]
        keys, values = (
            store(c, pack(x, c.dtype), slots=place.slots, rows=rows) for c, x in zip(cache, (k, v), strict=True)
        )
        # Nodes of a tree may be after the bucket: more nodes are tried than can be accepted.
        extent = place.bucket if place.tree is None else min(place.bucket + window, keys.shape[2])
        key_blocks, value_blocks = _blocks(keys, extent), _blocks(values, extent)
        query = q.view(batch, window, groups, heads // groups, width).transpose(1, 2).flatten(2, 3)
        query = query * (1 / math.sqrt(width))
        share, reach = heads // groups, len(key_blocks) * _BLOCK
        visible = within(_seen(place, rows, reach), place, rows, rule=rule)
        visible = visible.unsqueeze(1).repeat_interleave(share, dim=2)
        scores = [query @ block.transpose(2, 3) for block in key_blocks]  # [b, G, T * H/G, columns of a block] each
        if rule.cap:
            scores = [rule.cap * torch.tanh(x / rule.cap) for x in scores]
        if rule.slopes is not None:
            # [b, G, T, H/G, columns]
            pull = rule.slopes.view(groups, 1, share, 1) * distances(place, rows, reach)[:, None, :, None]
            scores = [x + y for x, y in zip(scores, pull.flatten(2, 3).split(_BLOCK, -1), strict=True)]
        scores = [
            torch.where(part, x, reduce.NEGATIVE) for part, x in zip(visible.split(_BLOCK, -1), scores, strict=True)
        ]
        largest = fold(torch.maximum, [x.amax(-1, keepdim=True) for x in scores])
        sinks = rule.sinks
        if sinks is not None:
            sinks = sinks.view(groups, 1, share, 1).expand(-1, window, -1, -1).flatten(1, 2)
            largest = torch.maximum(largest, sinks)
        weights = [torch.exp(x - largest) for x in scores]
        mass = fold(torch.add, [x.sum(-1, keepdim=True) for x in weights])
        mass = mass if sinks is None else mass + torch.exp(sinks - largest)
        mixed: Tensor = fold(torch.add, [x @ block for x, block in zip(weights, value_blocks, strict=True)]) / mass
        mixed = mixed.view(batch, groups, window, heads // groups, width)
        return mixed.transpose(1, 2).reshape(batch, window, heads * width)

    def experts(self, x: Tensor, shares: Tensor, weights: ExpertWeights, *, count: Tensor | None = None) -> Tensor:
        rows, share = x.reshape(-1, x.shape[-1]), shares.reshape(-1, shares.shape[-1])
        if count is not None:
            real = torch.arange(x.shape[1], device=x.device) < count.unsqueeze(1)
            share = torch.where(real.reshape(-1, 1), share, 0.0)
        total = torch.zeros_like(rows)
        bias = None if weights.gate_up_bias is None else weights.gate_up_bias.view(share.shape[1], -1)
        for number in (share != 0).any(0).nonzero().flatten().tolist():
            gate_up, down = (_expert(one, number, of=share.shape[1]) for one in (weights.gate_up, weights.down))
            for place in (share[:, number] != 0).nonzero().flatten().tolist():  # row by row, as in `linear`
                both = torch.mv(gate_up, rows[place])
                both = both if bias is None else both + bias[number]
                mixed = torch.mv(down, gate_with(both, weights.activation))
                total[place] += share[place, number] * mixed
        return total.view_as(x)

    def compact_path(self, cache: tuple[Tensor, Tensor], row: Tensor, path: Tensor, *, slots: Tensor) -> None:
        to = row.unsqueeze(1) + torch.arange(1, path.shape[1] + 1, dtype=torch.int32, device=row.device)
        source = torch.where(path < 0, to, row.unsqueeze(1) + path)
        line = slots.unsqueeze(1)
        for one in cache:
            one[line, :, to] = one[line, :, source]

    def sample_tokens(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: SamplingTensors,
        *,
        stream: int = noise.TARGET,
        part: VocabPart | None = None,
    ) -> Tensor:
        if not bool((sampling.params[:, 0] > 0).any()):  # eager may read values; greedy rows need no noise
            return reduce.argmax(logits)
        return probs.sample_tokens(logits, positions, sampling, stream=stream, cut=self.cuts(sampling))

    def rank_tokens(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: SamplingTensors,
        *,
        count: int,
        part: VocabPart | None = None,
    ) -> tuple[Tensor, Tensor]:
        return probs.rank_tokens(logits, positions, sampling, count=count, ids=None if part is None else part.ids)

    def probabilities(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        return probs.probabilities(logits, sampling, cut=self.cuts(sampling))

    def cuts(self, sampling: SamplingTensors) -> bool:
        top_k, top_p, min_p = (sampling.params[:, i] for i in range(1, 4))
        return bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())


def _expert(stack: MatrixLike, number: int, *, of: int) -> Tensor:
    rows = stack.shape[0] // of
    if isinstance(stack, PackedMatrix):
        return stack.gather(torch.arange(number * rows, (number + 1) * rows))
    return stack.narrow(0, number * rows, rows).float()


def _blocks(cache: Tensor, extent: int) -> tuple[Tensor, ...]:
    """Split the first ``extent`` rows [b, G, extent, D] into float32 blocks of `_BLOCK` rows, the last padded with
    zeros.

    A matmul may sum in another order according to its length. In equal blocks, added in order, a bucket longer than a
    sequence adds only exact zeros, so that a row's bits do not depend on the bucket.
    """
    rows = unpack(cache[:, :, :extent])
    if missing := -extent % _BLOCK:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    blocks: tuple[Tensor, ...] = rows.split(_BLOCK, 2)
    return blocks


def _seen(place: CachePosition, rows: Tensor, extent: int) -> Tensor:
    """Mark which of the first ``extent`` cache rows every row [b, T] of a window attends to. [b, T, extent] bool"""
    columns = torch.arange(extent, dtype=torch.int32, device=rows.device)
    if place.both_ways:
        return (columns < (place.row + place.count).unsqueeze(1)).unsqueeze(1).expand(-1, rows.shape[1], -1)
    if place.tree is None:
        return columns <= rows.unsqueeze(-1)
    window = rows.shape[1]
    offset = (columns - place.row.unsqueeze(1)).unsqueeze(1).expand(-1, window, -1)  # from the root
    inside = place.tree.seen.gather(2, offset.clamp(0, window - 1).to(torch.int64)) > 0
    return (offset < 0) | (inside & (offset < window))


def distances(place: CachePosition, rows: Tensor, extent: int) -> Tensor:
    """Position of each of the first ``extent`` cache rows minus that of every row [b, T] of a window.

    [b, T, extent] float32; a row of a tree has the position of its depth.
    """
    columns = torch.arange(extent, dtype=torch.int32, device=rows.device).to(torch.float32)
    if place.tree is None:
        return columns - rows.unsqueeze(-1).to(torch.float32)
    depth = place.tree.depth.to(torch.float32)
    start = place.row.unsqueeze(1).to(torch.float32)
    here = (columns == rows.unsqueeze(-1)).to(torch.float32)  # [b, T, extent], cache row of each row of the window
    behind = rows.to(torch.float32) - (start + depth)  # cache row minus position
    positions = columns - (here * behind.unsqueeze(-1)).sum(1)
    return positions.unsqueeze(1) - (start + depth).unsqueeze(-1)


def within(visible: Tensor, place: CachePosition, rows: Tensor, *, rule: AttentionRule) -> Tensor:
    """Restrict ``visible`` [b, T, extent] to the sliding window or the chunk of a rule, if it has one."""
    if rule.chunk:
        positions = place.positions(rows.shape[1]).to(torch.float32).unsqueeze(-1)
        inside = positions - rule.chunk * torch.floor(positions / rule.chunk)
        return visible & (distances(place, rows, visible.shape[-1]) >= -inside)
    if not rule.window:
        return visible
    return visible & (distances(place, rows, visible.shape[-1]) > -rule.window)


def store(cache: Tensor, new: Tensor, *, slots: Tensor, rows: Tensor) -> Tensor:
    """Write new [b, T, G, D] to rows [b, T] of slots [b] in place and return those slots' part, [b, G, R, D]."""
    cache[slots.unsqueeze(1), :, rows] = new
    return cache[slots]
