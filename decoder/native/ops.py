"""The native kernels as PyTorch operators, so that graphs can be traced through them.

A compiled graph calls the library directly (see `c_shims`); the Python implementations below serve tests and tracing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from paceline.core import noise
from paceline.core.types import SamplingTensors
from paceline.decoder.kernels.cache_rows import row_numbers
from paceline.decoder.kernels.protocol import (
    PLAIN_ATTENTION,
    AttentionRule,
    AttentionWeights,
    CachePosition,
    MlpWeights,
)
from paceline.decoder.native import build, experts
from paceline.decoder.native.arguments import DTYPES, pointer, stored
from paceline.decoder.weights.quantize import MatrixLike

_CACHES = {**DTYPES, torch.int8: 3, torch.float8_e4m3fn: 7, torch.float8_e5m2: 8}
_SCHEMAS = """
row_linear(Tensor x, Tensor w, Tensor? scales, int format) -> Tensor
row_linear_real(Tensor x, Tensor w, Tensor? scales, Tensor count, int format) -> Tensor
row_attend(Tensor q, Tensor k, Tensor v, Tensor(a!) ks, Tensor(b!) vs, Tensor row, Tensor count, Tensor slots, \
Tensor? parents, Tensor? slopes, int reach, float cap) -> Tensor
row_attention(Tensor hidden, Tensor norm, float eps, Tensor qkv, Tensor? qkv_bias, Tensor out, Tensor? out_bias, \
Tensor cos, Tensor sin, Tensor(a!) ks, Tensor(b!) vs, Tensor row, Tensor count, Tensor slots, Tensor? parents, \
Tensor? qkv_scales, Tensor? out_scales, int qkv_format, int out_format) -> Tensor
row_mlp(Tensor hidden, Tensor norm, float eps, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, \
Tensor? count, Tensor? gate_up_scales, Tensor? down_scales, int gate_up_format, int down_format) -> Tensor
row_keep(Tensor(a!) ks, Tensor(b!) vs, Tensor row, Tensor path, Tensor slots) -> Tensor
row_choose(Tensor logits, Tensor positions, Tensor params, Tensor keys, int stream) -> Tensor
row_rank(Tensor logits, Tensor positions, Tensor params, Tensor keys, Tensor? ids, int count) -> (Tensor, Tensor)
row_probs(Tensor logits, Tensor params) -> Tensor
"""


class Native:
    """The `Kernels` of a CPU, compiled. Inputs must be contiguous, which is made sure of here."""

    batch_invariant = True
    sampling_kinds = False  # they look at the values of every row
    skips_padding = True

    def __init__(self) -> None:
        register()
        self.layers, self.mixture = self, experts.NativeExperts()

    def linear(self, x: Tensor, weight: MatrixLike, count: Tensor | None = None) -> Tensor:
        ops, (data, scales, code) = torch.ops.paceline, stored(weight)
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
        bent = (rule.slopes, rule.window, rule.cap)
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
        (qkv, qkv_scales, qkv_code), (out, out_scales, out_code) = stored(w.qkv), stored(w.out)
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
        (gate_up, gate_up_scales, gate_up_code), (down, down_scales, down_code) = stored(w.gate_up), stored(w.down)
        matrices = (w.norm, w.eps, gate_up, w.gate_up_bias, down, w.down_bias)
        formats = (gate_up_scales, down_scales, gate_up_code, down_code)
        result: Tensor = torch.ops.paceline.row_mlp(hidden.contiguous(), *matrices, count, *formats)
        return result

    def compact_path(self, cache: tuple[Tensor, Tensor], row: Tensor, path: Tensor, *, slots: Tensor) -> None:
        torch.ops.paceline.row_keep(*cache, row, path.contiguous(), slots)

    def sample_tokens(
        self, logits: Tensor, positions: Tensor, sampling: SamplingTensors, *, stream: int = noise.TARGET
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
        ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        ranked: tuple[Tensor, Tensor] = torch.ops.paceline.row_rank(
            logits, positions.contiguous(), sampling.params, sampling.seeds, ids, count
        )
        return ranked

    def probabilities(self, logits: Tensor, sampling: SamplingTensors) -> Tensor:
        probs: Tensor = torch.ops.paceline.row_probs(logits, sampling.params)
        return probs

    def cuts(self, sampling: SamplingTensors) -> bool:
        return True


def c_shims() -> dict[object, list[str]]:
    """For AOTInductor: the C function behind each operator, so that a graph calls it without the dispatcher."""
    register()
    ops = torch.ops.paceline
    tensors = "AtenTensorHandle x, AtenTensorHandle w"
    handles = {n: ", ".join(f"AtenTensorHandle t{i}" for i in range(n)) for n in (4, 5, 7, 8)}
    head = "AOTITorchError aoti_torch_cpu_row_"
    maybe = "AtenTensorHandle* "
    formats = f"{maybe}scales0, {maybe}scales1, int64_t format0, int64_t format1"
    attention = (
        f"{tensors}, double eps, AtenTensorHandle qkv, {maybe}a, AtenTensorHandle out, {maybe}b, {handles[7]}, "
        f"{maybe}p, {formats}"
    )
    mlp = (
        f"{tensors}, double eps, AtenTensorHandle gate_up, {maybe}a, AtenTensorHandle down, {maybe}b, {maybe}count, "
        f"{formats}"
    )
    return {
        ops.row_linear.default: [f"{head}linear({tensors}, {maybe}scales, int64_t format, AtenTensorHandle* ret)"],
        ops.row_linear_real.default: [
            f"{head}linear_real({tensors}, {maybe}s, AtenTensorHandle count, int64_t format, AtenTensorHandle* ret)"
        ],
        ops.row_attend.default: [
            f"{head}attend({handles[8]}, {maybe}p, {maybe}s, int64_t reach, double cap, AtenTensorHandle* ret)"
        ],
        ops.row_attention.default: [f"{head}attention({attention}, AtenTensorHandle* ret)"],
        ops.row_mlp.default: [f"{head}mlp({mlp}, AtenTensorHandle* ret)"],
        ops.row_experts.default: [experts.SHIM],
        ops.row_keep.default: [f"{head}keep({handles[5]}, AtenTensorHandle* ret)"],
        ops.row_choose.default: [f"{head}choose({handles[4]}, int64_t stream, AtenTensorHandle* ret)"],
        ops.row_rank.default: [
            f"{head}rank({handles[4]}, {maybe}ids, int64_t count, AtenTensorHandle* ret0, AtenTensorHandle* ret1)"
        ],
        ops.row_probs.default: [f"{head}probs({tensors}, AtenTensorHandle* ret)"],
    }


@lru_cache(maxsize=1)
def register() -> torch.library.Library:
    """Build the kernels if needed and define the operators, once per process."""
    build.library()
    library = torch.library.Library("paceline", "DEF")
    for schema in [*_SCHEMAS.strip().splitlines(), experts.SCHEMA]:
        library.define(schema)
    bodies: dict[str, tuple[Callable[..., object], Callable[..., object]]] = {
        "row_linear": (_linear, _shape_linear),
        "row_linear_real": (_linear_real, _shape_linear),
        "row_attend": (_attend, _shape_attend),
        "row_attention": (_attention, _shape_half),
        "row_mlp": (_mlp, _shape_half),
        "row_experts": (experts.call, experts.shape),
        "row_keep": (_keep, _shape_keep),
        "row_choose": (_choose, _shape_choose),
        "row_rank": (_rank, _shape_rank),
        "row_probs": (_probs, _shape_probs),
    }
    for name, (body, shape) in bodies.items():
        library.impl(name, body, "CPU")
        torch.library.register_fake(f"paceline::{name}", shape, lib=library)
    return library


def _shape_linear(x: Tensor, w: Tensor, *_rest: object) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


def _shape_attend(q: Tensor, *_rest: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def _shape_half(hidden: Tensor, *_rest: object) -> Tensor:
    return torch.empty_like(hidden)


def _shape_keep(_ks: Tensor, _vs: Tensor, row: Tensor, *_rest: Tensor) -> Tensor:
    return torch.empty_like(row)


def _shape_choose(logits: Tensor, *_rest: object) -> Tensor:
    return logits.new_empty(*logits.shape[:-1], dtype=torch.int32)


def _shape_rank(logits: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    count = rest[-1]
    assert isinstance(count, int)
    shape = (*logits.shape[:-1], count)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape)


def _shape_probs(logits: Tensor, _params: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _linear(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    (scales, code), out = rest, _shape_linear(x, w)
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    numbers = (ctypes.c_int64(n) for n in (rows, width, w.shape[0], code))
    build.library().paceline_linear(*(pointer(t) for t in (x, w, scales, out)), *numbers)
    return out


def _linear_real(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    (scales, count, code), out = rest, _shape_linear(x, w)
    numbers = (ctypes.c_int64(n) for n in (*x.shape, w.shape[0], code))
    build.library().paceline_linear_real(*(pointer(t) for t in (x, w, scales, out, count)), *numbers)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    keys, values, row, count, slots, parents, slopes = (x if isinstance(x, Tensor) else None for x in rest[:7])
    reach, cap = rest[7:]
    assert keys is not None and isinstance(reach, int) and isinstance(cap, float), "the schema asks for it"
    out = _shape_attend(q)
    lines, window, heads, width = q.shape
    sizes = (ctypes.c_int64 * 6)(lines, window, heads, k.shape[2], width, keys.shape[2])
    pointers = [pointer(x) for x in (q, k, v, keys, values, out, row, count, slots, parents)]
    numbers = (ctypes.c_int64(_CACHES[keys.dtype]), ctypes.c_int64(reach), ctypes.c_float(cap), pointer(slopes))
    build.library().paceline_attend(*pointers, sizes, *numbers)
    return out


def _attention(hidden: Tensor, norm: Tensor, eps: float, *rest: Any) -> Tensor:
    (qkv, qkv_bias, out, out_bias), (cos, sin, keys, values, row, count, slots, parents) = rest[:4], rest[4:12]
    *scales, qkv_code, out_code = rest[12:]
    attended = _shape_half(hidden)
    order = (hidden, attended, count, norm, qkv, qkv_bias, out, out_bias, cos, sin, keys, values, row, slots, parents)
    (_, groups, rows, _), width = keys.shape, row_numbers(keys)
    shape = (*hidden.shape, qkv.shape[0] // width - 2 * groups, groups, width, rows)
    sizes = (*shape, qkv_code, out_code, _CACHES[keys.dtype])
    _half("paceline_attention", (*order, *scales), sizes, eps=eps, dtype=norm.dtype)
    return attended


def _mlp(hidden: Tensor, norm: Tensor, eps: float, *rest: Any) -> Tensor:
    gate_up, gate_up_bias, down, down_bias, count, gate_up_scales, down_scales, gate_up_code, down_code = rest
    result = _shape_half(hidden)
    order = (hidden, result, count, norm, gate_up, gate_up_bias, down, down_bias, gate_up_scales, down_scales)
    _half("paceline_mlp", order, (*hidden.shape, gate_up.shape[0], gate_up_code, down_code), eps=eps, dtype=norm.dtype)
    return result


def _half(name: str, tensors: Sequence[Tensor | None], sizes: Sequence[int], *, eps: float, dtype: torch.dtype) -> None:
    pointers = (ctypes.c_void_p * len(tensors))(*(pointer(x) for x in tensors))
    numbers = (ctypes.c_int64 * len(sizes))(*sizes)
    getattr(build.library(), name)(pointers, numbers, ctypes.c_float(eps), ctypes.c_int64(DTYPES[dtype]))


def _keep(keys: Tensor, values: Tensor, row: Tensor, *rest: Tensor) -> Tensor:
    path, slots = rest
    moved = torch.empty_like(row)  # how many rows moved in each slot: an operator of a graph has to return something
    _, groups, rows, width = keys.shape
    sizes = (ctypes.c_int64 * 5)(*path.shape, groups, rows, width * keys.element_size())
    build.library().paceline_keep(*(pointer(x) for x in (keys, values, row, path, slots, moved)), sizes)
    return moved


def _choose(logits: Tensor, positions: Tensor, params: Tensor, *rest: object) -> Tensor:
    keys, stream = rest
    assert isinstance(keys, Tensor) and isinstance(stream, int)
    out = _shape_choose(logits)
    pointers = (pointer(x) for x in (logits, positions, params, keys, out))
    numbers = (ctypes.c_int64(n) for n in (*logits.shape, stream))
    build.library().paceline_choose(*pointers, *numbers)
    return out


def _rank(logits: Tensor, positions: Tensor, params: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    keys, ids, count = rest
    assert isinstance(keys, Tensor) and isinstance(count, int)
    tokens, logprobs = _shape_rank(logits, count)
    inputs = (logits, positions, params, keys, ids if isinstance(ids, Tensor) else None)
    sizes = (ctypes.c_int64 * 4)(*logits.shape, count)
    build.library().paceline_rank(*(pointer(x) for x in (*inputs, tokens, logprobs)), sizes)
    return tokens, logprobs


def _probs(logits: Tensor, params: Tensor) -> Tensor:
    out = _shape_probs(logits, params)
    pointers = (pointer(x) for x in (logits, params, out))
    build.library().paceline_probs(*pointers, *(ctypes.c_int64(n) for n in logits.shape))
    return out
