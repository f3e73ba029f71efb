"""What the operators of the kernels give, in zeros: see `program.cpp` for their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
