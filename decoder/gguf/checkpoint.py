"""A GGUF file as a checkpoint: its configuration as config.json would have it, and its tensors as float32.

Which architectures there are is a table here; what one of them means is its module's (`paceline.decoder.gguf.llama`).
Numbers are dequantised by the `gguf` package, a piece at a time from the mapped file, so that beside the result no more
than a piece is held. Not here: tokenizers (`paceline.text.gguf_tokenizer`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.gguf import llama
from paceline.decoder.gguf.header import GgufHeader, StoredTensor, read_header
from paceline.decoder.weights.files import TensorInfo
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor


@dataclass(frozen=True, slots=True)
class Architecture:
    """How a GGUF architecture is said in Hugging Face's words: functions of its module, such as those of `llama`."""

    config: Callable[[GgufHeader, tuple[float, ...] | None], dict[str, object]]
    hugging_face_name: Callable[[str], str]
    row_order: Callable[[GgufHeader, str], llama.RowOrder | None]
    ignored: re.Pattern[str]


ARCHITECTURES = {"llama": Architecture(llama.config, llama.hugging_face_name, llama.row_order, llama.IGNORED)}
"""By the value of `general.architecture`."""

_KEPT = {"Q8_0": WeightFormat.Q8_0, "Q4_0": WeightFormat.Q4_0, "Q4_1": WeightFormat.Q4_1}

_PIECE = 1 << 16  # numbers that are dequantised at a time


def read_checkpoint(path: Path) -> GgufHeader:
    """The header of a file that can be loaded.

    Raises:
        MissingWeightsError: the file is absent or truncated.
        CheckpointError: it is damaged.
        UnknownArchitectureError: its architecture or a tensor's type is not supported.
    """
    header = read_header(path)
    name = header.fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"{path}: general.architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}."
        )
    checked: set[str] = set()
    for tensor, stored in header.tensors.items():
        if stored.type not in checked and not _can_dequantise(stored):
            raise UnknownArchitectureError(
                f"{path}: {tensor} has the type {stored.type}, which cannot be dequantised; use a file with other "
                "types, such as Q8_0, Q4_K or BF16."
            )
        checked.add(stored.type)
    return header


