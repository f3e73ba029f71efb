"""Opening files of weights, of any kind, one or those of a checkpoint as their tensors are asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.decoder.gguf.checkpoint import GgufFile
from paceline.decoder.weights.files import (
    PickleFile,
    SplitFolder,
    TensorInfo,
    WeightFile,
    check_present,
    open_safetensors,
)

if TYPE_CHECKING:
    from paceline.decoder.models.config import ModelConfig
    from paceline.decoder.models.family import Family


def _gguf(path: Path) -> AbstractContextManager[WeightFile]:
    check_present(path)
    return nullcontext(GgufFile.open(path))


_BY_SUFFIX: dict[str, Callable[[Path], AbstractContextManager[WeightFile]]] = {
    ".safetensors": open_safetensors,
    ".gguf": _gguf,
}


def open_weight_file(path: Path) -> AbstractContextManager[WeightFile]:
    """Open one file of weights, or a folder with a file for every tensor."""
    if path.is_dir():
        return nullcontext(SplitFolder.open(path))
    opened = _BY_SUFFIX.get(path.suffix.lower())
    return nullcontext(PickleFile.open(path)) if opened is None else opened(path)


@dataclass(frozen=True, slots=True)
class Cut:
    """Some rows of a tensor, or of an expert in a tensor of all.

    first, rows, block  of every ``block`` rows, ``rows`` from ``first`` on
    turned              an expert's matrix is stored as [columns, rows]
    """

    first: int
    rows: int
    block: int
    expert: int | None = None
    turned: bool = False

    def read(self, file: WeightFile, name: str) -> Tensor:
        """The rows; blocks [rows, groups, n] as a matrix."""
        if self.expert is None:
            own = file.read(name)
        else:
            own = file.read_range(name, (self.expert, self.expert + 1), dim=0)[0]
        own = own.t() if self.turned else own.flatten(1) if own.dim() > 2 else own
        blocks: Tensor = own.unflatten(0, (-1, self.block))[:, self.first : self.first + self.rows]
        return blocks.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Place:
    """Location of a tensor in a checkpoint: its file, its name and its entry in that file.

    parts  of a quantised matrix: its tensors, by the part of their names after the module's; the first one is ``file``
           and ``stored``
    cut    where it is a part of the stored tensor; ``info`` is that of the part
    """

    file: Path
    stored: str
    info: TensorInfo
    parts: Mapping[str, Place] = field(default_factory=dict)
    cut: Cut | None = None

    def read(self, files: OpenFiles) -> Tensor:
        """All of it, as it is stored."""
        file, cut = files(self.file), self.cut
        return file.read(self.stored) if cut is None else cut.read(file, self.stored)

    def range(self, files: OpenFiles, span: tuple[int, int], *, dim: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1)."""
        if self.cut is None:
            return files(self.file).read_range(self.stored, span, dim=dim)
        return self.read(files).narrow(dim, span[0], span[1] - span[0])


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


_ENDINGS = {
    "": "weight", ".weight": "weight", "_bias": "bias", ".bias": "bias",
    "_blocks": "weight_packed", "_scales": "weight_scale",
}  # fmt: skip
"""Of the names of `Fused`, and of what stands for them."""


def unfused(places: dict[str, Place], family: Family, config: ModelConfig) -> dict[str, Place]:
    """The same with a tensor for each part and expert in place of one that holds several."""
    made = dict(places)
    prefix = re.escape(family.names.layer).replace(r"\{i\}", r"\d+")
    for row in family.fused:
        pattern = re.compile(f"({prefix}){re.escape(row.name)}({'|'.join(map(re.escape, _ENDINGS))})")
        for name, place in places.items():
            if (found := pattern.fullmatch(name)) and (rows := row.parts(config)):
                apart = _apart(place, found.groups(), names=family.names.inner, rows=rows, turned=row.transposed)
                if apart:
                    del made[name]
                    made |= apart
    return made


def _apart(
    place: Place, parts: tuple[str, ...], *, names: Mapping[str, str], rows: Mapping[str, int], turned: bool
) -> dict[str, Place]:
    """The parts of a tensor by name; none where its rows cannot be divided into blocks."""
    (prefix, ending), shape, block = parts, place.info.shape, sum(rows.values())
    by_expert = "{e}" in names[next(iter(rows))]
    own = shape[1:] if by_expert else shape
    turned = turned and len(own) == 2 and _ENDINGS[ending] == "weight"
    own = own[::-1] if turned else own
    if not own or own[0] % block:
        return {}
    made: dict[str, Place] = {}
    experts: Sequence[int | None] = range(shape[0]) if by_expert else (None,)
    for expert in experts:
        first = 0
        for part, count in rows.items():
            info = TensorInfo((own[0] // block * count, *((prod(own[1:]),) if own[1:] else ())), place.info.dtype)
            cut = Cut(first, count, block, expert, turned)
            made[f"{prefix}{names[part].format(e=expert)}.{_ENDINGS[ending]}"] = replace(place, info=info, cut=cut)
            first += count
    return made
