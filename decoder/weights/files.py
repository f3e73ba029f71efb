"""Files of a checkpoint's weights, opened: safetensors and pickles. Which files there are:
`paceline.decoder.weights.folder`; a file of any kind, GGUF too: `paceline.decoder.weights.open`.

Gives names, shapes and tensors as they lie in a file, and writes such files. It does not know what a model needs; that
comparison is `paceline.decoder.weights.checkpoint`. A pickle (``.bin``) is read by torch's restricted unpickler only,
which builds tensors and refuses everything else: no code from a file is run.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from paceline.core.errors import CheckpointError, MissingWeightsError, WeightValueError
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.weights.atomic_write import save_pickle, save_tensors
from paceline.decoder.weights.folder import AGAIN, is_gguf

_ZIP = b"PK\x03\x04"
_FLOATS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_DTYPE_NAMES = {
    **_FLOATS,
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
FLOAT_NAMES = frozenset(_FLOATS.values())


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Entry of a tensor in a file, before its data are read; the dtype as safetensors writes it (BF16)."""

    shape: tuple[int, ...]
    dtype: str


class WeightFile(Protocol):
    """An open file of weights. A tensor from ``read`` may lie in the file's memory: copy what is to stay."""

    def infos(self) -> dict[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor: ...

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1) of a ``span``, whose end is not included; no others are read."""


def is_mapped(path: Path) -> bool:
    """Whether tensors read from an open file stay in memory until it is closed: GGUF files are mapped anew for each
    tensor.
    """
    return not is_gguf(path) and (path.suffix == ".safetensors" or path.is_dir() or _first_bytes(path).startswith(_ZIP))


@contextmanager
def open_safetensors(path: Path) -> Iterator[WeightFile]:
    """Open one file, whose tensors are as they are stored; absent, truncated or unreadable is a MissingWeightsError."""
    check_present(path)
    try:
        # safe_open compares the header with the file's size, so that a truncated file fails before any read.
        with safe_open(path, framework="pt", device="cpu") as handle:
            yield _SafetensorsFile(handle)
    except SafetensorError as error:
        raise MissingWeightsError(
            f"{path}: expected a safetensors file, got a truncated or other file ({error}); {AGAIN}"
        ) from error


def check_present(path: Path) -> None:
    """Raise MissingWeightsError if a file is missing, unreadable, or a pointer to a file that was not fetched."""
    if _first_bytes(path).startswith(b"version https://git-lfs"):
        raise MissingWeightsError(f"{path}: expected weights, got a Git LFS pointer; run `git lfs pull` in its folder")


@dataclass(frozen=True, slots=True)
class _SafetensorsFile:
    handle: Any  # safetensors' handle has no usable type

    def infos(self) -> dict[str, TensorInfo]:
        slices = {name: self.handle.get_slice(name) for name in self.handle.keys()}  # noqa: SIM118
        return {name: TensorInfo(tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}

    def read(self, name: str) -> Tensor:
        tensor: Tensor = self.handle.get_tensor(name)
        return tensor

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        part = self.handle.get_slice(name)
        tensor: Tensor = part[slice(*span)] if dim == 0 else part[:, slice(*span)]
        return tensor


@dataclass(frozen=True, slots=True)
class PickleFile:
    """A `WeightFile`: a pickle of torch's, read whole."""

    path: Path
    tensors: dict[str, Tensor]

    @classmethod
    def open(cls, path: Path) -> PickleFile:
        check_present(path)
        return cls(path, _unpickle(path))

    def infos(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), dtype_name(tensor)) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach()

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        return self.read(name).narrow(dim, span[0], span[1] - span[0])


def write_weight_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of weights, whole or not at all, for everyone to read: safetensors, or a pickle named .pt."""
    if path.suffix == ".pt":
        save_pickle(path, tensors)
    else:
        save_tensors(path, tensors, {"format": "pt"})
    path.chmod(0o644)  # safetensors makes a file that only its owner reads


def check_stored(name: str, dtype: str, *, where: Path) -> None:
    """Raise CheckpointError unless a tensor's numbers are what they say, and not a quantised form of others."""
    if dtype not in FLOAT_NAMES:
        raise CheckpointError(
            f"{where}: {name}: the data type {dtype} is not supported; use the checkpoint in float32, bfloat16 or "
            "float16"
        )


