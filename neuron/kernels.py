"""The kernels of a decoder in operations of ahead-of-time graph compilers: XLA, and through it Neuron.

The same mathematics as `paceline.decoder.kernels.torch_kernels.TorchKernels`, except that both operands of a matmul
have the type of the weights or of the cache (sums, norms, softmax and logits are float32), and with more restrictions:
no value is inspected, caches are written by one scatter of whole rows and read without a copy if the batch is all slots
in order, ids are int32, and every flat row number is exact in float32. The native kernels are the fast ones on a CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from paceline.core import probs, reduce
from paceline.core.errors import ConfigurationError
from paceline.core.types import SamplingTensors
from paceline.decoder.kernels.cache_rows import flat, store
from paceline.decoder.kernels.plain import PlainOperations
from paceline.decoder.kernels.protocol import PLAIN_ATTENTION, AttentionRule, CachePosition
from paceline.decoder.kernels.torch_kernels import distances, within
from paceline.decoder.weights.quantize import MatrixLike, PackedMatrix
from paceline.neuron import graph_product, graph_sampling, prompt_attention
from paceline.neuron.prompt_attention import Chunk, PromptAttention


class TraceableKernels(PlainOperations):
    """Plain operations of static shape.

    ``prompts`` selects the chunks of prompts for an attention kernel of the device's library; None: it has none.
    """

    batch_invariant = False  # a compiler may order a row's sums by the number of rows
    skips_padding = False
    sampling_kinds = True  # values are not inspected, so properties common to all rows must be known beforehand
    layers = None
    mixture = None  # every expert computes every row: the active ones depend on values

    def __init__(self, prompts: PromptAttention | None = None) -> None:
        self._prompts = prompts

    def linear(self, x: Tensor, weight: MatrixLike, count: Tensor | None = None) -> Tensor:
        """Multiply x by a weight, as `Kernels.linear`; padding is computed too.

        8-bit numbers are exact in bfloat16, in which they are multiplied; scales are applied to the sums.
        """
        if isinstance(weight, PackedMatrix):
            if weight.scales is None:
                raise ConfigurationError(
                    f"quantization: graphs for xla and neuron do not support {weight.format.value} blocks; use "
                    "quantization='int8', or the backend native or eager"
                )
            return graph_product.linear(x, weight.data.to(torch.bfloat16)) * weight.scales
        return graph_product.linear(x, weight)

    def attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        place: CachePosition,
        *,
        rule: AttentionRule = PLAIN_ATTENTION,
    ) -> Tensor:
        """Write keys and values, then attend, as `Kernels.attend`.

        Raises:
            ConfigurationError: the cache has more rows than can be numbered exactly.
        """
        q, k, v = qkv
        batch, window, heads, width = q.shape
        groups, share = k.shape[2], heads // k.shape[2]
        rows = place.row.unsqueeze(1) + torch.arange(window, dtype=torch.int32, device=q.device)  # [b, T]
        if self._prompts is not None and place.padded and batch == 1 and place.tree is None and not place.both_ways:
            chunk = Chunk(window, place.bucket - window, heads, groups, width, cache[0].dtype)
            if self._prompts.takes(chunk, rule):
                return read_prompt(qkv, cache, place, before=chunk.before, window=rule.window)
        # Nodes of a tree may be after the bucket: more nodes are tried than can be accepted.
        extent = place.bucket if place.tree is None else min(place.bucket + window, cache[0].shape[2])
        for part, new in zip(cache, (k, v), strict=True):
            store(part, new.transpose(1, 2).to(part.dtype), slots=place.slots, rows=rows)
        keys, values = (read(part, place.slots, extent, in_order=place.in_order) for part in cache)
        query = q.reshape(batch, window, groups, share, width).permute(0, 2, 1, 3, 4)
        query = query.reshape(batch, groups, window * share, width) * (1 / math.sqrt(width))
        scores = graph_product.matmul(query, keys).reshape(batch, groups, window, share, extent)
        if rule.cap:
            scores = rule.cap * torch.tanh(scores / rule.cap)
        if rule.slopes is not None:
            slopes = rule.slopes.view(groups, 1, share, 1)
            scores = scores + slopes * distances(place, rows, extent).unsqueeze(1).unsqueeze(3)
        seen = within(visible(place, rows, extent), place, rows, rule=rule).unsqueeze(1).unsqueeze(3)
        scores = torch.where(seen, scores, reduce.NEGATIVE)
        if rule.sinks is not None:
            beside = rule.sinks.view(groups, 1, share, 1).expand(batch, -1, window, -1, -1)
            scores = torch.cat((scores, beside), -1)
        weights = probs.softmax(scores)[..., :extent]
        mixed = graph_product.matmul(weights.reshape(batch, groups, window * share, extent), values.transpose(2, 3))
        mixed = mixed.reshape(batch, groups, window, share, width).permute(0, 2, 1, 3, 4)
        return mixed.reshape(batch, window, heads * width)

    def compact_path(self, cache: tuple[Tensor, Tensor], row: Tensor, path: Tensor, *, slots: Tensor) -> None:
        """Move the rows of an accepted path, as `Kernels.compact_path`."""
        to = row.unsqueeze(1) + torch.arange(1, path.shape[1] + 1, dtype=torch.int32, device=row.device)
        source = torch.where(path < 0, to, row.unsqueeze(1) + path)
        for part in cache:
            total, groups, room, width = part.shape
            taken = part.view(total * groups * room, width).index_select(0, flat(part, slots, source))
            store(part, taken.view(len(slots), groups, -1, width), slots=slots, rows=to)

    sample_tokens = staticmethod(graph_sampling.sample_tokens)
    rank_tokens = staticmethod(graph_sampling.rank_tokens)
    probabilities = staticmethod(graph_sampling.probabilities)

    def cuts(self, sampling: SamplingTensors) -> bool:
        """Return whether a filter may be on, as `Kernels.cuts`."""
        return True


def read(cache: Tensor, slots: Tensor, extent: int, *, in_order: bool = False) -> Tensor:
    """Return the first ``extent`` rows of the slots' part of a cache. [slots, G, R, D] -> [b, G, extent, D]"""
    near = cache[:, :, :extent]
    # The first slots, in order, or all of them: no copy is needed.
    if len(slots) == len(cache):
        return near
    return near[: len(slots)] if in_order else near.index_select(0, slots)


