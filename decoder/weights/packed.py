"""Matrices as compressed-tensors packs them, `pack-quantized`, given as matrices of floats.

    X.weight_packed       int32 [N, ceil(K * bits / 32)]: numbers of 4 or 8 bits, the first one in the lowest bits of a
                          word, each with 2^(bits - 1) added
    X.weight_shape        int64 [2]: N and K
    X.weight_scale        [N, groups], of groups of K / groups neighbours in a row; one group: a scale for every row
    X.weight_zero_point   int32 [ceil(N * bits / 32), groups], packed along N; only where weights are asymmetric

A weight is (number - zero point) * scale. Names and bits are those of compressed-tensors 0.20, `pack_quantized`. The
parts of a matrix may lie in several files of a checkpoint. Not here: matrices of 8 bits that are not packed
(`paceline.decoder.weights.files`), and what config.json says of them (`paceline.decoder.weights.compressed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, MissingWeightsError, UnknownArchitectureError, WeightValueError
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.weights.files import TensorInfo, WeightFile, open_safetensors
from paceline.decoder.weights.formats import GROUP, WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor

_PACKED, _SCALE, _SHAPE, _ZERO, _ORDER = "_packed", "_scale", "_shape", "_zero_point", "_g_idx"
_BESIDE = (_SCALE, _SHAPE, _ZERO)
_PIECE = 1 << 15  # numbers that are unpacked at a time


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A packed matrix [N, K] without its numbers: bits of one, scales [N, groups] float32, zeros [N, groups] int8."""

    name: str
    columns: int
    bits: int
    scales: Tensor
    zeros: Tensor | None

    @property
    def groups(self) -> int:
        return self.scales.shape[1]


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A `WeightFile` whose packed matrices are floats.

    matrices  their names and shapes
    parts     names in the file that belong to one
    """

    source: WeightFile
    path: Path
    matrices: dict[str, tuple[int, ...]]
    parts: frozenset[str]

    @classmethod
    def around(cls, source: WeightFile, path: Path) -> WeightFile:
        """The file itself, if nothing in it is packed.

        Raises:
            UnknownArchitectureError: a matrix has an order of columns of its own.
            MissingWeightsError: a part of a matrix is in no file.
        """
        infos = source.infos()
        ordered = next((name for name in infos if name.endswith(".weight" + _ORDER)), None)
        if ordered is not None:
            raise UnknownArchitectureError(
                f"{path}: expected columns in their original order, got {ordered} (actorder='group'), which is not "
                "supported; use a checkpoint quantised without reordering"
            )
        elsewhere = _index(path)
        made = cls(source, path, {}, frozenset(name for name in infos if _is_part(name, infos, elsewhere)))
        for name in infos:
            if name.endswith(".weight" + _PACKED):
                matrix = name.removesuffix(_PACKED)
                shape = made._part(matrix, _SHAPE)
                made.matrices[matrix] = tuple(int(size) for size in shape.flatten().tolist())
        return made if made.matrices or made.parts else source

    def infos(self) -> dict[str, TensorInfo]:
        """Packed matrices by their whole name, as what is read of them."""
        plain = {name: info for name, info in self.source.infos().items() if name not in self.parts}
        return plain | {name: TensorInfo(shape, "F32") for name, shape in self.matrices.items()}

    def read(self, name: str) -> Tensor:
        """The tensor; a packed matrix as float32 [N, K]."""
        if name not in self.matrices:
            return self.source.read(name)
        return self._floats(name, (0, self.matrices[name][0]))

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        """Read a range of rows; rows of a packed matrix are unpacked."""
        if name not in self.matrices:
            return self.source.read_range(name, span, dim=dim)
        if dim == 0:
            return self._floats(name, span)
        return self.read(name).narrow(1, span[0], span[1] - span[0])

    def read_quantized(self, name: str, wanted: WeightFormat | None = None) -> QuantizedTensor | None:
        """Read a quantised matrix. A symmetric one in groups becomes Q4_0, or Q8_0 on request, if its scales are
        float16 numbers; one of 8 bits with a scale for every row becomes int8 with the same numbers.
        """
        if name not in self.matrices:
            return self.source.read_quantized(name, wanted)
        matrix = self._matrix(name)
        if matrix.zeros is not None:
            return None
        if matrix.bits == 8 and wanted in (None, WeightFormat.INT8):
            return self._integers(matrix)
        form = WeightFormat.Q4_0 if matrix.bits == 4 else WeightFormat.Q8_0
        return self._blocks(matrix, form) if wanted in (None, form) else None

    def _integers(self, matrix: _Matrix) -> QuantizedTensor | None:
        """Return 8-bit integers with a scale for every row."""
        rows, columns = self.matrices[matrix.name]
        if matrix.groups > 1 or not bool((matrix.scales > 0).all()):
            return None
        numbers = torch.empty(rows, columns, dtype=torch.int8)
        for span in _spans(rows, columns):
            numbers[slice(*span)] = self._numbers(matrix, span)
        return QuantizedTensor(numbers, matrix.scales[:, 0].clone(), WeightFormat.INT8, columns)

    def _blocks(self, matrix: _Matrix, form: WeightFormat) -> QuantizedTensor | None:
        """Return blocks of GGUF; their scales must be float16 numbers."""
        rows, columns = self.matrices[matrix.name]
        half = matrix.scales.half()
        if columns // matrix.groups % GROUP or not torch.equal(half.float(), matrix.scales):
            return None
        blocks = columns // GROUP
        data = torch.empty(rows, form.row_bytes(columns), dtype=torch.uint8)
        for span in _spans(rows, columns):
            scales = half[slice(*span)].repeat_interleave(blocks // matrix.groups, 1).unsqueeze(2).contiguous()
            numbers = self._numbers(matrix, span)
            if form is WeightFormat.Q8_0:
                block = numbers.view(torch.uint8).view(-1, blocks, GROUP)
            else:
                low, high = (numbers + 8).view(torch.uint8).view(-1, blocks, 2, GROUP // 2).unbind(2)
                block = low | high << 4
            data[slice(*span)] = torch.cat((scales.view(torch.uint8), block), 2).flatten(1)
        return QuantizedTensor(data, None, form, columns)

    def _floats(self, name: str, span: tuple[int, int]) -> Tensor:
        """Rows of a packed matrix, float32 [n, K]."""
        matrix = self._matrix(name)
        whole = torch.empty(span[1] - span[0], matrix.columns)
        for first, last in _spans(len(whole), matrix.columns):
            rows = (span[0] + first, span[0] + last)
            numbers = self._numbers(matrix, rows).float().unflatten(1, (matrix.groups, -1))
            if matrix.zeros is not None:
                numbers -= matrix.zeros[slice(*rows)].float().unsqueeze(2)
            whole[first:last] = (numbers * matrix.scales[slice(*rows)].unsqueeze(2)).flatten(1)
        return whole

    def _numbers(self, matrix: _Matrix, span: tuple[int, int]) -> Tensor:
        """Rows before scales are applied, int8 [n, K]."""
        words = self.source.read_range(matrix.name + _PACKED, span, dim=0)
        return _unpacked(words, matrix.bits, matrix.columns)

    def _matrix(self, name: str) -> _Matrix:
        rows, columns = self.matrices[name]
        scales = self._scales(name, rows)
        groups = scales.shape[1]
        words = self.source.infos()[name + _PACKED]
        bits = next((bits for bits in (4, 8) if words.shape == (rows, -(-columns * bits // 32))), 0)
        if words.dtype != "I32" or not bits or columns % groups:
            raise CheckpointError(
                f"{self.path}: {name}{_PACKED}: expected {rows} x {columns} numbers of 4 or 8 bits, got shape "
                f"{list(words.shape)} and {groups} groups; download the file again"
            )
        if not self._has(name + _ZERO):
            return _Matrix(name, columns, bits, scales, None)
        packed = self._part(name, _ZERO)
        if packed.dtype != torch.int32 or packed.shape != (-(-rows * bits // 32), groups):
            raise CheckpointError(
                f"{self.path}: {name}{_ZERO}: expected zero points for {rows} rows of {groups} groups, got shape "
                f"{list(packed.shape)}; download the file again"
            )
        return _Matrix(name, columns, bits, scales, _unpacked(packed.t(), bits, rows).t())

    def _scales(self, name: str, rows: int) -> Tensor:
        """[N, groups] float32"""
        found = self._part(name, _SCALE).float()
        if found.ndim != 2 or found.shape[0] != rows or not bool(torch.isfinite(found).all()):
            raise WeightValueError(
                f"{self.path}: {name}{_SCALE}: expected finite scales for {rows} rows, got shape "
                f"{list(found.shape)} or other numbers; download the file again"
            )
        return found

    def _has(self, part: str) -> bool:
        return part in self.source.infos() or part in _index(self.path)

    def _part(self, name: str, suffix: str) -> Tensor:
        """A part of a matrix, from this file or another one of the checkpoint."""
        part = name + suffix
        if part in self.source.infos():
            return self.source.read(part)
        file = _index(self.path).get(part)
        if file is None:
            raise MissingWeightsError(
                f"{self.path}: expected the tensor {part}, got none; download the checkpoint in full"
            )
        with open_safetensors(self.path.with_name(file)) as other:
            if part not in other.infos():
                raise MissingWeightsError(
                    f"{file}: expected the tensor {part}, which the index lists, got none; download the checkpoint "
                    "again"
                )
            return other.read(part).clone()


def packed_parts(name: str, matrix: QuantizedTensor) -> dict[str, Tensor]:
    """The tensors of a matrix of Q4_0 or Q8_0, by their names; read again they are the same blocks."""
    form, (rows, columns) = matrix.format, matrix.shape
    assert form in (WeightFormat.Q4_0, WeightFormat.Q8_0), "blocks with a scale alone"
    bits = 4 if form is WeightFormat.Q4_0 else 8
    blocks = matrix.data.view(rows, -1, form.block_bytes)
    words = torch.empty(rows, columns * bits // 32, dtype=torch.int32)
    for span in _spans(rows, columns):
        stored = blocks[slice(*span), :, 2:]
        # Words are little-endian, as the processors are: their bytes in order, two numbers of 4 bits in each.
        if bits == 4:
            numbers = torch.cat((stored & 15, stored >> 4), 2).flatten(1)
            line = numbers[:, 0::2] | numbers[:, 1::2] << 4
        else:
            line = (stored ^ 0x80).flatten(1)  # 128 more than the signed number
        words[slice(*span)] = line.contiguous().view(torch.int32)
    return {
        name + _PACKED: words,
        name + _SCALE: blocks[:, :, :2].contiguous().view(torch.float16).squeeze(2),
        name + _SHAPE: torch.tensor([rows, columns]),
    }


def _is_part(name: str, infos: dict[str, TensorInfo], elsewhere: dict[str, str]) -> bool:
    """Whether a tensor belongs to a packed matrix, of this file or another one."""
    suffix = next((one for one in (_PACKED, *_BESIDE) if name.endswith(".weight" + one)), None)
    if suffix is None:
        return False
    packed = name.removesuffix(suffix) + _PACKED
    return packed in infos or packed in elsewhere


def _index(path: Path) -> dict[str, str]:
    """Return the file of each tensor of a checkpoint in several files; only plain names are followed."""
    file = path.with_name("model.safetensors.index.json")
    if path.name == "model.safetensors" or not file.is_file():
        return {}
    places: Any = read_json_object(file).get("weight_map")
    if not isinstance(places, dict):
        return {}
    return {name: one for name, one in places.items() if isinstance(one, str) and Path(one).name == one}


def _spans(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Rows in pieces whose numbers may be unpacked at once."""
    step = max(1, _PIECE // max(1, columns))
    for begin in range(0, rows, step):
        yield begin, min(begin + step, rows)


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` numbers of every row. words [n, w] int32 -> [n, count] int8"""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)
    return (numbers.flatten(1)[:, :count] - (1 << (bits - 1))).to(torch.int8)
