"""The header of a GGUF file: its metadata and the offset of each tensor. Neither reads tensors nor interprets keys.

Every length in the file is compared with the remaining bytes before any allocation or loop, so that a truncated or
hostile file is rejected at once. `gguf.GGUFReader` does not check lengths and keeps an array object for each string
(2.3 s for a vocabulary of 49,152; this module about 0.1 s). Sizes and names of tensor types are the `gguf` package's.
The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.core.errors import CheckpointError, MissingWeightsError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.weights.folder import parts

_AGAIN = "download the file again"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # version 1 used 32-bit counts; it is not written since 2023
_ALIGNMENT = 32  # default if `general.alignment` is absent
_MAX_DIMS = 4

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it is stored in the file.

    shape   in torch's order, the last dimension fastest
    type    name of its ggml type, such as Q4_1
    offset  position of its first byte in the file
    block   (numbers, bytes) of a block; (1, 4) for F32
    path    the file
    """

    shape: tuple[int, ...]
    type: str
    offset: int
    block: tuple[int, int]
    path: Path

    @property
    def row_bytes(self) -> int:
        """Bytes of the last dimension."""
        return self.shape[-1] // self.block[0] * self.block[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata (text, numbers, truth values, and lists of these) and tensors, each keyed by the name in the file."""

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, StoredTensor]

    @property
    def fields(self) -> Fields:
        """The metadata with checks of types and values, whose errors name the file and the key."""
        return Fields(self.metadata, str(self.path))


