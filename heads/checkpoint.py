"""Folders of heads of any kind: read, checked tensor by tensor, and written. Pickles are read by torch's restricted
unpickler.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from paceline.core.errors import CheckpointError, MissingWeightsError, WeightShapeError
from paceline.decoder.weights.files import check_finite, write_weight_file
from paceline.decoder.weights.folder import find_weight_files
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.open import open_weight_file
from paceline.decoder.weights.quantize import PackedMatrix
from paceline.heads.layouts import CONFIG, head_format, write_json

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True)
class Checkpoint(Generic[Config]):
    """Heads as read: ``weights`` by our names, in the stored type; ``embedding`` [V, H], their own, or None: the
    target's.
    """

    config: Config
    weights: dict[str, Tensor]
    embedding: Tensor | None = None


def read(folder: Path, files: Sequence[Path] = (), wanted: Callable[[str], bool] | None = None) -> dict[str, Tensor]:
    """Read the wanted tensors of some files, or of all of a checkpoint; copies, since files may change.
    CheckpointError: the folder cannot be used.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: expected a folder, got a file or nothing; give the folder that contains the heads"
        )
    tensors: dict[str, Tensor] = {}
    for file in files or find_weight_files(folder):
        with open_weight_file(file) as source:
            for name in source.infos():
                if wanted is not None and not wanted(name):
                    continue
                if name in tensors:
                    raise CheckpointError(
                        f"{folder}: expected every tensor once, got {name} in two files; download the checkpoint again"
                    )
                tensors[name] = source.read(name).clone()
    return tensors


def check(folder: Path, weights: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that every tensor exists, with its shape and finite numbers, and that there are no others; CheckpointError
    or one of its kinds if not.
    """
    if missing := sorted(set(shapes) - set(weights)):
        raise MissingWeightsError(
            f"{folder}: expected the tensors {', '.join(missing[:4])}, got none; download the checkpoint in full, "
            f"with its own {CONFIG}"
        )
    if surplus := sorted(set(weights) - set(shapes)):
        raise CheckpointError(
            f"{folder}: expected only tensors that a head with this {CONFIG} uses, got also "
            f"{', '.join(surplus[:4])}; use the {CONFIG} that belongs to the weights"
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != shape:
            raise WeightShapeError(
                f"{folder}: {name}: expected shape {list(shape)} from its {CONFIG} and the target, got "
                f"{list(weights[name].shape)}; use the {CONFIG} and the target that belong to it"
            )
        check_finite(name, weights[name], weights[name].dtype, where=folder)


def as_dtype(folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return weights in a number format, and ``ids`` as they are; CheckpointError: one has values beyond it."""
    return {name: x if name == "ids" else check_finite(name, x, dtype, where=folder) for name, x in weights.items()}


def head_form(target: nn.Module, quantization: str | None) -> WeightFormat | None:
    """Return the format of a head's matrices; None: the target's ``amp``. ``target``: its network.

    An int8 matmul reads half the bytes, and is closer to float32 than one of bfloat16. Fewer bits would lower
    acceptance.
    """
    if quantization is not None:
        return head_format(quantization)
    packed = [one.format for one in target.modules() if isinstance(one, PackedMatrix)]
    return WeightFormat.INT8 if any(form is not WeightFormat.FP8_E4M3 for form in packed) else None


def unless_equal(own: Tensor | None, shared: object) -> Tensor | None:
    """Return a head's own table, unless its first rows, those of rank 0, equal the target's. A quantised table equals
    none.
    """
    if own is None or not isinstance(shared, Tensor) or own.shape[1:] != shared.shape[1:]:
        return own
    rows = min(len(own), len(shared))
    return None if torch.equal(own[:rows], shared[:rows]) else own


def write(path: Path, tensors: Mapping[str, Tensor], config: Mapping[str, object]) -> Path:
    """Write a file of weights, and a config.json next to it. -> the file"""
    write_weight_file(path, {name: x.detach().clone().contiguous() for name, x in tensors.items()})
    write_json(path.parent / CONFIG, config, indent=2)
    return path


_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def drafted_ids(sizes: tuple[int, int], offsets: Tensor | None, mask: Tensor | None, *, where: str) -> Tensor:
    """Return the target's id of every id that can be drafted, [U] int64, from d2t [U] (offsets) and t2d [V]. ``sizes``:
    U, V. CheckpointError: they are missing, not integers, contradict each other, or leave the vocabulary.
    """
    count, every = sizes
    for name, value in (("d2t", offsets), ("t2d", mask)):
        if value is not None and value.dtype not in _WHOLE:  # bfloat16 cannot hold every integer above 256
            raise CheckpointError(
                f"{where}: expected whole numbers in {name}, got {value.dtype}; download the checkpoint again"
            )
    if offsets is None:
        if count != every:
            raise MissingWeightsError(
                f"{where}: expected the tensor d2t, which lists the {count} of {every} ids that the head "
                "drafts, got none; download the checkpoint in full"
            )
        offsets = torch.zeros(count, dtype=torch.int64)
    if offsets.shape != (count,):
        raise WeightShapeError(
            f"{where}: expected d2t of shape [{count}], got {list(offsets.shape)}; download the checkpoint again"
        )
    ids = offsets.to(torch.int64) + torch.arange(count)
    if bool((ids < 0).any()) or bool((ids >= every).any()) or len(ids.unique()) != count:
        raise CheckpointError(
            f"{where}: expected {count} different ids below {every} as id + d2t[id], got other values in d2t; "
            "download the checkpoint again"
        )
    if mask is not None:
        if mask.shape != (every,):
            raise WeightShapeError(
                f"{where}: expected t2d of shape [{every}], got {list(mask.shape)}; download the checkpoint again"
            )
        if not torch.equal(mask.nonzero().flatten(), ids.sort().values):
            raise CheckpointError(
                f"{where}: expected the same ids in t2d and d2t, got different ones; download the checkpoint again"
            )
    return ids


@dataclass(frozen=True, slots=True)
class DraftVocab:
    """Ids that a head drafts: ids [U] int64, ascending; all of the target's for version 1."""

    ids: Tensor
    size: int

    @classmethod
    def frequent(cls, counts: Tensor, keep: int) -> DraftVocab:
        """Return the ``keep`` most frequent ids, among equals the lower id. counts [V]"""
        order = torch.argsort(counts, descending=True, stable=True)
        return cls(order[:keep].sort().values, len(counts))

    def to(self, device: str) -> DraftVocab:
        return DraftVocab(self.ids.to(device), self.size)

    @property
    def key(self) -> str:
        """Identifies the ids."""
        return hashlib.sha256(self.ids.cpu().numpy().tobytes()).hexdigest()[:16]

    @property
    def offsets(self) -> Tensor:
        """d2t [U] int64: the target's id of draft id i is i + d2t[i]."""
        return self.ids - torch.arange(len(self.ids), device=self.ids.device)

    @property
    def mask(self) -> Tensor:
        """t2d [V] bool: whether the head can draft that id."""
        return torch.zeros(self.size, dtype=torch.bool, device=self.ids.device).index_fill(0, self.ids, True)
