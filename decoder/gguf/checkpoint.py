"""A GGUF file as a checkpoint: its configuration as config.json would have it, and its tensors as float32.

What keys mean is in `paceline.decoder.gguf.architectures`, a row for each architecture. Numbers are
dequantised by the `gguf` package, one piece at a time from the mapped file, so that memory holds the result and one
piece. Tokenizers are in `paceline.text.gguf_tokenizer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.gguf.architectures import FACTORS, architecture, config
from paceline.decoder.gguf.header import GgufHeader, StoredTensor, read_header
from paceline.decoder.gguf.layout import Piece, pieces
from paceline.decoder.weights.files import TensorInfo
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor

_KEPT = {"Q8_0": WeightFormat.Q8_0, "Q4_0": WeightFormat.Q4_0, "Q4_1": WeightFormat.Q4_1}

_PIECE = 1 << 16  # numbers dequantised at a time


def read_checkpoint(path: Path) -> GgufHeader:
    """Return the header of a file, or of all parts of a model, after checking that it can be loaded.

    Raises:
        MissingWeightsError: the file, or a part, is absent or truncated.
        CheckpointError: it is damaged.
        UnknownArchitectureError: its architecture or a tensor's type is not supported.
    """
    header = read_header(path)
    architecture(header)
    checked: set[str] = set()
    for tensor, stored in header.tensors.items():
        if stored.type not in checked and not _can_dequantise(stored):
            raise UnknownArchitectureError(
                f"{path}: tensor {tensor}: the type {stored.type} cannot be dequantised; use a file with other "
                "types, such as Q8_0, Q4_K or BF16"
            )
        checked.add(stored.type)
    return header


def read_config(path: Path) -> dict[str, object]:
    """Return the keys of a config.json equivalent to the file's metadata.

    Raises:
        CheckpointError: see `read_checkpoint`; or a key is missing or has a wrong value.
        UnknownArchitectureError: see `read_checkpoint`; or a key would change the computation in a way that is not
            implemented.
    """
    header = read_checkpoint(path)
    found: dict[str, tuple[float, ...]] = {}
    for name in FACTORS:
        stored = header.tensors.get(name)
        if stored is None:
            continue
        values = _numbers(stored, np.arange(stored.shape[0])) if len(stored.shape) == 1 else None
        if values is None or not bool((np.isfinite(values) & (values > 0)).all()):
            raise CheckpointError(
                f"{path}: expected finite numbers above 0 in {name}, got others; download the file again"
            )
        found[name] = tuple(values.tolist())
    return config(header, found)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A `paceline.decoder.weights.files.WeightFile`: tensors with Hugging Face's names and row order."""

    header: GgufHeader
    pieces: dict[str, Piece]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open a file.

        Raises:
            CheckpointError, UnknownArchitectureError: see `read_checkpoint`; or two tensors have one Hugging Face name.
        """
        header = read_checkpoint(path)
        return cls(header, pieces(header))

    def infos(self) -> dict[str, TensorInfo]:
        """Shapes, and the dtypes that `read` returns rather than the stored types."""
        return {name: TensorInfo(self._shape(piece), "F32") for name, piece in self.pieces.items()}

    def read(self, name: str) -> Tensor:
        """Return the whole tensor, float32."""
        return self.read_range(name, (0, self._shape(self.pieces[name])[0]), dim=0)

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        """Read rows or columns ``span`` of a tensor. For columns of the stored one, whole blocks are dequantised."""
        piece = self.pieces[name]
        if (dim == 0) is not piece.transposed:
            found = self._rows(piece, span)
        else:
            found = self._rows(piece, (0, piece.rows), columns=span)
        return found.t() if piece.transposed else found

    def read_quantized(self, name: str, wanted: WeightFormat | None = None) -> QuantizedTensor | None:
        """Read a matrix [out, in] of Q8_0, Q4_0 or Q4_1 without dequantising it."""
        piece = self.pieces[name]
        stored = self.header.tensors[piece.stored]
        form = _KEPT.get(stored.type)
        if form is None or len(stored.shape) < 2 or wanted not in (None, form):
            return None
        rows = np.empty((piece.rows, stored.row_bytes), np.uint8)
        for begin, end in _spans(stored, (0, piece.rows)):
            rows[begin:end] = _raw(stored)[_places(piece, begin, end)]
        return QuantizedTensor(torch.from_numpy(rows), None, form, stored.shape[-1])

    def _shape(self, piece: Piece) -> tuple[int, ...]:
        """The shape in a checkpoint: a vector of numbers in a row, where it has a router of one output."""
        stored = self.header.tensors[piece.stored].shape
        shape = (piece.rows, *stored[-1:]) if len(stored) > 1 else (piece.rows,)
        if piece.single:
            return (1, stored[-1])
        return shape[::-1] if piece.transposed else shape

    def _rows(self, piece: Piece, span: tuple[int, int], *, columns: tuple[int, int] | None = None) -> Tensor:
        stored = self.header.tensors[piece.stored]
        if piece.single:
            whole = _numbers(stored, np.arange(stored.shape[0])).reshape(1, -1)
            return torch.from_numpy(whole[span[0] : span[1], slice(*columns) if columns else slice(None)].copy())
        width = stored.shape[-1:] if len(stored.shape) > 1 else ()
        width = width if columns is None else (columns[1] - columns[0],)
        result = np.empty((span[1] - span[0], *width), np.float32)
        for begin, end in _spans(stored, span) if result.size else ():  # a rank may have an empty part
            found = _numbers(stored, _places(piece, begin, end), columns=columns)
            result[begin - span[0] : end - span[0]] = found
        return torch.from_numpy(result - np.float32(piece.shift) if piece.shift else result)


def _places(piece: Piece, begin: int, end: int) -> NDArray[Any]:
    """The rows of the stored tensor in which rows of a piece lie."""
    rows = np.arange(begin, end)
    return piece.first + (rows if piece.order is None else piece.order(rows))


def _raw(stored: StoredTensor) -> NDArray[Any]:
    """The bytes of a tensor, a row for each; of a one-dimensional tensor, one row."""
    # Mapped again for every piece: pages read from a mapping stay in memory until it is closed. It is wrapped in a
    # plain array, which is sliced faster.
    data = np.asarray(np.memmap(stored.path, dtype=np.uint8, mode="r"))
    return data[stored.offset : stored.offset + stored.num_bytes].reshape(-1, stored.row_bytes)


def _spans(stored: StoredTensor, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, or of numbers for a one-dimensional tensor, in pieces."""
    numbers_of_a_row = stored.shape[-1] if len(stored.shape) > 1 else 1
    step = max(1, _PIECE // numbers_of_a_row)
    for begin in range(span[0], span[1], step):
        yield begin, min(begin + step, span[1])


def _numbers(stored: StoredTensor, rows: NDArray[Any], *, columns: tuple[int, int] | None = None) -> NDArray[Any]:
    """Return some rows of a tensor, float32; of a one-dimensional tensor, some numbers."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    kind, (numbers, size) = GGMLQuantizationType[stored.type], stored.block
    raw = _raw(stored)
    if len(stored.shape) == 1:
        values: NDArray[Any] = dequantize(np.array(raw[0]), kind)[rows]
        return values
    if columns is None:
        return dequantize(raw[rows], kind).reshape(len(rows), stored.shape[-1])
    first, last = columns[0] // numbers, -(-columns[1] // numbers)
    values = dequantize(np.ascontiguousarray(raw[rows, first * size : last * size]), kind)
    return values[:, columns[0] - first * numbers : columns[1] - first * numbers]


def _can_dequantise(stored: StoredTensor) -> bool:
    """Return whether the `gguf` package can dequantise this type: tries one block of zeros."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, stored.block[1]), np.uint8), GGMLQuantizationType[stored.type])
    except NotImplementedError:
        return False
    return True