def read_header(path: Path) -> GgufHeader:
    """Read the header of the file ``path``, or of all parts of its model, and check it against the files' sizes."""
    header = _read_file(path)
    count = header.fields.integer("split.count", 1, minimum=0)
    files = parts(path)
    if count <= 1:
        return header
    if count != len(files):
        raise CheckpointError(
            f"{path}: expected a name such as NAME-00001-of-{count:05d}.gguf for one of {count} parts of a model, got "
            f"{path.name!r}; name all parts alike, in one folder"
        )
    headers = [header if file == path else _read_file(file) for file in files]
    tensors: dict[str, StoredTensor] = {}
    for number, (file, part) in enumerate(zip(files, headers, strict=True)):
        said = [part.fields.integer(f"split.{key}", -1, minimum=-1) for key in ("no", "count")]
        if said != [number, count] or tensors.keys() & part.tensors.keys():
            raise CheckpointError(f"{file} is not part {number + 1} of the model of {files[0].name}; {_AGAIN}.")
        tensors.update(part.tensors)
    total = headers[0].fields.integer("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(f"{files[0]} announces {total} tensors, and its parts hold {len(tensors)}; {_AGAIN}.")
    return GgufHeader(files[0], headers[0].metadata, tensors)


def _read_file(path: Path) -> GgufHeader:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if not size:
                raise MissingWeightsError(f"{path}: the file is empty; {_AGAIN}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Parser(path, data, size).header()
    except FileNotFoundError as error:
        raise MissingWeightsError(f"{path}: the file does not exist; give the path of a GGUF file") from error
    except OSError as error:
        raise MissingWeightsError(f"{path}: the file cannot be read ({error}); check its permissions") from error


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        self._path, self._data, self._size, self._at = path, data, size, 0

    def header(self) -> GgufHeader:
        self._check_magic()
        num_tensors, num_keys = self._take("QQ")
        self._check_room(num_keys, 8 + 4 + 1, "keys")
        metadata: dict[str, object] = {}
        for _ in range(num_keys):
            key = self._string()
            if key in metadata:
                raise self._damaged(f"the key {key!r} occurs twice")
            metadata[key] = self._value(*self._take("I"))
        self._check_room(num_tensors, 8 + 4 + 8 + 4 + 8, "tensors")
        entries = [self._tensor() for _ in range(num_tensors)]
        alignment = Fields(metadata, str(self._path)).integer("general.alignment", _ALIGNMENT)
        if alignment & (alignment - 1):
            raise self._damaged(f"general.alignment = {alignment} is not a power of two")
        begin = -(-self._at // alignment) * alignment
        return GgufHeader(self._path, metadata, self._placed(entries, begin, alignment))

    def _check_magic(self) -> None:
        start = bytes(self._data[:4])
        if start == b"vers":  # "version https://git-lfs..."
            raise MissingWeightsError(
                f"{self._path}: expected weights, got a Git LFS pointer; run `git lfs pull` in its folder"
            )
        if start != _MAGIC:
            raise CheckpointError(f"{self._path}: expected a GGUF file, got one that starts with {start!r}; {_AGAIN}")
        self._at = 4
        (version,) = self._take("I")
        if version in _VERSIONS:
            return
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self._path}: expected a little-endian file, got a big-endian one; use a file for little-endian "
                "machines"
            )
        raise CheckpointError(
            f"{self._path}: expected GGUF version {' or '.join(map(str, _VERSIONS))}, got {version}; use a newer "
            "conversion of the model"
        )

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], int, int]], begin: int, alignment: int
    ) -> dict[str, StoredTensor]:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        types = {int(kind): (kind.name, GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise self._damaged(f"the tensor {name} occurs twice")
            if kind not in types:
                raise UnknownArchitectureError(
                    f"{self._path}: {name}: the tensor type {kind} is unknown; install a newer version of the "
                    "package gguf, or use a file with other types"
                )
            stored = StoredTensor(shape, types[kind][0], begin + offset, types[kind][1], self._path)
            if shape[-1] % stored.block[0] or offset % alignment:
                raise self._damaged(f"the shape or offset of {name} does not fit its type {stored.type}")
            end = stored.offset + stored.num_bytes
            if end > self._size:
                raise MissingWeightsError(
                    f"{self._path}: the file is truncated: it has {self._size:,} bytes, and {name} ends at {end:,}; "
                    f"{_AGAIN}"
                )
            tensors[name] = stored
        return tensors

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Parse name, shape, type number, and offset from the beginning of the tensors' bytes."""
        name = self._string()
        (dims,) = self._take("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self._damaged(f"{name} has {dims} dimensions")
        shape = self._take(f"{dims}Q")
        if 0 in shape:
            raise self._damaged(f"{name} has a dimension of 0")
        kind, offset = self._take("IQ")
        return name, tuple(reversed(shape)), kind, offset

    def _value(self, kind: int) -> object:
        if kind in _SCALARS:
            return self._take(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            raise self._damaged(f"a value has the unknown type {kind}")
        inner, count = self._take("IQ")
        if inner in _SCALARS:
            self._check_room(count, struct.calcsize("<" + _SCALARS[inner]), "values")
            return list(self._take(f"{count}{_SCALARS[inner]}"))
        if inner != _STRING:
            raise self._damaged(f"a list holds values of type {inner}")
        self._check_room(count, 8, "strings")
        return [self._string() for _ in range(count)]

    def _string(self) -> str:
        (length,) = self._take("Q")
        self._check_room(length, 1, "characters")
        begin, self._at = self._at, self._at + length
        try:
            return self._data[begin : self._at].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged(f"the text at byte {begin} is not UTF-8") from error

    def _take(self, layout: str) -> tuple[int, ...]:
        layout = "<" + layout
        self._check_room(struct.calcsize(layout), 1, "bytes")
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return values

    def _check_room(self, count: int, least: int, what: str) -> None:
        """Raise MissingWeightsError unless ``count`` items of at least ``least`` bytes each can follow."""
        left = self._size - self._at
        if count * least > left:
            raise MissingWeightsError(
                f"{self._path}: the file is truncated or damaged: at byte {self._at:,} of {self._size:,} it "
                f"announces {count:,} {what}; {_AGAIN}"
            )

    def _damaged(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: the file is damaged: {reason}; {_AGAIN}")