def read_config(path: Path) -> dict[str, object]:
    """The keys of a config.json that say the same as the file's metadata.

    Raises:
        CheckpointError: as `read_checkpoint`; or a key is missing or has a wrong value.
        UnknownArchitectureError: as `read_checkpoint`; or a key would change the computation in a way that is not
            implemented.
    """
    header = read_checkpoint(path)
    config = _architecture(header).config
    factors = header.tensors.get(llama.ROPE_FREQS)
    if factors is None:
        return config(header, None)
    values = _numbers(_mapped(path), factors, np.arange(factors.shape[0])) if len(factors.shape) == 1 else None
    if values is None or not bool((np.isfinite(values) & (values > 0)).all()):
        raise CheckpointError(f"{path} is damaged: {llama.ROPE_FREQS} holds no list of finite numbers above 0")
    return config(header, tuple(values.tolist()))


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A `paceline.decoder.weights.files.WeightFile`: tensors by the names and with the rows that Hugging Face has."""

    header: GgufHeader
    names: dict[str, str]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Open a file.

        Raises:
            CheckpointError, UnknownArchitectureError: as `read_checkpoint`; or two tensors are one to Hugging Face.
        """
        header = read_checkpoint(path)
        architecture = _architecture(header)
        stored = [name for name in header.tensors if not architecture.ignored.fullmatch(name)]
        names = {architecture.hugging_face_name(name): name for name in stored}
        if len(names) < len(stored):
            raise CheckpointError(f"{path} is damaged: it holds a tensor twice, by two names")
        return cls(header, names)

    def infos(self) -> dict[str, TensorInfo]:
        """Shapes; the type is what is read, not what is stored."""
        return {name: TensorInfo(self.header.tensors[stored].shape, "F32") for name, stored in self.names.items()}

    def read(self, name: str) -> Tensor:
        """The whole tensor, float32."""
        shape = self.header.tensors[self.names[name]].shape
        return self._rows(name, (0, shape[0]))

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        """See `paceline.decoder.weights.files.WeightFile`. Of columns, whole blocks are dequantised."""
        if dim == 0:
            return self._rows(name, span)
        shape = self.header.tensors[self.names[name]].shape
        return self._rows(name, (0, shape[0]), columns=span)

    def read_quantized(self, name: str, wanted: WeightFormat | None = None) -> QuantizedTensor | None:
        """See `paceline.decoder.weights.files.WeightFile`: Q8_0, Q4_0 and Q4_1."""
        stored = self.header.tensors[self.names[name]]
        form = _KEPT.get(stored.type)
        if form is None or len(stored.shape) != 2 or wanted not in (None, form):
            return None
        order = _architecture(self.header).row_order(self.header, name)
        rows = np.empty((stored.shape[0], stored.row_bytes), np.uint8)
        for begin, end in _pieces(stored, (0, stored.shape[0])):
            piece = np.arange(begin, end)
            raw = _mapped(self.header.path)[stored.offset : stored.offset + stored.num_bytes]
            rows[begin:end] = raw.reshape(stored.shape[0], -1)[piece if order is None else order(piece)]
        return QuantizedTensor(torch.from_numpy(rows), None, form, stored.shape[1])

    def _rows(self, name: str, span: tuple[int, int], *, columns: tuple[int, int] | None = None) -> Tensor:
        stored = self.header.tensors[self.names[name]]
        order = _architecture(self.header).row_order(self.header, name)
        width = stored.shape[1:] if columns is None else (columns[1] - columns[0],)
        result = np.empty((span[1] - span[0], *width), np.float32)
        for begin, end in _pieces(stored, span) if result.size else ():  # a rank may have nothing of a tensor
            rows = np.arange(begin, end)
            if order is not None:
                rows = order(rows)
            result[begin - span[0] : end - span[0]] = _numbers(_mapped(self.header.path), stored, rows, columns=columns)
        return torch.from_numpy(result)


def _architecture(header: GgufHeader) -> Architecture:
    return ARCHITECTURES[header.fields.text("general.architecture")]


def _mapped(path: Path) -> NDArray[Any]:
    # Anew for every piece: what was read of a mapping stays in memory until the mapping goes. A plain array is over it,
    # which is sliced faster.
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))


def _pieces(stored: StoredTensor, span: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Rows, or numbers of a tensor with one dimension, in pieces."""
    numbers_of_a_row = int(np.prod(stored.shape[1:])) if len(stored.shape) > 1 else 1
    step = max(1, _PIECE // numbers_of_a_row)
    for begin in range(span[0], span[1], step):
        yield begin, min(begin + step, span[1])


def _numbers(
    data: NDArray[Any], stored: StoredTensor, rows: NDArray[Any], *, columns: tuple[int, int] | None = None
) -> NDArray[Any]:
    """Some rows of a tensor, float32; of a tensor with one dimension, some numbers."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    kind, (numbers, size) = GGMLQuantizationType[stored.type], stored.block
    raw = data[stored.offset : stored.offset + stored.num_bytes]
    if len(stored.shape) == 1:
        values: NDArray[Any] = dequantize(np.array(raw), kind)[rows]
        return values
    raw = raw.reshape(stored.shape[0], -1)
    if columns is None:
        return dequantize(raw[rows], kind).reshape(len(rows), *stored.shape[1:])
    first, last = columns[0] // numbers, -(-columns[1] // numbers)
    values = dequantize(np.ascontiguousarray(raw[rows, first * size : last * size]), kind)
    return values[:, columns[0] - first * numbers : columns[1] - first * numbers]


def _can_dequantise(stored: StoredTensor) -> bool:
    """Whether the `gguf` package can: it is asked with one block of zeros."""
    from gguf import dequantize
    from gguf.constants import GGMLQuantizationType

    try:
        with np.errstate(all="ignore"):
            dequantize(np.zeros((1, stored.block[1]), np.uint8), GGMLQuantizationType[stored.type])
    except NotImplementedError:
        return False
    return True
