"""Matrices of 8 bits with scales beside them, by the names that several projects give the scales.

    X.weight_scale  of compressed-tensors, and written here
    X.scale         of NxD Inference (`generate_quantized_state_dict`)

Both multiply the numbers of X.weight, [N, 1] or [N] with one for every row, or [1] with one for all. Not here: files,
and what config.json says (`paceline.decoder.weights.compressed`).
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from paceline.core.errors import WeightValueError
from paceline.decoder.weights.compressed import SCALE
from paceline.decoder.weights.quantize import QuantizedTensor, WeightFormat

_PIECE = 1 << 17  # numbers that are read at a time
_NXD_SCALE = ".scale"


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
    step = max(1, _PIECE // max(1, columns))
    for begin in range(0, rows, step):
        end = min(begin + step, rows)
        piece = read(begin, end)
        if form.dtype.is_floating_point and bool(piece.float().isnan().any()):
            raise WeightValueError(f"{name} holds NaN; the checkpoint is damaged, download the file again.")
        data[begin:end] = piece
    return QuantizedTensor(data, flat.clone(), form, columns)
