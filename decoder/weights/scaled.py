"""Matrices of 8 bits with scales beside them, by the names that several projects give the scales.

    X.weight_scale  of compressed-tensors, and written here
    X.scale         of NxD Inference (`generate_quantized_state_dict`)

Both multiply the numbers of X.weight, [N, 1] or [N] with one for every row, or [1] with one for all. Not here: files,
and what config.json says (`paceline.decoder.weights.compressed`).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

import torch
from torch import Tensor

from paceline.core.errors import WeightValueError
from paceline.decoder.weights.compressed import SCALE
from paceline.decoder.weights.formats import E4M3_LARGEST, WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor

_PIECE = 1 << 17  # numbers that are read at a time
_NXD_SCALE = ".scale"
_LARGEST_BITS = int(torch.tensor(E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8))


def scale_name(matrix: str, names: Container[str]) -> str | None:
    """The tensor among ``names`` that holds a matrix's scales, if there is one."""
    stem = matrix.removesuffix(".weight")
    candidates = (matrix + SCALE, stem + _NXD_SCALE) if stem != matrix else (matrix + SCALE,)
    return next((name for name in candidates if name in names), None)


def scaled_matrix(
    name: str, form: WeightFormat, shape: tuple[int, ...], *, read: Callable[[int, int], Tensor], scales: Tensor
) -> QuantizedTensor:
    """The matrix, copied some rows at a time.

    read    rows from one to another, as they are stored
    scales  as they are stored

    Raises:
        WeightValueError: a number is NaN, or a scale is none that rows could have.
    """
    rows, columns = shape
    flat = scales.float().flatten()
    flat = flat.expand(rows) if len(flat) == 1 else flat
    if len(flat) != rows or not bool((torch.isfinite(flat) & (flat > 0)).all()):
        raise WeightValueError(
            f"the scales of {name} must be a positive number for each of {rows} rows, or one for all; the checkpoint "
            "is damaged, download the file again."
        )
    data = torch.empty(rows, columns, dtype=form.dtype)
    beyond = False
    step = max(1, _PIECE // max(1, columns))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        piece = read(begin, end)
        if form.dtype.is_floating_point and bool(piece.float().isnan().any()):
            raise WeightValueError(f"{name} holds NaN; the checkpoint is damaged, download the file again.")
        data[begin:end] = piece
        beyond = beyond or (form is WeightFormat.FP8_E4M3 and bool(_beyond(piece).any()))
    return QuantizedTensor(data, flat.clone(), form, columns, beyond)


def within_e4m3(matrix: QuantizedTensor) -> QuantizedTensor:
    """A matrix of fp8_e4m3 without numbers above `E4M3_LARGEST`.

    Rows that have some get half of every number and twice the scale: the same weights, but for numbers below 2^-5,
    whose halves are stored with a fixed step and may be rounded by half of it.
    """
    assert matrix.format is WeightFormat.FP8_E4M3 and matrix.scales is not None
    rows = _beyond(matrix.data).any(1).nonzero().flatten()
    if not len(rows):
        return matrix
    data, scales = matrix.data.clone(), matrix.scales.clone()
    for some in rows.split(max(1, _PIECE // max(1, matrix.columns))):
        data[some] = (data[some].float() / 2).to(data.dtype)
    scales[rows] *= 2
    return replace(matrix, data=data, scales=scales, beyond=False)


def _beyond(data: Tensor) -> Tensor:
    """Whether each number of e4m3, none of them NaN, is above the largest one: by its bits, as its type has few
    operations.
    """
    return (data.view(torch.uint8) & 0x7F) > _LARGEST_BITS
