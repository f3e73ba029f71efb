"""The operations of a decoder that decide its speed, as a contract, and their plain PyTorch form.

`TorchKernels` is what tests and debugging run on and what the native kernels are compared with. It promises that a
row's result does not depend on its place in the window or on the other rows; it makes no promise about speed. Not
here: normalisation, rotation, activation, which a backend compiles from plain PyTorch
(`paceline.decoder.models.llama`) unless its kernels know whole halves of a layer (`LayerKernels`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce as fold
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.core import noise, probs, reduce, tree
from paceline.core.types import SamplingTensors

_BY_ROW = 128  # up to so many rows (every window, no large prefill chunk) `TorchKernels.linear` goes row by row
_BLOCK = 128  # columns of the cache that `TorchKernels.attend` takes at a time


@dataclass(frozen=True, slots=True)
class Tree:
    """A window whose rows are nodes of a tree: each attends to the committed rows and to its own ancestors.

    parents  [b, T] int32, the row of the window each row hangs on; -1 for the root, row 0
    seen     [b, T, T] float32, 1 where row j is row i or an ancestor of it
    """

    parents: Tensor
    seen: Tensor

    @classmethod
    def of(cls, parents: Tensor) -> Tree:
        return cls(parents, tree.ancestor_mask(parents))

    @property
    def depth(self) -> Tensor:
        """How far each row is from the root. [b, T] int32"""
        return self.seen.sum(-1).to(torch.int32) - 1


@dataclass(frozen=True, slots=True)
class CachePosition:
    """Where in the cache the rows of a call belong.

    row    [b] int32, cache row of the first token of each line
    count  [b] int32, how many of a line's tokens are real; the rest is padding
    slots  [b] int32, which slot of the cache each line is
    bucket  how many cache rows the graph looks at (its bucket)
    padded whether ``count`` may be smaller than the window: then padding need not be computed
    tree   set where the window is a tree and not a run of consecutive tokens
    """

    row: Tensor
    count: Tensor
    slots: Tensor
    bucket: int
    padded: bool = False
    tree: Tree | None = None

    def positions(self, window: int) -> Tensor:
        """Position in the text of every token of a window. [b, T] int32"""
        steps = torch.arange(window, dtype=torch.int32, device=self.row.device)
        return self.row.unsqueeze(1) + (steps if self.tree is None else self.tree.depth)

    @property
    def real(self) -> Tensor | None:
        """``count`` if it says something."""
        return self.count if self.padded else None


@runtime_checkable
class Kernels(Protocol):
    """Lines b, tokens T of a line, heads H, key-value heads G, head width D, cache rows R.

    Activations are float32; weights and caches have the type that ``amp`` names.
    ``batch_invariant``: a row's bits do not depend on the number of rows of its window.
    """

    batch_invariant: bool

    @property
    def halves(self) -> LayerKernels | None:
        """The same kernels where they know whole halves of a layer as well; a divided model has no use for those."""

    def linear(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        """x [b, T, in] @ weight [out, in].T -> [b, T, out]; rows from ``count`` [b] on may hold anything finite."""

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], place: CachePosition) -> Tensor:
        """Write keys and values to their rows, then attend to all rows up to a token's own.

        In a tree, instead: to all rows before the window and to the token's own ancestors.
        q [b, T, H, D], k and v [b, T, G, D], cache twice [slots, G, R, D] (changed in place) -> [b, T, H * D]
        """

    def compact_path(self, cache: tuple[Tensor, Tensor], row: Tensor, path: Tensor, *, slots: Tensor) -> None:
        """Move the rows of an accepted path to where a chain would have put them, in place.

        cache twice [slots, G, R, D]; row [b] int32, of the window's root; path [b, D] int32, rows of the window in
        ascending order, PAD behind the last
        """

    def sample_tokens(
        self, logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, stream: int = noise.TARGET
    ) -> Tensor:
        """As `paceline.core.probs.sample_tokens`."""

    def probabilities(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        """As `paceline.core.probs.probabilities`, up to float32's rounding: the law that `choose` draws from."""

    def cuts(self, sampling: SamplingTensors) -> bool:
        """Whether top-k, top-p or min-p may be on in any row. A graph, which knows no values, says yes."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Of the first half of a layer: norm [H], q, k and v in one matrix [(heads + 2 G) D, H], output [H, heads D]."""

    norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    out_bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """Of the second half: norm [H], gate and up in one matrix [2 F, H], down [H, F]."""

    norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    eps: float


