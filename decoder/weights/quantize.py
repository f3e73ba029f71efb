"""Quantised weight matrices: their formats, how one is made of float numbers, and how it is turned back.

`int8` has a scale for every row (output channel): symmetric, ``scale = max |w| / 127``; so has `fp8_e4m3` (Micikevicius
et al., arXiv 2209.05433): ``max |w| / E4M3_LARGEST``. `q8_0`, `q4_0` and `q4_1` are the blocks of 32 numbers of GGUF
files, as the package ``gguf`` reads and rounds them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.formats import E4M3_LARGEST, GROUP, WeightFormat

_PIECE = 1 << 15  # numbers of a matrix that are quantised at a time


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix [N, K] as it is stored.

    data     int8 or 8-bit floats [N, K], or the blocks of every row, uint8 [N, bytes]
    scales   float32 [N], or None where blocks hold theirs
    columns  K
    beyond   whether the matrix in the file, of which this may be a rank's part, has numbers of fp8_e4m3 above
             `E4M3_LARGEST`; what is quantised here has none
    """

    data: Tensor
    scales: Tensor | None
    format: WeightFormat
    columns: int
    beyond: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.columns

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def rows(self, start: int, end: int) -> QuantizedTensor:
        """Some of its rows; they share memory with it."""
        scales = None if self.scales is None else self.scales[start:end]
        return replace(self, data=self.data[start:end], scales=scales)

    def at(self, rows: Tensor) -> QuantizedTensor:
        """Its rows in another order. rows [n] int64"""
        scales = None if self.scales is None else self.scales[rows]
        # By bytes: PyTorch 2.9, which torch-neuronx needs, cannot index fp8.
        return replace(self, data=self.data.view(torch.uint8)[rows].view(self.data.dtype), scales=scales)

    def columns_of(self, start: int, end: int, columns: int) -> QuantizedTensor:
        """Some of its columns, of blocks whole ones; up to ``columns``, zeros follow."""
        form = self.format
        if form.block_bytes and any(at % GROUP for at in (start, end, columns)):
            raise ConfigurationError(
                f"tp_degree: expected shards of whole blocks of {GROUP} columns, got columns {start} to {end} of a "
                f"{form.value} matrix; use another tp_degree, or quantization='int8'"
            )
        data = self.data[:, form.row_bytes(start) : form.row_bytes(end)].contiguous()
        if missing := columns - (end - start):
            data = torch.cat((data, data.new_zeros(len(data), form.row_bytes(missing))), 1)  # zeros in every format
        return replace(self, data=data, columns=columns)

    def dequantize(self) -> Tensor:
        """[N, K] float32; of blocks exactly what the package ``gguf`` gives."""
        return dequantized(self.data, self.scales, self.format)


Stored = Tensor | QuantizedTensor
"""A tensor of a checkpoint as a decoder keeps it."""


def joined_rows(parts: Sequence[QuantizedTensor], rows: int | None = None) -> QuantizedTensor:
    """Matrices one below the other; up to ``rows``, zeros follow. Formats that differ all become Q8_0."""
    if len({part.format for part in parts}) > 1:
        form = WeightFormat.Q8_0
        parts = [part if part.format is form else quantize(part.dequantize(), form) for part in parts]
    first = parts[0]
    assert all(part.columns == first.columns for part in parts), "one width"
    data = torch.cat([part.data for part in parts])
    scales = None if first.scales is None else torch.cat([part.scales for part in parts if part.scales is not None])
    if rows is not None and (missing := rows - len(data)):
        data = torch.cat((data, data.new_zeros(missing, data.shape[1])))  # zeros in every format
        scales = None if scales is None else torch.cat((scales, scales.new_ones(missing)))
    return replace(first, data=data, scales=scales, beyond=any(part.beyond for part in parts))


