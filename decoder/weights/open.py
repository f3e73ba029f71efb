"""Opening files of weights, of any kind, one or those of a checkpoint as their tensors are asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from paceline.decoder.gguf.checkpoint import GgufFile
from paceline.decoder.weights.files import (
    PickleFile,
    SplitFolder,
    TensorInfo,
    WeightFile,
    check_present,
    open_safetensors,
)


def _gguf(path: Path) -> AbstractContextManager[WeightFile]:
    check_present(path)
    return nullcontext(GgufFile.open(path))


_BY_SUFFIX: dict[str, Callable[[Path], AbstractContextManager[WeightFile]]] = {
    ".safetensors": open_safetensors,
    ".gguf": _gguf,
}


def open_weight_file(path: Path) -> AbstractContextManager[WeightFile]:
    """Open one file of weights, or a folder with a file for every tensor.

    Raises:
        MissingWeightsError: it is absent, truncated or unreadable.
        CheckpointError: it is damaged, or not supported.
    """
    if path.is_dir():
        return nullcontext(SplitFolder.open(path))
    opened = _BY_SUFFIX.get(path.suffix.lower())
    return nullcontext(PickleFile.open(path)) if opened is None else opened(path)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a tensor in a checkpoint: its file, its name and its entry in that file.

    parts  of a quantised matrix: its tensors, by the part of their names after the module's; the first one is ``file``
           and ``stored``
    """

    file: Path
    stored: str
    info: TensorInfo
    parts: Mapping[str, Place] = field(default_factory=dict)


class OpenFiles(ExitStack):
    """Files of a checkpoint, each open from its first use to the end of the block."""

    def __init__(self) -> None:
        super().__init__()
        self._opened: dict[Path, WeightFile] = {}

    def __call__(self, path: Path) -> WeightFile:
        """The file, opened; errors as of `open_weight_file`."""
        if path not in self._opened:
            self._opened[path] = self.enter_context(open_weight_file(path))
        return self._opened[path]