class LayerKernels(Protocol):
    """Attention and MLP of a layer, each with its norm and its sum onto the stream."""

    def attention(
        self,
        hidden: Tensor,
        weights: AttentionWeights,
        place: CachePosition,
        *,
        cache: tuple[Tensor, Tensor],
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        """hidden [b, T, H], cos and sin [b, T, 1, D] -> hidden [b, T, H]; rows from ``count`` on pass through."""

    def mlp(self, hidden: Tensor, weights: MlpWeights, count: Tensor | None = None) -> Tensor:
        """hidden [b, T, H] -> [b, T, H]; rows from ``count`` [b] on pass through."""


class TorchKernels:
    """Plain PyTorch on one device, eager."""

    batch_invariant = False  # matrix products of attention sum in an order that may depend on the number of rows
    halves = None

    def linear(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        weight = weight.float()
        rows = x.reshape(-1, x.shape[-1])
        if len(rows) > _BY_ROW:
            return torch.nn.functional.linear(x, weight)
        # A matrix product may sum a row in another order according to its place among the rows; this one does not.
        return torch.stack([torch.mv(weight, row) for row in rows]).view(*x.shape[:-1], -1)

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], place: CachePosition) -> Tensor:
        q, k, v = qkv
        lines, window, heads, width = q.shape
        groups = k.shape[2]
        steps = torch.arange(window, dtype=torch.int32, device=q.device)
        rows = place.row.unsqueeze(1) + steps  # [b, T]
        keys, values = (
            store(c, x.to(c.dtype), slots=place.slots, rows=rows) for c, x in zip(cache, (k, v), strict=True)
        )
        # Nodes of a tree may lie behind the bucket: more of them are tried than can be accepted.
        extent = place.bucket if place.tree is None else min(place.bucket + window, keys.shape[2])
        key_blocks, value_blocks = _blocks(keys, extent), _blocks(values, extent)
        query = q.view(lines, window, groups, heads // groups, width).transpose(1, 2).flatten(2, 3)
        query = query * (1 / math.sqrt(width))
        seen = _seen(place, rows, len(key_blocks) * _BLOCK).unsqueeze(1).repeat_interleave(heads // groups, dim=2)
        scores = [query @ block.transpose(2, 3) for block in key_blocks]  # [b, G, T * H/G, columns of a block] each
        scores = [torch.where(part, x, reduce.NEGATIVE) for part, x in zip(seen.split(_BLOCK, -1), scores, strict=True)]
        largest = fold(torch.maximum, [x.amax(-1, keepdim=True) for x in scores])
        weights = [torch.exp(x - largest) for x in scores]
        mass = fold(torch.add, [x.sum(-1, keepdim=True) for x in weights])
        mixed: Tensor = fold(torch.add, [x @ block for x, block in zip(weights, value_blocks, strict=True)]) / mass
        mixed = mixed.view(lines, groups, window, heads // groups, width)
        return mixed.transpose(1, 2).reshape(lines, window, heads * width)

    def compact_path(self, cache: tuple[Tensor, Tensor], row: Tensor, path: Tensor, *, slots: Tensor) -> None:
        to = row.unsqueeze(1) + torch.arange(1, path.shape[1] + 1, dtype=torch.int32, device=row.device)
        source = torch.where(path < 0, to, row.unsqueeze(1) + path)
        line = slots.unsqueeze(1)
        for one in cache:
            one[line, :, to] = one[line, :, source]

    def sample_tokens(
        self, logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, stream: int = noise.TARGET
    ) -> Tensor:
        if not bool((sampling.params[:, 0] > 0).any()):  # eager may look at values; a greedy law needs no noise
            return reduce.argmax(logits)
        return probs.sample_tokens(logits, positions, sampling, stream=stream, cut=self.cuts(sampling))

    def probabilities(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        return probs.probabilities(logits, sampling, cut=self.cuts(sampling))

    def cuts(self, sampling: SamplingTensors) -> bool:
        top_k, top_p, min_p = (sampling.params[:, i] for i in range(1, 4))
        return bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any())


def _blocks(cache: Tensor, extent: int) -> tuple[Tensor, ...]:
    """The first ``extent`` rows [b, G, extent, D] as float32 blocks of `_BLOCK` rows, the last filled up with zeros.

    A product may sum in another order according to its length. In equal blocks, added one after the other, a bucket
    that is longer than a text adds exact zeros to it and nothing else, so that a row's bits do not depend on it.
    """
    rows = cache[:, :, :extent].float()
    if missing := -extent % _BLOCK:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    blocks: tuple[Tensor, ...] = rows.split(_BLOCK, 2)
    return blocks


def _seen(place: CachePosition, rows: Tensor, extent: int) -> Tensor:
    """Which of the first ``extent`` cache rows every row [b, T] of a window attends to. [b, T, extent] bool"""
    columns = torch.arange(extent, dtype=torch.int32, device=rows.device)
    if place.tree is None:
        return columns <= rows.unsqueeze(-1)
    window = rows.shape[1]
    offset = (columns - place.row.unsqueeze(1)).unsqueeze(1).expand(-1, window, -1)  # from the root
    inside = place.tree.seen.gather(2, offset.clamp(0, window - 1).to(torch.int64)) > 0
    return (offset < 0) | (inside & (offset < window))


def store(cache: Tensor, new: Tensor, *, slots: Tensor, rows: Tensor) -> Tensor:
    """Write new [b, T, G, D] to rows [b, T] of slots [b] in place and return those slots' part, [b, G, R, D]."""
    cache[slots.unsqueeze(1), :, rows] = new
    return cache[slots]
