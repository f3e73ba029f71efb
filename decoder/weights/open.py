"""Opening one file of weights, of any kind. Packed matrices are read as floats (`paceline.decoder.weights.packed`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from paceline.decoder.gguf.checkpoint import GgufFile
from paceline.decoder.weights.files import PickleFile, SplitFolder, WeightFile, check_present, open_safetensors
from paceline.decoder.weights.packed import PackedFile


@contextmanager
def _safetensors(path: Path) -> Iterator[WeightFile]:
    with open_safetensors(path) as source:
        yield PackedFile.around(source, path)


def _gguf(path: Path) -> AbstractContextManager[WeightFile]:
    check_present(path)
    return nullcontext(GgufFile.open(path))


_BY_SUFFIX: dict[str, Callable[[Path], AbstractContextManager[WeightFile]]] = {
    ".safetensors": _safetensors,
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
