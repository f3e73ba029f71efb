"""The native kernels as a backend's `Kernels`. `program.cpp` defines their operators.

Weights are stored in pages of 2 MB, if the system has them. Each token reads every weight once, in order. With pages of
4 kB that stream stops at every page: for an address translation, and because processors do not prefetch past the end of
a page.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from paceline.core import noise
from paceline.core.types import SamplingTensors
from paceline.decoder.kernels import plain
from paceline.decoder.kernels.plain import NORMS, NormKind
from paceline.decoder.kernels.protocol import (
    PLAIN_ATTENTION,
    AttentionRule,
    AttentionWeights,
    CachePosition,
    ExpertWeights,
    MlpWeights,
)
from paceline.decoder.native import build
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.decoder.weights.quantize import MatrixLike, PackedMatrix

PAGE = 2 << 20
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, and MADV_COLLAPSE of Linux 6.1: madvise(2)


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Move the memory of these tensors to huge pages, in place; addresses and contents are unchanged.

    Pages that mostly belong to other data are not moved, so that memory grows by little. Systems without huge pages
    lose only speed.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    runs = _runs(sorted(page for page, used in _pages(tensors).items() if used >= PAGE // 2))
    for run in runs:
        madvise(run.start, len(run), _HUGEPAGE)  # older systems then do it in the background
        madvise(run.start, len(run), _COLLAPSE)  # one call per range: each call waits for all processors


def _runs(pages: list[int]) -> list[range]:
    runs: list[range] = []
    for page in pages:
        if runs and runs[-1].stop == page:
            runs[-1] = range(runs[-1].start, page + PAGE)
        else:
            runs.append(range(page, page + PAGE))
    return runs


def _pages(tensors: Iterable[Tensor]) -> Counter[int]:
    used: Counter[int] = Counter()
    storages = (one.untyped_storage() for one in tensors)
    for begin, size in {(one.data_ptr(), one.nbytes()) for one in storages}:
        for page in range(begin // PAGE * PAGE, begin + size, PAGE):
            used[page] += min(begin + size, page + PAGE) - max(begin, page)
    return used


def _shape_first(x: Tensor, *_rest: object) -> Tensor:
    return torch.zeros_like(x)


def _shape_linear(x: Tensor, w: Tensor, *_rest: object) -> Tensor:
    return x.new_zeros(*x.shape[:-1], w.shape[0])


def _shape_attend(q: Tensor, *_rest: object) -> Tensor:
    return q.new_zeros(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def _shape_rotate(x: Tensor, *_rest: object) -> Tensor:
    return x.new_zeros(x.shape)


def _shape_activate(x: Tensor, _activation: int, gated: bool) -> Tensor:
    return x.new_zeros(*x.shape[:-1], x.shape[-1] // 2 if gated else x.shape[-1])


def _shape_embed(table: Tensor, ids: Tensor) -> Tensor:
    return table.new_zeros(*ids.shape, table.shape[1], dtype=torch.float32)


def _shape_keep(_ks: Tensor, _vs: Tensor, row: Tensor, *_rest: Tensor) -> Tensor:
    return torch.zeros_like(row)


def _shape_choose(logits: Tensor, *_rest: object) -> Tensor:
    return logits.new_zeros(*logits.shape[:-1], dtype=torch.int32)


def _shape_rank(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    count = rest[-1]
    assert isinstance(count, int)
    shape = (*logits.shape[:-1], count)
    return logits.new_zeros(shape, dtype=torch.int32), logits.new_zeros(shape)


SHAPES: dict[str, Callable[..., Any]] = {
    "row_linear": _shape_linear,
    "row_linear_real": _shape_linear,
    "row_attend": _shape_attend,
    "row_attention": _shape_first,
    "row_mlp": _shape_first,
    "row_experts": _shape_first,
    "row_norm": _shape_first,
    "row_rotate": _shape_rotate,
    "row_activate": _shape_activate,
    "row_embed": _shape_embed,
    "row_keep": _shape_keep,
    "row_choose": _shape_choose,
    "row_rank": _shape_rank,
    "row_probs": _shape_first,
}


_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Codes of `Format` in vectors.h."""


