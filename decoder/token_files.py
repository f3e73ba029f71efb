"""Files of token ids, for training or drafting: a header with id width and vocabulary size, then the ids.

    8 bytes  "PLTOKENS"
    u16      version of this header, 1
    u16      bytes of an id, 2 or 4
    u32      size of the vocabulary
    ...      the ids end to end; all numbers are little-endian

Ids of 16 bits read as 32, or vice versa, would be wrong ids without an error; hence the header. The width follows from
the vocabulary: 16 bits up to 65,536 ids, 32 above. `paceline.heads.features` cuts sequences from the ids.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.atomic_write import atomic_write, save_bytes

MAGIC = b"PLTOKENS"
_HEADER = struct.Struct("<8sHHI")
HEADER_BYTES = _HEADER.size
"""16: offset of the first id."""

DTYPES = {"uint16": 2, "uint32": 4}
"""Names of the id widths, and their bytes."""


def write_tokens(path: Path, parts: Iterable[ArrayLike], *, vocab_size: int) -> int:
    """Write ids [n] of each part, end to end, atomically. Return their number."""
    size, width = 0, _width(vocab_size)

    def pieces() -> Iterable[bytes]:
        nonlocal size
        yield _HEADER.pack(MAGIC, 1, width, vocab_size)
        for part in parts:
            ids = np.asarray(part).reshape(-1)
            size += len(ids)
            yield _packed(path, ids, vocab_size)

    save_bytes(path, pieces())
    return size


def append_tokens(path: Path, ids: ArrayLike) -> None:
    """Append ids [n] to a file that `write_tokens` began."""
    header = _header(path)
    if header is None:
        raise ConfigurationError(f"{path}: expected a header of token ids, got none; start the file with write_tokens")
    packed = _packed(path, np.asarray(ids).reshape(-1), header[1])
    with atomic_write(path), path.open("ab") as file:
        file.write(packed)


def read_tokens(path: Path, vocab_size: int | None = None, *, dtype: str | None = None) -> np.ndarray:
    """Return all ids of a file, [n] int32; raise ConfigurationError unless they are of the vocabulary and its width.

    vocab_size  of the target; None: any
    dtype       "uint16" or "uint32", id width of a file without a header; a header takes precedence
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigurationError(
            f"dtype: expected one of {', '.join(DTYPES)} for token ids, got {dtype!r}; use one of them"
        )
    header = _header(path)
    width, start = (DTYPES[dtype], 0) if header is None and dtype is not None else (0, HEADER_BYTES)
    if header is not None:
        width = header[0]
        if vocab_size is not None and header[1] > vocab_size:
            raise ConfigurationError(
                f"{path}: expected ids of the target's vocabulary of {vocab_size}, got ids of one of {header[1]}; "
                "use data of the target's own tokenizer"
            )
    elif dtype is None:
        raise ConfigurationError(
            f"{path}: expected a header with the size of the token ids, got none; write it with "
            "paceline.decoder.token_files.write_tokens, or give --data-dtype uint16 or uint32"
        )
    if vocab_size is not None and width != _width(vocab_size):
        raise ConfigurationError(
            f"{path}: expected ids of {8 * _width(vocab_size)} bits for a vocabulary of {vocab_size}, got "
            f"{8 * width}; write the file again with the target's tokenizer"
        )
    if (path.stat().st_size - start) % width:
        raise ConfigurationError(
            f"{path}: expected a whole number of {8 * width}-bit ids, got a part of one at the end; write the file "
            "again"
        )
    ids = np.fromfile(path, dtype=f"<u{width}", offset=start)
    limit = vocab_size if header is None else header[1]
    if limit is not None and len(ids) and ids.max() >= limit:
        raise ConfigurationError(
            f"{path}: expected token ids below the vocabulary size {limit}, got {ids.max()}; use data of the "
            "target's own tokenizer, or another --data-dtype"
        )
    return ids.astype(np.int32)


def _width(vocab_size: int) -> int:
    return 2 if vocab_size <= 1 << 16 else 4


def _packed(path: Path, ids: np.ndarray, vocab_size: int) -> bytes:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        raise ConfigurationError(
            f"{path}: expected token ids of a vocabulary of {vocab_size}, got {ids.min()} to {ids.max()}; give the "
            "size of their own vocabulary"
        )
    return ids.astype(f"<u{_width(vocab_size)}").tobytes()


def _header(path: Path) -> tuple[int, int] | None:
    """Return the bytes of an id and the size of the vocabulary; None: the file has no header."""
    with path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        return None
    _, version, width, vocab_size = _HEADER.unpack(raw)
    if version != 1 or width != _width(vocab_size):
        raise ConfigurationError(
            f"{path}: expected a known header of token ids, got version {version}, {width} bytes per id and "
            f"{vocab_size} ids; write the file again"
        )
    return width, vocab_size