def read_prompt(
    qkv: tuple[Tensor, Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    place: CachePosition,
    *,
    before: int,
    window: int,
) -> Tensor:
    """Attend for one batch row that is a prompt's chunk after at most ``before`` rows, as `Kernels.attend`.

    Keys and values are those of the cache's type; cached rows are read without waiting for them.
    """
    q, *new = qkv
    _, length, heads, width = q.shape
    query = (q[0].transpose(0, 1) * (1 / math.sqrt(width))).to(cache[0].dtype)
    keys, values = (x[0].transpose(0, 1).to(part.dtype) for x, part in zip(new, cache, strict=True))
    prior = [*(read(part, place.slots, before)[0] for part in cache), place.row] if before else []
    mixed: Tensor = prompt_attention.operator()([query, keys, values], prior, window)
    rows = place.row.unsqueeze(1) + torch.arange(length, dtype=torch.int32, device=q.device)
    for part, rows_of in zip(cache, (keys, values), strict=True):
        store(part, rows_of.unsqueeze(0), slots=place.slots, rows=rows)
    return mixed.float().transpose(0, 1).reshape(1, length, heads * width)


def visible(place: CachePosition, rows: Tensor, extent: int) -> Tensor:
    """Mark which of the first ``extent`` cache rows every row [b, T] of a window attends to. [b, T, extent] bool"""
    columns = torch.arange(extent, dtype=torch.int32, device=rows.device)
    if place.both_ways:
        return (columns < (place.row + place.count).unsqueeze(1)).unsqueeze(1).expand(-1, rows.shape[1], -1)
    if place.tree is None:
        return columns <= rows.unsqueeze(-1)
    here = (columns == rows.unsqueeze(-1)).to(torch.float32)  # [b, T, extent], cache row of each row of the window
    inside = torch.matmul(place.tree.seen, here) > 0
    return (columns < place.row.unsqueeze(1)).unsqueeze(1) | inside