class Native:
    """The `Kernels` of a CPU, in C++. Inputs are made contiguous first."""

    batch_invariant = True
    sampling_kinds = False  # they read the values of every row
    skips_padding = True

    def __init__(self) -> None:
        build.program_library()
        self.layers = self.mixture = self

    def linear(self, x: Tensor, weight: MatrixLike, count: Tensor | None = None) -> Tensor:
        ops, (data, scales, code) = torch.ops.paceline, _stored(weight)
        product: Tensor = (
            ops.row_linear(x.contiguous(), data, scales, code)
            if count is None
            else ops.row_linear_real(x.contiguous(), data, scales, count, code)
        )
        return product

    def attend(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        cache: tuple[Tensor, Tensor],
        place: CachePosition,
        *,
        rule: AttentionRule = PLAIN_ATTENTION,
    ) -> Tensor:
        q, k, v = (x.contiguous() for x in qkv)
        at = (place.row, place.count, place.slots, None if place.tree is None else place.tree.parents)
        bent = (rule.slopes, rule.sinks, rule.window or -rule.chunk, rule.cap, place.both_ways)
        attended: Tensor = torch.ops.paceline.row_attend(q, k, v, *cache, *at, *bent)
        return attended

    def attention(
        self,
        hidden: Tensor,
        weights: AttentionWeights,
        place: CachePosition,
        *,
        cache: tuple[Tensor, Tensor],
        rotation: tuple[Tensor, Tensor],
    ) -> Tensor:
        w, tree = weights, place.tree
        (qkv, qkv_scales, qkv_code), (out, out_scales, out_code) = _stored(w.qkv), _stored(w.out)
        matrices = (w.norm, w.eps, qkv, w.qkv_bias, out, w.out_bias)
        turns = (x.contiguous() for x in rotation)
        at = (place.row, place.count, place.slots, None if tree is None else tree.parents)
        formats = (qkv_scales, out_scales, qkv_code, out_code)
        attended: Tensor = torch.ops.paceline.row_attention(
            hidden.contiguous(), *matrices, *turns, *cache, *at, *formats
        )
        return attended

    def mlp(self, hidden: Tensor, weights: MlpWeights, count: Tensor | None = None) -> Tensor:
        w = weights
        (gate_up, gate_up_scales, gate_up_code), (down, down_scales, down_code) = _stored(w.gate_up), _stored(w.down)
        matrices = (w.norm, w.eps, gate_up, w.gate_up_bias, down, w.down_bias)
        formats = (gate_up_scales, down_scales, gate_up_code, down_code)
        result: Tensor = torch.ops.paceline.row_mlp(hidden.contiguous(), *matrices, count, *formats)
        return result

    def norm(
        self, x: Tensor, weight: Tensor, *, eps: float, bias: Tensor | None = None, kind: NormKind = "rms"
    ) -> Tensor:
        normed: Tensor = torch.ops.paceline.row_norm(x.contiguous(), weight, bias, eps, NORMS.index(kind))
        return normed

    def rotate(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        rotated: Tensor = torch.ops.paceline.row_rotate(x, *(table.contiguous() for table in rotation))
        return rotated

    def activate(self, x: Tensor, activation: str, *, gated: bool) -> Tensor:
        made: Tensor = torch.ops.paceline.row_activate(x.contiguous(), plain.code(activation), gated)
        return made

    def embed(self, table: MatrixLike, ids: Tensor) -> Tensor:
        if isinstance(table, PackedMatrix):
            return table.gather(ids)
        rows: Tensor = torch.ops.paceline.row_embed(table, ids.contiguous())
        return rows

    def experts(self, x: Tensor, shares: Tensor, weights: ExpertWeights, *, count: Tensor | None = None) -> Tensor:
        w = weights
        (gate_up, gate_up_scales, gate_up_code), (down, down_scales, down_code) = _stored(w.gate_up), _stored(w.down)
        matrices = (gate_up, gate_up_scales, w.gate_up_bias, down, down_scales)
        codes = (plain.code(w.activation), gate_up_code, down_code)
        mixed: Tensor = torch.ops.paceline.row_experts(x.contiguous(), shares.contiguous(), *matrices, count, *codes)
        return mixed

    def compact_path(self, cache: tuple[Tensor, Tensor], row: Tensor, path: Tensor, *, slots: Tensor) -> None:
        torch.ops.paceline.row_keep(*cache, row, path.contiguous(), slots)

    def sample_tokens(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: SamplingTensors,
        *,
        stream: int = noise.TARGET,
        part: VocabPart | None = None,
    ) -> Tensor:
        tokens: Tensor = torch.ops.paceline.row_choose(
            logits, positions.contiguous(), sampling.params, sampling.seeds, stream
        )
        return tokens

    def rank_tokens(
        self,
        logits: Tensor,
        positions: Tensor,
        sampling: SamplingTensors,
        *,
        count: int,
        part: VocabPart | None = None,
    ) -> tuple[Tensor, Tensor]:
        ids = None if part is None else part.ids
        ranked: tuple[Tensor, Tensor] = torch.ops.paceline.row_rank(
            logits, positions.contiguous(), sampling.params, sampling.seeds, ids, count
        )
        return ranked

    def probabilities(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        probs: Tensor = torch.ops.paceline.row_probs(logits, sampling.params)
        return probs

    def cuts(self, sampling: SamplingTensors) -> bool:
        return True


def _stored(weight: MatrixLike) -> tuple[Tensor, Tensor | None, int]:
    """Return the numbers of a matrix, the scales of its rows if any, and the code of its format."""
    if isinstance(weight, PackedMatrix):
        return weight.data, weight.scales, weight.format.code
    return weight, None, _CODES[weight.dtype]
