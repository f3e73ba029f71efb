"""Matrices of few bits as programs store them (`paceline.decoder.weights.layouts`): a reader for each layout.

A reader gives a `CodedMatrix`, whose weights are (number - zero) * scale in float32: what the program that wrote them
computes before it rounds to its own type. It is kept in a `WeightFormat` that has the same numbers, or read as floats.
The parts of a matrix may lie in several files of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd, isfinite
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError, MissingWeightsError, UnknownArchitectureError, WeightValueError
from paceline.decoder.weights.files import TensorInfo
from paceline.decoder.weights.formats import GROUP, WeightFormat
from paceline.decoder.weights.layouts import STORED_FORMATS, block_of
from paceline.decoder.weights.open import OpenFiles, Place
from paceline.decoder.weights.quantize import QuantizedTensor, beyond_e4m3

_PIECE = 1 << 17  # numbers that are read at a time


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix [N, K]: a weight is (number - zero) * scale, both of the number's group.

    numbers  gives rows from one to another, [n, K]: integers or 8-bit floats, or float32 from a table
    form     the `WeightFormat` that has such numbers if a row has one scale; None: none has
    scales   gives float32 [N, groups]
    size     neighbouring columns that form a group; the last group may have fewer
    zeros    gives the zeros of the groups, [N, groups]; None: 0
    order    gives the group of each column, int64 [K], if they are not neighbours
    bits     of an integer
    positive whether other scales are a mistake; else such a matrix is read as floats
    """

    name: str
    shape: tuple[int, int]
    numbers: Callable[[int, int], Tensor]
    form: WeightFormat | None
    scales: Callable[[], Tensor]
    size: int
    zeros: Callable[[], Tensor] | None = None
    order: Callable[[], Tensor] | None = None
    bits: int = 8
    positive: bool = False

    def floats(self, first: int, last: int) -> Tensor:
        """Rows of the matrix, float32 [n, K]."""
        scales, zeros = self._scales(), None if self.zeros is None else self.zeros()
        order = None if self.order is None else self.order()
        made = torch.empty(last - first, self.shape[1])
        for begin, end in self._spans(first, last):
            numbers = made[begin - first : end - first]
            numbers.copy_(self.numbers(begin, end))
            if zeros is not None:
                numbers -= self._spread(zeros[begin:end], order)
            numbers *= self._spread(scales[begin:end], order)
        return made

    def kept(self, wanted: WeightFormat | None, *, blocks: bool) -> QuantizedTensor | None:
        """The same numbers in a `WeightFormat`, the wanted one if one is wanted; None: it does not have them.

        blocks  whether it may be one with blocks
        """
        if self.form is None or self.order is not None or (self.zeros is not None and bool(self.zeros().any())):
            return None
        integers = self.form is WeightFormat.INT8
        block = (WeightFormat.Q4_0 if self.bits == 4 else WeightFormat.Q8_0) if integers and blocks else None
        for form in (block, self.form) if self.bits == 4 else (self.form, block):
            if form is not None and wanted in (None, form):
                made = self._blocks(form) if form.block_bytes else self._rows(form)
                if made is not None:
                    return made
        return None

    def _rows(self, form: WeightFormat) -> QuantizedTensor | None:
        rows, columns = self.shape
        scales = self._scales()
        if scales.shape[1] > 1 or not bool((scales > 0).all()):
            return None
        data = torch.empty(rows, columns, dtype=form.dtype)
        beyond = False
        for begin, end in self._spans(0, rows):
            piece = self.numbers(begin, end)
            if form.dtype.is_floating_point and bool(piece.float().isnan().any()):
                raise WeightValueError(f"{self.name} contains NaN; download the file again")
            data[begin:end] = piece
            beyond = beyond or (form is WeightFormat.FP8_E4M3 and bool(beyond_e4m3(piece).any()))
        return QuantizedTensor(data, scales[:, 0].clone(), form, columns, beyond)

    def _blocks(self, form: WeightFormat) -> QuantizedTensor | None:
        """Return blocks of GGUF; their scales must be float16 numbers."""
        rows, columns = self.shape
        scales = self._scales()
        half = scales.half()
        if columns % GROUP or (scales.shape[1] > 1 and self.size % GROUP) or not torch.equal(half.float(), scales):
            return None
        blocks = columns // GROUP
        data = torch.empty(rows, form.row_bytes(columns), dtype=torch.uint8)
        for begin, end in self._spans(0, rows):
            some = _repeated(half[begin:end], self.size // GROUP if scales.shape[1] > 1 else blocks, blocks)
            numbers = self.numbers(begin, end)
            if form is WeightFormat.Q8_0:
                block = numbers.contiguous().view(torch.uint8).view(-1, blocks, GROUP)
            else:
                low, high = (numbers + 8).contiguous().view(torch.uint8).view(-1, blocks, 2, GROUP // 2).unbind(2)
                block = low | high << 4
            data[begin:end] = torch.cat((some.unsqueeze(2).contiguous().view(torch.uint8), block), 2).flatten(1)
        return QuantizedTensor(data, None, form, columns)

    def _scales(self) -> Tensor:
        """[N, groups] float32, finite"""
        scales = self.scales()
        allowed = torch.isfinite(scales) & (scales > 0) if self.positive else torch.isfinite(scales)
        if not bool(allowed.all()):
            raise WeightValueError(
                f"{self.name}: expected a {'positive' if self.positive else 'finite'} scale for each of "
                f"{self.shape[0]} rows, or one for all, got other values; download the file again"
            )
        return scales

    def _spread(self, values: Tensor, order: Tensor | None) -> Tensor:
        """Values of groups [n, groups] for every column, [n, K], or [n, 1] for all columns alike."""
        if order is not None:
            return values[:, order]
        return values if values.shape[1] == 1 else _repeated(values, self.size, self.shape[1])

    def _spans(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        step = max(1, _PIECE // max(1, self.shape[1]))
        for begin in range(first, last, step):
            yield begin, min(begin + step, last)


def _repeated(values: Tensor, times: int, count: int) -> Tensor:
    """Each column several times, and of that the first ``count``. [n, m] -> [n, count]"""
    return values.unsqueeze(2).expand(-1, -1, times).flatten(1)[:, :count]


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of a matrix in open files, by the part of their names after the module's.

    shape     [N, K] that the matrix must have, or [K, N] if it is ``turned``
    settings  ``quantization_config``
    """

    name: str
    places: Mapping[str, Place]
    files: OpenFiles
    shape: tuple[int, int]
    turned: bool = False
    settings: Mapping[str, object] = field(default_factory=dict)

    def __contains__(self, part: str) -> bool:
        return part in self.places

    def place(self, part: str) -> Place:
        found = self.places.get(part)
        if found is None:
            first, module = next(iter(self.places.values())), self.name.removesuffix("weight")
            raise MissingWeightsError(
                f"{first.file}: expected the tensor {module}{part}, got none; download the checkpoint in full"
            )
        return found

    def info(self, part: str) -> TensorInfo:
        return self.place(part).info

    def read(self, part: str) -> Tensor:
        return self.place(part).read(self.files)

    def range(self, part: str, span: tuple[int, int], *, dim: int = 0) -> Tensor:
        """Rows (dim 0) or columns (dim 1) of a part."""
        return self.place(part).range(self.files, span, dim=dim)

    def check(self, part: str, shape: tuple[int, ...], *types: str) -> None:
        """Raise CheckpointError unless a part has this shape and one of these types."""
        info = self.info(part)
        if info.shape != shape or info.dtype not in types:
            raise self.wrong(part, f"{' or '.join(types)} of shape {list(shape)}")

    def check_scales(self, part: str) -> None:
        """Raise CheckpointError where scales are integers."""
        if self.info(part).dtype in _INTEGERS:
            raise self.wrong(part, "scales that are floats")

    def check_told(self, part: str, told: Sequence[tuple[object, object]], *, bits: int, groups: int) -> None:
        """Raise CheckpointError unless one of ``told``, (bits, columns of a group) by the settings, fits ``bits`` and
        ``groups``.
        """
        columns = self.shape[1]
        for said, size in told:
            fits = isinstance(size, int) and (groups == 1 if size <= 0 else groups == -(-columns // size))
            if said in (None, bits) and (size is None or fits):
                return
        if told:
            named = " or ".join(f"{said} bits in groups of {size}" for said, size in told)
            raise self.wrong(part, f"numbers of {named}, as quantization_config says")

    def wrong(self, part: str, expected: str) -> CheckpointError:
        place = self.place(part)
        return CheckpointError(
            f"{place.file}: {place.stored}: expected {expected}, got {place.info.dtype} of shape "
            f"{list(place.info.shape)}; use the configuration that belongs to these weights, or download them again"
        )


_INTEGERS = ("BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64")

# ---- readers


def _eight_bits(parts: Parts) -> CodedMatrix:
    """X.weight int8 or 8-bit floats [N, K], and scales [N, 1], [N], [1] or, with blocks, [N / rows, K / columns]."""
    (rows, columns), block = parts.shape[:: -1 if parts.turned else 1], block_of(parts.settings)
    scale = next(one for one in ("weight_scale", "weight_scale_inv", "scale") if one in parts)
    form, stored = STORED_FORMATS[parts.info("weight").dtype], parts.info(scale)
    if parts.info("weight").shape != parts.shape:
        raise parts.wrong("weight", f"shape {list(parts.shape)}")
    in_blocks = block is not None and len(stored.shape) == 2 and stored.shape != (1, 1)
    if block is not None and in_blocks and stored.shape != (-(-rows // block[0]), -(-columns // block[1])):
        raise parts.wrong(scale, f"a scale for each block of {block[0]} x {block[1]}")

    parts.check_scales(scale)

    def scales() -> Tensor:
        found = parts.read(scale).float()
        if block is not None and in_blocks:
            return _repeated(found.t(), block[0], rows).t()
        found = found.reshape(-1)
        if len(found) not in (1, rows):
            raise WeightValueError(
                f"{parts.name}: expected a positive scale for each of {rows} rows, or one for all, got "
                f"{len(found)}; download the file again"
            )
        return found.expand(rows).unsqueeze(1)

    def numbers(begin: int, end: int) -> Tensor:
        found = parts.range("weight", (begin, end), dim=int(parts.turned))
        return found.t() if parts.turned else found

    size = block[1] if block is not None and in_blocks else columns
    return CodedMatrix(parts.name, (rows, columns), numbers, form, scales, size, positive=not in_blocks)


def _packed(parts: Parts) -> CodedMatrix:
    """`pack-quantized` of compressed-tensors.

    weight_packed       int32 [N, ceil(K * bits / 32)]: the first number in the lowest bits, with 2^(bits - 1) added
    weight_shape        int64 [2]: N and K
    weight_scale        [N, groups], of groups of K / groups neighbours in a row; one group: a scale for every row
    weight_zero_point   int32 [ceil(N * bits / 32), groups], packed along N; only where weights are asymmetric
    weight_g_idx        the group of each column, -1 for none
    """
    rows, columns = parts.shape
    if parts.read("weight_shape").flatten().tolist() != [rows, columns]:
        raise parts.wrong("weight_shape", f"the numbers {rows} and {columns}")
    words, groups = parts.info("weight_packed"), _groups(parts, "weight_scale", rows, dim=0)
    bits = next((bits for bits in (4, 8) if words.shape == (rows, -(-columns * bits // 32))), 0)
    if words.dtype != "I32" or not bits or columns % groups:
        raise parts.wrong("weight_packed", f"{rows} x {columns} numbers of 4 or 8 bits in {groups} groups")

    def zeros() -> Tensor:
        return _unpacked(parts.read("weight_zero_point").t(), bits, rows).t()

    if "weight_zero_point" in parts and parts.info("weight_zero_point") != TensorInfo(
        (-(-rows * bits // 32), groups), "I32"
    ):
        raise parts.wrong("weight_zero_point", f"zero points for {rows} rows of {groups} groups")
    told = _weights_of(parts.settings)
    sizes = [(one.get("num_bits"), one.get("group_size")) for one in told]
    parts.check_told("weight_packed", sizes, bits=bits, groups=groups)
    if told and groups > 1 and all(one.get("actorder") in ("group", "dynamic") for one in told):
        parts.place("weight_g_idx")
    if told and all(one.get("symmetric") is False for one in told):
        parts.place("weight_zero_point")
    order = _order(parts, "weight_g_idx", columns, groups=groups) if "weight_g_idx" in parts else None
    return CodedMatrix(
        parts.name,
        (rows, columns),
        lambda begin, end: _unpacked(parts.range("weight_packed", (begin, end)), bits, columns),
        WeightFormat.INT8,
        lambda: parts.read("weight_scale").float(),
        columns // groups,
        zeros=zeros if "weight_zero_point" in parts else None,
        order=order,
        bits=bits,
    )


def _gptq(parts: Parts) -> CodedMatrix:
    """GPTQ: matrices as [K, N].

    qweight  int32 [K * bits / 32, N], packed along K, the first number in the lowest bits
    qzeros   int32 [groups, N * bits / 32], packed along N; unless the format is gptq_v2, less 1 in every number, with
             borrows from number to number, as GPTQModel adds and subtracts it
    scales   [groups, N]
    g_idx    int32 [K], the group of each column of the matrix [N, K]
    """
    rows, columns = parts.shape
    words, groups = parts.info("qweight"), _groups(parts, "scales", rows, dim=1)
    bits = next((bits for bits in (4, 8) if words.shape == (columns * bits // 32, rows)), 0)
    if words.dtype != "I32" or not bits or columns * bits % 32 or rows * bits % 32:
        raise parts.wrong("qweight", f"{columns} x {rows} numbers of 4 or 8 bits")
    if parts.info("qzeros") != TensorInfo((groups, rows * bits // 32), "I32"):
        raise parts.wrong("qzeros", f"zero points for {rows} rows of {groups} groups")
    if parts.settings.get("bits") and not parts.settings.get("dynamic"):
        sizes: list[tuple[object, object]] = [(parts.settings["bits"], parts.settings.get("group_size"))]
        parts.check_told("qweight", sizes, bits=bits, groups=groups)
    form = parts.settings.get("checkpoint_format") or parts.settings.get("format")
    one = 0 if form == "gptq_v2" else sum(1 << at for at in range(0, 32, bits))  # in every number of a word
    if parts.settings.get("desc_act") is True and not parts.settings.get("dynamic") and groups > 1:
        parts.place("g_idx")
    order = _order(parts, "g_idx", columns, groups=groups) if "g_idx" in parts else None
    if order is None and columns % groups and "g_idx" not in parts:
        raise parts.wrong("scales", f"groups of equal sizes of {columns} columns, or g_idx")
    size = columns if groups == 1 else _first_group(parts, columns, groups)

    def zeros() -> Tensor:
        return _unpacked(parts.read("qzeros") + one, bits, rows).t()

    return CodedMatrix(
        parts.name,
        (rows, columns),
        lambda begin, end: _unpacked(parts.range("qweight", (begin, end), dim=1).t(), bits, columns),
        WeightFormat.INT8,
        lambda: parts.read("scales").float().t(),
        size,
        zeros=zeros,
        order=order,
        bits=bits,
    )


def _awq(parts: Parts) -> CodedMatrix:
    """AWQ, `gemm`: matrices as [K, N].

    qweight  int32 [K, N / 8], packed along N: of eight columns 0, 2, 4, 6, 1, 3, 5, 7, the first in the lowest bits
    qzeros   int32 [groups, N / 8], the same
    scales   [groups, N]
    """
    rows, columns = parts.shape
    groups = _groups(parts, "scales", rows, dim=1)
    if parts.info("qweight") != TensorInfo((columns, rows // 8), "I32") or rows % 8 or columns % groups:
        raise parts.wrong("qweight", f"{columns} x {rows} numbers of 4 bits in {groups} groups")
    if parts.info("qzeros") != TensorInfo((groups, rows // 8), "I32"):
        raise parts.wrong("qzeros", f"zero points for {rows} rows of {groups} groups")

    size = parts.settings.get("group_size", parts.settings.get("q_group_size"))
    parts.check_told("qweight", [(4, size)], bits=4, groups=groups)

    def columns_of(words: Tensor) -> Tensor:
        """[m, w] int32 -> [m, 8 w] int8"""
        even, odd = _bytes(words).view(len(words), -1, 2, 2).unbind(2)
        return (torch.stack((even & 15, odd & 15, even >> 4, odd >> 4), 3).view(torch.int8) - 8).flatten(1)

    def numbers(begin: int, end: int) -> Tensor:
        words = parts.range("qweight", (begin // 8, -(-end // 8)), dim=1)
        return columns_of(words)[:, begin % 8 : begin % 8 + end - begin].t()

    return CodedMatrix(
        parts.name,
        (rows, columns),
        numbers,
        WeightFormat.INT8,
        lambda: parts.read("scales").float().t(),
        columns // groups,
        zeros=lambda: columns_of(parts.read("qzeros")).t(),
        bits=4,
    )


_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of 4-bit floats."""


def _mxfp4(parts: Parts) -> CodedMatrix:
    """`mxfp4-pack-quantized` of compressed-tensors, and an expert of gpt-oss.

    weight_packed  uint8 [N, K / 2]: two numbers of E2M1 each, the first in the low bits
    weight_scale   uint8 [N, K / 32]: exponents of two, 127 more (E8M0)
    """
    rows, columns = parts.shape
    if parts.info("weight_packed") != TensorInfo((rows, columns // 2), "U8") or columns % GROUP:
        raise parts.wrong("weight_packed", f"{rows} x {columns} numbers of 4 bits")
    if parts.info("weight_scale") != TensorInfo((rows, columns // GROUP), "U8"):
        raise parts.wrong("weight_scale", f"{rows} x {columns // GROUP} exponents")

    def scales() -> Tensor:
        exponents = parts.read("weight_scale").int()
        halves = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - 128)
        return halves.masked_fill(exponents == 255, torch.nan)

    def numbers(begin: int, end: int) -> Tensor:
        pairs = parts.range("weight_packed", (begin, end))
        return _looked_up(pairs.flatten(), torch.tensor(_E2M1, dtype=torch.int8), high_first=False).view(-1, columns)

    return CodedMatrix(parts.name, (rows, columns), numbers, WeightFormat.INT8, scales, GROUP)


def _bitsandbytes(parts: Parts) -> CodedMatrix:
    """4 bits of bitsandbytes: blocks of neighbours in the matrix as one row of N * K numbers.

    weight                     uint8 [N * K / 2, 1]: two numbers each, the first in the high bits
    weight.quant_map           float32 [16]: what a number means
    weight.absmax              float32 [blocks], or uint8, of `nested_quant_map` [256] and `nested_absmax`
    weight.quant_state.*       JSON: blocksize, shape, nested_blocksize, nested_offset
    """
    rows, columns = parts.shape
    kind = next((one for one in ("nf4", "fp4") if f"weight.quant_state.bitsandbytes__{one}" in parts), "nf4")
    part = f"weight.quant_state.bitsandbytes__{kind}"
    state = _json(parts, part)
    count, block = -(-rows * columns // 2), _size(parts, part, state, key="blocksize")
    if state.get("shape") != [rows, columns] or parts.info("weight") != TensorInfo((count, 1), "U8"):
        raise parts.wrong("weight", f"bytes of a matrix of shape {[rows, columns]}")
    parts.check("weight.quant_map", (16,), "F32")
    blocks, coarse, offset = -(-rows * columns // block), 0, 0.0
    nested = "weight.nested_absmax" in parts or parts.info("weight.absmax").dtype == "U8"
    parts.check("weight.absmax", (blocks,), *(("U8",) if nested else ("F32", "F16", "BF16")))
    if nested:
        coarse = _size(parts, part, state, key="nested_blocksize")
        parts.check("weight.nested_quant_map", (256,), "F32")
        parts.check("weight.nested_absmax", (-(-blocks // coarse),), "F32")
        said = state.get("nested_offset")
        if not isinstance(said, int | float) or not isfinite(said):
            raise parts.wrong(part, "a finite nested_offset")
        offset = float(said)
    size = gcd(columns, block)

    def absmax() -> Tensor:
        found = parts.read("weight.absmax")
        if not nested:
            return found.float()
        outer = parts.read("weight.nested_absmax").repeat_interleave(coarse)[: len(found)]
        return parts.read("weight.nested_quant_map")[found.int()] * outer + offset

    def scales() -> Tensor:
        return absmax()[torch.arange(0, rows * columns, size) // block].view(rows, -1)

    def numbers(begin: int, end: int) -> Tensor:
        first, last = begin * columns, end * columns
        pairs = parts.range("weight", (first // 2, -(-last // 2))).flatten()
        found = _looked_up(pairs, parts.read("weight.quant_map"), high_first=True)
        return found[first % 2 : first % 2 + last - first].view(-1, columns)

    return CodedMatrix(parts.name, (rows, columns), numbers, None, scales, size)


def _torchao(parts: Parts) -> CodedMatrix:
    """`IntxUnpackedToInt8Tensor`, `Int8Tensor` and `Float8Tensor` of torchao.

    _weight_qdata       int8 or e4m3 [N, K]
    _weight_scale       [N, groups], [N] or [1]
    _weight_zero_point  the same, or none
    """
    rows, columns = parts.shape
    stored, scale = parts.info("_weight_qdata"), parts.info("_weight_scale")
    if stored.dtype not in STORED_FORMATS or stored.shape != parts.shape:
        raise UnknownArchitectureError(
            f"{parts.name}: quantization_config: expected torchao's tensors of int8 or float8 of shape "
            f"{[rows, columns]}, got {stored.dtype} of shape {list(stored.shape)}; save it with int8 or intx weights"
        )
    groups = scale.shape[1] if len(scale.shape) == 2 else 1
    parts.check_scales("_weight_scale")
    if scale.shape not in ((rows, groups), (rows,), (1,), (1, 1), ()) or columns % groups:
        raise parts.wrong("_weight_scale", f"scales of {rows} rows")

    def values(part: str) -> Tensor:
        found = parts.read(part).float().reshape(-1, groups)
        return found.expand(rows, groups)

    zero = "_weight_zero_point"
    return CodedMatrix(
        parts.name,
        (rows, columns),
        lambda begin, end: parts.range("_weight_qdata", (begin, end)),
        STORED_FORMATS[stored.dtype],
        lambda: values("_weight_scale"),
        columns // groups,
        zeros=(lambda: values(zero)) if zero in parts and parts.info(zero).shape != (0,) else None,
    )


READERS: dict[str, Callable[[Parts], CodedMatrix]] = {
    "8 bits": _eight_bits,
    "fp8": _eight_bits,
    "packed integers": _packed,
    "mxfp4": _mxfp4,
    "mxfp4 experts": _mxfp4,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "torchao": _torchao,
}
"""By the names of `paceline.decoder.weights.layouts.LAYOUTS`."""


def _weights_of(settings: Mapping[str, object]) -> list[Mapping[str, object]]:
    found = settings.get("config_groups")
    groups = list(found.values()) if isinstance(found, Mapping) else []
    weights = [one.get("weights") for one in groups if isinstance(one, Mapping)]
    return [one for one in weights if isinstance(one, Mapping)]


def _groups(parts: Parts, scales: str, rows: int, *, dim: int) -> int:
    """The groups of a row, of which the dimension ``dim`` of the scales has one entry for each row."""
    shape = parts.info(scales).shape
    if len(shape) != 2 or shape[dim] != rows or not shape[1 - dim]:
        raise parts.wrong(scales, f"scales of groups for {rows} rows")
    parts.check_scales(scales)
    return shape[1 - dim]


def _order(parts: Parts, part: str, columns: int, *, groups: int) -> Callable[[], Tensor] | None:
    """The groups of columns if a part says that they are not neighbours."""
    found = parts.read(part).long()
    if found.shape != (columns,) or not bool(((found >= -1) & (found < groups)).all()):
        raise parts.wrong(part, f"the group of each of {columns} columns, 0 to {groups - 1}")
    if bool((found < 0).any()) or torch.equal(found, torch.arange(columns) // max(1, int((found == 0).sum()))):
        return None
    return lambda: found


def _first_group(parts: Parts, columns: int, groups: int) -> int:
    return int((parts.read("g_idx") == 0).sum()) if "g_idx" in parts else columns // groups


def _json(parts: Parts, part: str) -> dict[str, Any]:
    try:
        values = json.loads(bytes(parts.read(part).tolist()))
    except (TypeError, ValueError) as error:
        raise parts.wrong(part, "JSON") from error
    if not isinstance(values, dict):
        raise parts.wrong(part, "a JSON object")
    return values


def _size(parts: Parts, part: str, state: Mapping[str, Any], *, key: str) -> int:
    value = state.get(key)
    if not isinstance(value, int) or value < 1:
        raise parts.wrong(part, f"a {key} above zero")
    return value


def _unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` numbers of every row, less 2^(bits - 1). words [n, w] int32 -> [n, count] int8"""
    stored = _bytes(words)
    if bits == 8:
        return (stored ^ 0x80).view(torch.int8)[:, :count]
    return (torch.stack((stored & 15, stored >> 4), 2).flatten(1).view(torch.int8) - 8)[:, :count]


def _bytes(words: Tensor) -> Tensor:
    """The bytes of words, which are little-endian, as the processors are. [n, w] int32 -> [n, 4 w] uint8"""
    return words.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _looked_up(pairs: Tensor, table: Tensor, *, high_first: bool) -> Tensor:
    """Two numbers of a table [16] for each byte, by its lower and its higher bits; two at once are read faster.

    pairs [n] uint8 -> [2 n]
    """
    both = torch.arange(256)
    places = (both >> 4, both & 15) if high_first else (both & 15, both >> 4)
    known = torch.stack([table[place] for place in places], 1)
    wide = known.view(torch.int64 if table.element_size() == 4 else torch.int16).flatten()
    return wide.index_select(0, pairs.int()).view(table.dtype)