def check_finite(name: str, tensor: Tensor, dtype: torch.dtype, *, where: Path) -> Tensor:
    """A tensor that was read from a checkpoint in the type it is computed with; raise a CheckpointError unless it fits."""
    check_stored(name, dtype_name(tensor), where=where)
    converted = tensor.to(dtype)
    if not bool(torch.isfinite(converted).all()):
        if not bool(torch.isfinite(tensor).all()):
            raise WeightValueError(f"{where}: {name} contains NaN or infinity; download the checkpoint again")
        raise WeightValueError(f"{where}: {name} contains values beyond {dtype}; load the target with amp='f32'")
    return converted


def dtype_name(tensor: Tensor) -> str:
    """Name of a dtype as safetensors writes it, with a check that weights may have it."""
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except FileNotFoundError as error:
        raise MissingWeightsError(f"{path}: the file does not exist; download the checkpoint in full") from error
    except OSError as error:
        raise MissingWeightsError(f"{path}: the file cannot be read ({error}); check its permissions") from error


def load_pickle(path: Path) -> object:
    """Return the contents of a torch pickle, read with the restricted unpickler and memory-mapped if possible."""
    start = _first_bytes(path)
    zipped = start.startswith(_ZIP)
    if not zipped and not start.startswith(b"\x80"):
        raise MissingWeightsError(f"{path}: expected a PyTorch file, got an empty or other file; {AGAIN}")
    try:
        # Files from before PyTorch 1.6 are no zip archives and cannot be mapped: they are read whole.
        state: object = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: expected tensors only, got a damaged file or other objects ({_refusal(error)}), none of which "
            "was executed; use a safetensors checkpoint, or one from an author you trust"
        ) from error
    # A damaged pickle can fail in any way: in the archive, in an opcode, in a tensor's bounds.
    except Exception as error:
        raise MissingWeightsError(f"{path}: the file is truncated or damaged ({error}); {AGAIN}") from error
    return state


def _unpickle(path: Path) -> dict[str, Tensor]:
    state = load_pickle(path)
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path}: expected a dictionary of tensors, got a {type(state).__name__}; save model.state_dict() instead"
        )
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{path}: {name!r}: expected a dense tensor with a name, got a {type(tensor).__name__}; save only "
                "model.state_dict()"
            )
    return dict(state)


def _refusal(error: pickle.UnpicklingError) -> str:
    """torch's reason, without the advice around it to load the file unrestricted."""
    reason = str(error.__context__ or "").strip()
    return reason.split(". ")[0].split("\n")[0].rstrip(".") or "no reason given"


INDEX = "key_to_filename.json"
_RANDOM = ".empty_json"


@dataclass(frozen=True, slots=True)
class SplitFolder:
    """A `WeightFile`: the folder, and its files by the names of their tensors.

    `save_pretrained_split` writes pytorch_model.bin/key_to_filename.json, an object of file names by tensor names,
    and the files beside it, p0.model.embed_tokens.weight and so on. Each is opened when its tensor is read.
    """

    folder: Path
    files: dict[str, Path]

    @classmethod
    def open(cls, folder: Path) -> SplitFolder:
        """Read the names; of the files none is opened."""
        if not (folder / INDEX).is_file():
            raise CheckpointError(
                f"{folder}: expected a weight file, or a folder with {INDEX} as save_pretrained_split of "
                "transformers-neuronx writes, got a folder without it; download the checkpoint in full"
            )
        names = read_json_object(folder / INDEX)
        if not names:
            raise CheckpointError(f"{folder / INDEX}: expected tensor names, got none; download the checkpoint in full")
        return cls(folder, {name: _place(folder, file) for name, file in names.items()})

    def infos(self) -> dict[str, TensorInfo]:
        """Return the entries of all tensors; every file is opened for this."""
        tensors = ((name, self.read(name)) for name in self.files)
        return {name: TensorInfo(tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors}

    def read(self, name: str) -> Tensor:
        file = self.files[name]
        tensor = load_pickle(file)
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{file}: expected the tensor {name}, which {INDEX} lists, got a {type(tensor).__name__}; use a "
                "safetensors checkpoint"
            )
        return tensor.detach()

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        return self.read(name).narrow(dim, span[0], span[1] - span[0])


def _place(folder: Path, file: object) -> Path:
    if (
        not isinstance(file, str)
        or not file.isprintable()
        or any(sign in file for sign in "/\\:")
        or file in ("", ".", "..")
    ):
        raise CheckpointError(
            f"{folder / INDEX}: expected names of files in its own folder, got {file!r}; do not use this checkpoint "
            "unless you know who wrote it"
        )
    if file.endswith(_RANDOM):
        raise CheckpointError(
            f"{folder / INDEX}: expected weights, got {file}, a size for random numbers; save the model itself with "
            "save_pretrained"
        )
    return folder / file
