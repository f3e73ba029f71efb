"""The native kernels as PyTorch operators, so that graphs can be traced through them.

A compiled graph calls the library directly (see `c_shims`); the Python implementations below serve tests and tracing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from paceline.core import noise
from paceline.core.types import SamplingBatch
from paceline.decoder.kernels import Place
from paceline.decoder.native import build

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SCHEMAS = """
row_linear(Tensor x, Tensor w) -> Tensor
row_linear_real(Tensor x, Tensor w, Tensor count) -> Tensor
row_attend(Tensor q, Tensor k, Tensor v, Tensor(a!) ks, Tensor(b!) vs, Tensor row, Tensor count, Tensor slots) -> Tensor
row_attend_tree(Tensor q, Tensor k, Tensor v, Tensor(a!) ks, Tensor(b!) vs, Tensor row, Tensor count, Tensor slots, \
Tensor parents) -> Tensor
row_keep(Tensor(a!) ks, Tensor(b!) vs, Tensor row, Tensor path, Tensor slots) -> Tensor
row_choose(Tensor logits, Tensor positions, Tensor knobs, Tensor keys, int stream) -> Tensor
row_law(Tensor logits, Tensor knobs) -> Tensor
"""


class Native:
    """The `Kernels` of a CPU, compiled. Inputs must be contiguous, which is made sure of here."""

    width_free = True

    def __init__(self) -> None:
        register()

    def linear(self, x: Tensor, weight: Tensor, count: Tensor | None = None) -> Tensor:
        ops = torch.ops.paceline
        made: Tensor = (
            ops.row_linear(x.contiguous(), weight)
            if count is None
            else ops.row_linear_real(x.contiguous(), weight, count)
        )
        return made

    def attend(self, qkv: tuple[Tensor, Tensor, Tensor], cache: tuple[Tensor, Tensor], place: Place) -> Tensor:
        q, k, v = (x.contiguous() for x in qkv)
        ops, at = torch.ops.paceline, (place.row, place.count, place.slots)
        made: Tensor = (
            ops.row_attend(q, k, v, *cache, *at)
            if place.tree is None
            else ops.row_attend_tree(q, k, v, *cache, *at, place.tree.parents)
        )
        return made

    def keep(self, cache: tuple[Tensor, Tensor], row: Tensor, path: Tensor, *, slots: Tensor) -> None:
        torch.ops.paceline.row_keep(*cache, row, path.contiguous(), slots)

    def choose(
        self, logits: Tensor, positions: Tensor, sampling: SamplingBatch, *, stream: int = noise.TARGET
    ) -> Tensor:
        made: Tensor = torch.ops.paceline.row_choose(
            logits, positions.contiguous(), sampling.knobs, sampling.keys, stream
        )
        return made

    def probabilities(self, logits: Tensor, sampling: SamplingBatch) -> Tensor:
        made: Tensor = torch.ops.paceline.row_law(logits, sampling.knobs)
        return made

    def cuts(self, sampling: SamplingBatch) -> bool:
        return True


def c_shims() -> dict[object, list[str]]:
    """For AOTInductor: the C function behind each operator, so that a graph calls it without the dispatcher."""
    register()
    ops = torch.ops.paceline
    tensors = "AtenTensorHandle x, AtenTensorHandle w"
    handles = {n: ", ".join(f"AtenTensorHandle t{i}" for i in range(n)) for n in (4, 5, 8, 9)}
    head = "AOTITorchError aoti_torch_cpu_row_"
    return {
        ops.row_linear.default: [f"{head}linear({tensors}, AtenTensorHandle* ret)"],
        ops.row_linear_real.default: [f"{head}linear_real({tensors}, AtenTensorHandle count, AtenTensorHandle* ret)"],
        ops.row_attend.default: [f"{head}attend({handles[8]}, AtenTensorHandle* ret)"],
        ops.row_attend_tree.default: [f"{head}attend_tree({handles[9]}, AtenTensorHandle* ret)"],
        ops.row_keep.default: [f"{head}keep({handles[5]}, AtenTensorHandle* ret)"],
        ops.row_choose.default: [f"{head}choose({handles[4]}, int64_t stream, AtenTensorHandle* ret)"],
        ops.row_law.default: [f"{head}law({tensors}, AtenTensorHandle* ret)"],
    }


@lru_cache(maxsize=1)
def register() -> torch.library.Library:
    """Build the kernels if needed and define the operators, once per process."""
    build.library()
    made = torch.library.Library("paceline", "DEF")
    for schema in _SCHEMAS.strip().splitlines():
        made.define(schema)
    bodies: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "row_linear": (_linear, _shape_linear),
        "row_linear_real": (_linear_real, _shape_linear_real),
        "row_attend": (_attend, _shape_attend),
        "row_attend_tree": (_attend, _shape_attend),
        "row_keep": (_keep, _shape_keep),
        "row_choose": (_choose, _shape_choose),
        "row_law": (_law, _shape_law),
    }
    for name, (body, shape) in bodies.items():
        made.impl(name, body, "CPU")
        torch.library.register_fake(f"paceline::{name}", shape, lib=made)
    return made


def _shape_linear(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], w.shape[0])


def _shape_linear_real(x: Tensor, w: Tensor, _count: Tensor) -> Tensor:
    return _shape_linear(x, w)


def _shape_attend(q: Tensor, *_rest: Tensor) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])


def _shape_keep(_ks: Tensor, _vs: Tensor, row: Tensor, *_rest: Tensor) -> Tensor:
    return torch.empty_like(row)


def _shape_choose(logits: Tensor, *_rest: object) -> Tensor:
    return logits.new_empty(*logits.shape[:-1], dtype=torch.int32)


def _shape_law(logits: Tensor, _knobs: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _pointer(x: Tensor) -> ctypes.c_void_p:
    assert x.is_contiguous()
    return ctypes.c_void_p(x.data_ptr())


def _linear(x: Tensor, w: Tensor) -> Tensor:
    out = _shape_linear(x, w)
    rows, width = x.numel() // x.shape[-1], x.shape[-1]
    numbers = (ctypes.c_int64(n) for n in (rows, width, w.shape[0], _DTYPES[w.dtype]))
    build.library().paceline_linear(_pointer(x), _pointer(w), _pointer(out), *numbers)
    return out


def _linear_real(x: Tensor, w: Tensor, count: Tensor) -> Tensor:
    out = _shape_linear(x, w)
    numbers = (ctypes.c_int64(n) for n in (*x.shape, w.shape[0], _DTYPES[w.dtype]))
    build.library().paceline_linear_real(_pointer(x), _pointer(w), _pointer(out), _pointer(count), *numbers)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
    keys, values, *places = rest  # row, count, slots and, for a tree, parents
    out = _shape_attend(q)
    lines, window, heads, width = q.shape
    sizes = (ctypes.c_int64 * 6)(lines, window, heads, k.shape[2], width, keys.shape[2])
    pointers = [_pointer(x) for x in (q, k, v, keys, values, out, *places)]
    pointers += [ctypes.c_void_p(None)] * (4 - len(places))
    build.library().paceline_attend(*pointers, sizes, ctypes.c_int64(_DTYPES[keys.dtype]))
    return out


def _keep(keys: Tensor, values: Tensor, row: Tensor, *rest: Tensor) -> Tensor:
    path, slots = rest
    moved = torch.empty_like(row)  # how many rows moved in each slot: an operator of a graph has to return something
    _, groups, rows, width = keys.shape
    sizes = (ctypes.c_int64 * 5)(*path.shape, groups, rows, width * keys.element_size())
    build.library().paceline_keep(*(_pointer(x) for x in (keys, values, row, path, slots, moved)), sizes)
    return moved


def _choose(logits: Tensor, positions: Tensor, knobs: Tensor, *rest: object) -> Tensor:
    keys, stream = rest
    assert isinstance(keys, Tensor) and isinstance(stream, int)
    out = _shape_choose(logits)
    pointers = (_pointer(x) for x in (logits, positions, knobs, keys, out))
    numbers = (ctypes.c_int64(n) for n in (*logits.shape, stream))
    build.library().paceline_choose(*pointers, *numbers)
    return out


def _law(logits: Tensor, knobs: Tensor) -> Tensor:
    out = _shape_law(logits, knobs)
    pointers = (_pointer(x) for x in (logits, knobs, out))
    build.library().paceline_law(*pointers, *(ctypes.c_int64(n) for n in logits.shape))
    return out
