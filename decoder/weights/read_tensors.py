"""One tensor of a weight file as a decoder keeps it: in its dtype or quantised, whole or a rank's part.

A large one is read some rows at a time, from the file opened anew for each of them, because what was read of a mapped
file stays in memory until it is closed. Beside the result no more than such a piece is held. Not here: which tensors
there must be (`paceline.decoder.weights.checkpoint`), and how numbers are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError, WeightValueError
from paceline.decoder.parallel.sharding import TensorSlice, TensorSpec
from paceline.decoder.weights.compressed import STORED_FORMATS
from paceline.decoder.weights.files import WeightFile, is_mapped, open_weight_file
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor, joined_rows, quantize, quantize_pieces
from paceline.decoder.weights.scaled import scale_name, scaled_matrix, within_e4m3


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor in a file: an open one, its path, the name there, what it must be, and the numbers of a piece."""

    source: WeightFile
    file: Path
    name: str
    spec: TensorSpec
    portion: int

    def pieces(self, *, dim: int = 0, span: tuple[int, int] | None = None) -> Iterator[Tensor]:
        """Rows (dim 0) or columns (dim 1) of a ``span`` one after another; a tensor with one dimension is one piece."""
        shape = self.spec.shape
        if len(shape) < 2:
            yield self.source.read(self.name)
            return
        first, last = span or (0, shape[dim])
        step = max(1, self.portion * shape[dim] // max(1, prod(shape)))
        if step >= last - first:
            yield self.source.read_range(self.name, (first, last), dim=dim)
            return
        for begin in range(first, last, step):
            some = (begin, min(begin + step, last))
            if not is_mapped(self.file):
                yield self.source.read_range(self.name, some, dim=dim)
                continue
            with open_weight_file(self.file) as anew:
                yield anew.read_range(self.name, some, dim=dim)


def read_matrix(stored: TensorInFile, form: WeightFormat | None, part: TensorSlice | None) -> QuantizedTensor:
    """A quantised matrix [out, in]; ``form`` None: as it is stored, or Q8_0.

    One that is stored as the fp8_e4m3 that is asked for keeps to `E4M3_LARGEST`, as what is quantised here does.
    A rank's part has the numbers that one rank would have. Where they follow from its rows alone, no others are read;
    of its columns' rows, what is not its own is dropped as soon as they have their scales.

    Raises:
        ConfigurationError: the format does not go with its width, or with the ranks.
        WeightValueError: it holds NaN or infinity.
    """
    by_rows = part is not None and (part.dim == 1) is stored.spec.transposed
    made = _turned(stored, form) if stored.spec.transposed else stored.source.read_quantized(stored.name, form)
    if made is not None and made.beyond and form is WeightFormat.FP8_E4M3:
        made = within_e4m3(made)
    if made is None and part is not None and form is not WeightFormat.INT8_PER_TENSOR:
        return _quantised_rows(stored, form, part) if by_rows else _quantised_columns(stored, form, part)
    if made is None:
        made = _quantised(stored, form, None)
    if part is None:
        return made
    if not by_rows:
        (span,) = part.ranges  # of columns there is one
        return made.columns_of(*span, part.size)
    pieces = [made.rows(*span) for span in part.ranges]
    return joined_rows([joined_rows([piece], size) for piece, size in zip(pieces, part.sizes, strict=True)])


def _turned(stored: TensorInFile, form: WeightFormat | None) -> QuantizedTensor | None:
    """A matrix that is stored as [in, out], in 8 bits with scales beside it, as [out, in]."""
    infos = stored.source.infos()
    scale = scale_name(stored.name, infos)
    if scale is None:
        return None
    found = STORED_FORMATS[infos[stored.name].dtype]
    if form not in (None, found):
        return None
    return scaled_matrix(
        stored.name,
        found,
        _shape(stored),
        read=lambda begin, end: stored.source.read_range(stored.name, (begin, end), dim=1).t(),
        scales=stored.source.read(scale),
    )


def read_tensor(stored: TensorInFile, dtype: torch.dtype, part: TensorSlice | None) -> Tensor:
    """A contiguous copy in a dtype: the file may change or go afterwards, and take a window on it with it.

    Raises:
        WeightValueError: it holds NaN or infinity, or numbers beyond the dtype.
    """
    shape = stored.spec.shape
    if len(shape) < 2 or (part is not None and part.dim != 0):
        found = stored.source.read(stored.name) if part is None else _read_part(stored.source, stored.name, part)
        return _converted(stored, found, dtype)
    cut = part or TensorSlice(0, ((0, shape[0]),), (shape[0],))
    made = torch.empty(cut.size, *shape[1:], dtype=dtype)
    begin = 0
    for span, size in zip(cut.ranges, cut.sizes, strict=True):
        end = begin
        for piece in stored.pieces(span=span):
            made[end : end + len(piece)] = _converted(stored, piece, dtype)
            end += len(piece)
        begin += size
        made[end:begin] = 0  # a rank of zeros
    return made


def _quantised(stored: TensorInFile, form: WeightFormat | None, span: tuple[int, int] | None) -> QuantizedTensor:
    """Rows of the matrix [out, in] in a format; None: all of them."""
    rows, columns = _shape(stored)
    first, last = span or (0, rows)
    with _named(stored):
        return quantize_pieces(
            lambda: _finite_rows(stored, (first, last)), (last - first, columns), form or WeightFormat.Q8_0
        )


def _quantised_rows(stored: TensorInFile, form: WeightFormat | None, part: TensorSlice) -> QuantizedTensor:
    """A rank's rows of the matrix [out, in] in a format."""
    made = [_quantised(stored, form, span) for span in part.ranges]
    filled = [
        one if len(one.data) == size else joined_rows([one], size) for one, size in zip(made, part.sizes, strict=True)
    ]
    return filled[0] if len(filled) == 1 else joined_rows(filled)


def _quantised_columns(stored: TensorInFile, form: WeightFormat | None, part: TensorSlice) -> QuantizedTensor:
    """A rank's columns of the matrix [out, in] in a format, whose scales are those of the whole rows."""
    form = form or WeightFormat.Q8_0
    (span,) = part.ranges  # of columns there is one
    rows = _shape(stored)[0]
    data = torch.empty(rows, form.row_bytes(part.size), dtype=form.dtype)
    scales = None if form.block_bytes else torch.empty(rows)
    begin = 0
    with _named(stored):
        for whole in _finite_rows(stored, (0, rows)):
            piece = quantize(whole, form).columns_of(*span, part.size)
            end = begin + len(piece.data)
            data[begin:end] = piece.data
            if scales is not None and piece.scales is not None:
                scales[begin:end] = piece.scales
            begin = end
    assert begin == rows, "the pieces are the matrix"
    return QuantizedTensor(data, scales, form, part.size)


def _shape(stored: TensorInFile) -> tuple[int, int]:
    """Rows and columns of the matrix [out, in]."""
    shape = stored.spec.shape
    return (shape[1], shape[0]) if stored.spec.transposed else (shape[0], shape[1])


@contextmanager
def _named(stored: TensorInFile) -> Iterator[None]:
    """Errors of a format, with the matrix's name."""
    try:
        yield
    except ConfigurationError as error:
        raise ConfigurationError(f"{stored.file}: {stored.name}: {error}") from error


def _finite_rows(stored: TensorInFile, span: tuple[int, int]) -> Iterator[Tensor]:
    """Rows of the matrix [out, in], in float32, in which every stored number is exact."""
    for piece in stored.pieces(dim=1 if stored.spec.transposed else 0, span=span):
        if piece.numel() and not _is_finite(piece):
            raise _damaged(stored)
        yield piece.t() if stored.spec.transposed else piece


def _converted(stored: TensorInFile, found: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = found.to(dtype, copy=True, memory_format=torch.contiguous_format)
    if tensor.numel() and not _is_finite(tensor):
        if _is_finite(found):
            raise WeightValueError(
                f"{stored.file}: {stored.name} holds values beyond the range of {dtype}; load it in torch.bfloat16 or "
                "torch.float32."
            )
        raise _damaged(stored)
    return tensor


def _damaged(stored: TensorInFile) -> WeightValueError:
    return WeightValueError(
        f"{stored.file}: {stored.name} holds NaN or infinity; download the file again, and if that does not help the "
        "checkpoint itself is damaged."
    )


def _read_part(source: WeightFile, name: str, part: TensorSlice) -> Tensor:
    pieces: list[Tensor] = []
    for (first, last), size in zip(part.ranges, part.sizes, strict=True):
        piece = source.read_range(name, (first, last), dim=part.dim)
        pieces.append(piece)
        if missing := size - (last - first):
            shape = [missing if dim == part.dim else length for dim, length in enumerate(piece.shape)]
            pieces.append(piece.new_zeros(shape))
    return torch.cat(pieces, part.dim) if len(pieces) > 1 else pieces[0]


def _is_finite(tensor: Tensor) -> bool:
    # One pass without a temporary, where isfinite().all() makes several of the tensor's size; keeps NaN.
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low)) and bool(torch.isfinite(high))
