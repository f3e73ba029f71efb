"""The kernels of a decoder in operations that ahead-of-time graph compilers take: XLA, and through it Neuron.

The same mathematics as `paceline.decoder.kernels.Reference`, without its freedoms: nothing looks at a value, caches are
written by one scatter of whole rows and read without a copy where the lines of a call are all slots in order, ids are
int32, and every flat row number stays exact in float32. Not here: speed on a CPU, which is the native kernels' part.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core import law, noise, reduce
from paceline.core.errors import ConfigurationError
from paceline.core.types import SamplingBatch
from paceline.decoder.kernels import Place

MAX_EXACT = 1 << 24
"""Integers below this survive a compiler that computes them in float32."""


class GraphKernels:
    """Plain operations of static shape."""

    def linear(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        """As `Kernels.linear`; padding is computed like everything else."""
        return torch.nn.functional.linear(x, weight.to(torch.float32))

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], place: Place) -> Tensor:
        """As `Kernels.attend`.

        Raises:
            ConfigurationError: the cache has more rows than can be numbered exactly.
        """
        q, k, v = qkv
        lines, window, heads, width = q.shape
        groups = k.shape[2]
        rows = place.row.unsqueeze(1) + torch.arange(window, dtype=torch.int32, device=q.device)  # [b, T]
        keys, values = (
            read(store(c, x.to(c.dtype), slots=place.slots, rows=rows), place.slots, place.reach).to(torch.float32)
            for c, x in zip(cache, (k, v), strict=True)
        )
        share = heads // groups
        query = q.reshape(lines, window, groups, share, width).permute(0, 2, 1, 3, 4)
        query = query.reshape(lines, groups, window * share, width) * (1 / math.sqrt(width))
        scores = torch.matmul(query, keys.transpose(2, 3)).reshape(lines, groups, window, share, place.reach)
        places = torch.arange(place.reach, dtype=torch.int32, device=q.device)
        seen = places <= rows.unsqueeze(-1)  # [b, T, reach]
        weights = law.softmax(torch.where(seen.unsqueeze(1).unsqueeze(3), scores, reduce.NEGATIVE))
        mixed = torch.matmul(weights.reshape(lines, groups, window * share, place.reach), values)
        mixed = mixed.reshape(lines, groups, window, share, width).permute(0, 2, 1, 3, 4)
        return mixed.reshape(lines, window, heads * width)

    def choose(
        self, logits: Tensor, positions: Tensor, sampling: SamplingBatch, *, stream: int = noise.TARGET
    ) -> Tensor:
        """As `Kernels.choose`; greedy is a value of the knobs, not a branch."""
        return law.choose(logits, positions, sampling, stream=stream)


def store(cache: Tensor, new: Tensor, *, slots: Tensor, rows: Tensor) -> Tensor:
    """Write new [b, T, G, D] to rows [b, T] of slots [b] of the cache [slots, G, R, D] in place, and return it.

    One scatter of rows of D numbers each, which is what a device's memory engine moves best.
    """
    lines, window, groups, width = new.shape
    total, _, room, _ = cache.shape
    if total * groups * room > MAX_EXACT:
        raise ConfigurationError(
            f"a cache of {total} slots x {groups} heads x {room} rows has more rows than a graph can number exactly "
            f"({MAX_EXACT}); use fewer slots or positions"
        )
    heads = torch.arange(groups, dtype=torch.int32, device=new.device)
    first = (slots.unsqueeze(1) * groups + heads) * room  # [b, G]
    flat = (first.unsqueeze(-1) + rows.unsqueeze(1)).reshape(lines * groups * window)
    wide = cache.view(total * groups * room, width)
    wide.index_put_((flat,), new.transpose(1, 2).reshape(lines * groups * window, width))
    return cache


def read(cache: Tensor, slots: Tensor, reach: int) -> Tensor:
    """The first ``reach`` rows of the slots' part of a cache. [slots, G, R, D] -> [b, G, reach, D]"""
    near = cache[:, :, :reach]
    # A call with a line for every slot has them in order, so nothing needs to be moved.
    return near if len(slots) == len(cache) else near.index_select(0, slots)
