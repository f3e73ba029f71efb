"""Write files completely or not at all, and raise a named error if a disk is full, read-only or another user's.

Not here: what is written.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.core.errors import StorageError

if TYPE_CHECKING:
    from torch import Tensor

_REMEDY = "make room, or name another place"


@contextmanager
def atomic_write(path: Path, remedy: str = _REMEDY) -> Iterator[None]:
    """Around what writes ``path``, a file or a folder: an OSError about it becomes a StorageError with ``remedy``."""
    try:
        yield
    except OSError as error:
        if not _about(error, path):  # a program that was called meanwhile and is not there, say
            raise
        raise StorageError(f"{path}: cannot be written ({error.strerror or error}); {remedy}") from error


def _about(error: OSError, path: Path) -> bool:
    named = error.filename
    return not isinstance(named, str) or Path(named).is_relative_to(path.parent) or path.is_relative_to(named)


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all; raise StorageError if it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    with _whole(path) as part:
        try:
            save_file(tensors, part, metadata=metadata)
        except SafetensorError as error:  # the tensors are ours, so it is the disk
            raise OSError(str(error)) from error


def save_pickle(path: Path, value: object) -> None:
    """Write a file with `torch.save`, as `save_tensors`."""
    import torch

    with _whole(path) as part:
        try:
            torch.save(value, part)
        except RuntimeError as error:  # on a full disk torch speaks of positions in its archive
            raise OSError(f"no room left, or {error}") from error


def save_bytes(path: Path, parts: Iterable[bytes]) -> None:
    """Write parts end to end, as `save_tensors`."""
    with _whole(path) as part, part.open("wb") as file:
        file.writelines(parts)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A name to write to, which is renamed to ``path`` when the block ends well, and goes when it does not."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")  # others may write the same file
    with atomic_write(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            yield part
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
