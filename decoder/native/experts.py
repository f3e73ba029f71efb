"""A mixture of experts as an operator: see `paceline.decoder.native.ops` for how graphs call it."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from paceline.decoder.kernels import activations
from paceline.decoder.kernels.protocol import ExpertWeights
from paceline.decoder.native import build
from paceline.decoder.native.arguments import pointer, stored

SCHEMA = (
    "row_experts(Tensor x, Tensor shares, Tensor gate_up, Tensor? gate_up_scales, Tensor down, Tensor? down_scales, "
    "Tensor? count, int activation, int gate_up_format, int down_format) -> Tensor"
)
SHIM = (
    "AOTITorchError aoti_torch_cpu_row_experts(AtenTensorHandle x, AtenTensorHandle shares, AtenTensorHandle gate_up, "
    "AtenTensorHandle* s0, AtenTensorHandle down, AtenTensorHandle* s1, AtenTensorHandle* count, int64_t activation, "
    "int64_t format0, int64_t format1, AtenTensorHandle* ret)"
)


class NativeExperts:
    """The `MixtureKernels` of a CPU, compiled."""

    def experts(self, x: Tensor, shares: Tensor, weights: ExpertWeights, *, count: Tensor | None = None) -> Tensor:
        (gate_up, gate_up_scales, gate_up_code), (down, down_scales, down_code) = map(
            stored, (weights.gate_up, weights.down)
        )
        matrices = (gate_up, gate_up_scales, down, down_scales)
        codes = (activations.code(weights.activation), gate_up_code, down_code)
        mixed: Tensor = torch.ops.paceline.row_experts(x.contiguous(), shares.contiguous(), *matrices, count, *codes)
        return mixed


def shape(x: Tensor, *_rest: object) -> Tensor:
    """What the operator gives, without its numbers."""
    return torch.empty_like(x)


def call(x: Tensor, shares: Tensor, *rest: Any) -> Tensor:
    """The operator outside of a graph."""
    gate_up, gate_up_scales, down, down_scales, count, *codes = rest
    mixed, experts = shape(x), shares.shape[-1]
    order = (x, shares, mixed, count, gate_up, gate_up_scales, down, down_scales)
    pointers = (ctypes.c_void_p * len(order))(*(pointer(one) for one in order))
    numbers = (*x.shape, experts, gate_up.shape[0] // experts // 2, *codes)
    build.library().paceline_experts(pointers, (ctypes.c_int64 * len(numbers))(*numbers))
    return mixed