def quantize(weight: Tensor, form: WeightFormat) -> QuantizedTensor:
    """A float matrix [N, K] in a format."""
    step = max(1, _PIECE // max(1, weight.shape[1]))
    return quantize_pieces(weight.split(step), (weight.shape[0], weight.shape[1]), form)


def quantize_pieces(pieces: Iterable[Tensor], shape: tuple[int, int], form: WeightFormat) -> QuantizedTensor:
    """A matrix [N, K] in a format, of which some rows at a time are in memory as floats.

    pieces  its rows [n, K] from the first one on
    """
    rows, columns = shape
    if form.block_bytes and columns % GROUP:
        raise ConfigurationError(
            f"quantization: expected rows of a multiple of {GROUP} numbers for blocks, got {columns}; use "
            "quantization='int8'"
        )
    data = torch.empty(rows, form.row_bytes(columns), dtype=form.dtype)
    scales = None if form.block_bytes else torch.empty(rows)
    begin = 0
    for piece in _smaller(pieces):
        end = begin + len(piece)
        if scales is None:
            data[begin:end] = _blocks(piece, form)
        else:
            data[begin:end], scales[begin:end] = _scaled(piece, form)
        begin = end
    assert begin == rows, "the pieces are the matrix"
    return QuantizedTensor(data, scales, form, columns)


def _smaller(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Pieces of a size that several temporaries of them do not count."""
    for piece in pieces:
        if not len(piece):  # a rank may have nothing of a matrix
            continue
        yield from piece.split(max(1, _PIECE // max(1, piece.shape[1])))


def _scaled(piece: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    """Rows [n, K] in an 8-bit type and their scales [n]."""
    wide = piece.float()
    most = wide.abs().amax(1)
    scales = torch.where(most > 0, most / form.largest, torch.ones_like(most))
    return rounded(wide / scales.unsqueeze(1), form.dtype), scales


def _blocks(piece: Tensor, form: WeightFormat) -> Tensor:
    """Rows [n, K] as blocks, uint8 [n, bytes]."""
    import gguf  # a GGUF reader; its import takes a while

    kind = {"q8_0": "Q8_0", "q4_0": "Q4_0", "q4_1": "Q4_1"}[form.value]
    return torch.from_numpy(gguf.quants.quantize(piece.float().contiguous().numpy(), gguf.GGMLQuantizationType[kind]))


def rounded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 numbers, which fit, to the nearest of a type of 8 bits, ties to even."""
    if dtype is torch.int8:
        return torch.round(numbers).clamp(-127, 127).to(dtype)
    most = torch.finfo(dtype).max  # a quotient may be rounded up beyond it
    return numbers.clamp(-most, most).to(dtype)


def dequantized(data: Tensor, scales: Tensor | None, form: WeightFormat) -> Tensor:
    """float32 [..., K] of rows in a format, by operations that a graph can hold. data [..., K] or [..., bytes]."""
    if not form.block_bytes:
        assert scales is not None, "rows have scales"
        return data.float() * scales.unsqueeze(-1)
    blocks = data.unflatten(-1, (-1, form.block_bytes))
    scale = _half(blocks[..., 0:2])
    if form is WeightFormat.Q8_0:
        numbers: Tensor = blocks[..., 2:].contiguous().view(torch.int8).float() * scale
        return numbers.flatten(-2)
    start = 4 if form is WeightFormat.Q4_1 else 2
    nibbles = torch.cat((blocks[..., start:] & 15, blocks[..., start:] >> 4), -1).float()
    values: Tensor = nibbles * scale + _half(blocks[..., 2:4]) if form is WeightFormat.Q4_1 else (nibbles - 8) * scale
    return values.flatten(-2)


def matrix(weight: Stored) -> MatrixLike:
    """A matrix as part of a model: a parameter that is not trained, or a `PackedMatrix`."""
    if isinstance(weight, QuantizedTensor):
        return PackedMatrix(weight)
    return nn.Parameter(weight.contiguous(), requires_grad=False)


def joined(parts: Sequence[Stored]) -> MatrixLike:
    """Several matrices one below the other as one, so that one product reads them all."""
    return_free_memory()  # of the parts that were joined before
    plain = [part for part in parts if isinstance(part, Tensor)]
    if len(plain) == len(parts):
        return matrix(torch.cat(plain))
    assert not plain, "all matrices of a layer are quantised, or none"
    return matrix(joined_rows([part for part in parts if isinstance(part, QuantizedTensor)]))


def _half(pair: Tensor) -> Tensor:
    """Two bytes [..., 2] as a float16, widened. [..., 1]"""
    return pair.contiguous().view(torch.float16).float()


class PackedMatrix(nn.Module):
    """A quantised matrix as part of a model. Kernels take it where they take a matrix of floats."""

    data: Tensor
    scales: Tensor | None

    def __init__(self, stored: QuantizedTensor) -> None:
        super().__init__()
        self.format, self.columns = stored.format, stored.columns
        self.data = nn.Parameter(stored.data.contiguous(), requires_grad=False)
        self.scales = None if stored.scales is None else nn.Parameter(stored.scales.contiguous(), requires_grad=False)

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.columns

    def dequantize(self) -> Tensor:
        """[N, K] float32"""
        return dequantized(self.data, self.scales, self.format)

    def gather(self, ids: Tensor) -> Tensor:
        """The rows of these ids, float32 [..., K]."""
        scales = None if self.scales is None else self.scales[ids]
        return dequantized(self.data[ids], scales, self.format)


MatrixLike = Tensor | PackedMatrix
"""A matrix that kernels multiply with."""


_LARGEST_BITS = int(torch.tensor(E4M3_LARGEST).to(torch.float8_e4m3fn).view(torch.uint8))


def within_e4m3(matrix: QuantizedTensor) -> QuantizedTensor:
    """A matrix of fp8_e4m3 without numbers above `E4M3_LARGEST`: rows that have some get half of every number and twice
    the scale, which rounds only numbers below 2^-5, by half a step.
    """
    assert matrix.format is WeightFormat.FP8_E4M3 and matrix.scales is not None
    rows = beyond_e4m3(matrix.data).any(1).nonzero().flatten()
    if not len(rows):
        return matrix
    data, scales = matrix.data.clone(), matrix.scales.clone()
    for some in rows.split(max(1, 4 * _PIECE // max(1, matrix.columns))):
        data[some] = (data[some].float() / 2).to(data.dtype)
    scales[rows] *= 2
    return replace(matrix, data=data, scales=scales, beyond=False)


def beyond_e4m3(data: Tensor) -> Tensor:
    """Whether each number of e4m3, none of them NaN, is above the largest: by its bits, as its type can do little."""
    return (data.view(torch.uint8) & 0x7F) > _LARGEST_BITS


def return_free_memory() -> None:
    """Ask the allocator to return its free pages to the system, where it can.

    glibc keeps what is freed in its heap: parts of matrices that were joined, in which the next ones may not fit, so
    that the peak of a load grows.
    """
    if not sys.platform.startswith("linux"):
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's: malloc_trim(3)
    if trim is not None:
        trim(ctypes.c_size_t(0))
