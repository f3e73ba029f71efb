"""The files a checkpoint's weights are in: which ones there are, and one of them opened, in any format.

Gives names, shapes and tensors as they lie in a file, and writes such files. It does not know what a model needs; that
comparison is ``decoder/weights.py``. A pickle (``.bin``) is read by torch's restricted unpickler only, which builds
tensors and refuses everything else: no code from a file is run.
"""

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
from paceline.decoder.weights.compressed import SCALE, STORED_FORMATS
from paceline.decoder.weights.quantize import QuantizedTensor

_ZIP = b"PK\x03\x04"
_AGAIN = "download the file again"
_CANDIDATES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
FLOAT_NAMES = frozenset(_DTYPE_NAMES.values())


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a file says of a tensor before its data are read; the dtype as safetensors writes it (BF16)."""

    shape: tuple[int, ...]
    dtype: str


def is_gguf(path: Path) -> bool:
    """Whether a path is named as a GGUF file, be it there or not."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


class WeightFile(Protocol):
    """An open file of weights. A tensor from ``read`` may lie in the file's memory: copy what is to stay."""

    def infos(self) -> dict[str, TensorInfo]: ...

    def read(self, name: str) -> Tensor: ...

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        """Rows (dim 0) or columns (dim 1) of a ``span``, whose end is not included; no others are read."""

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        """The matrix as it is stored, copied, if it is stored in a `WeightFormat`."""


def has_weight_files(folder: Path) -> bool:
    """Whether a folder holds safetensors or pickles by the usual names."""
    return any((folder / name).is_file() for name in _CANDIDATES)


def find_weight_files(folder: Path) -> list[Path]:
    """The files of the checkpoint in ``folder``: safetensors before pickles, one file before shards."""
    for name in _CANDIDATES:
        if (folder / name).is_file():
            return _indexed_files(folder / name) if name.endswith(".json") else [folder / name]
    raise MissingWeightsError(
        f"{folder} holds no weights: none of {', '.join(_CANDIDATES)} is there; download the checkpoint in "
        "full, or convert it to one of these formats."
    )


def is_mapped(path: Path) -> bool:
    """Whether opening a file reads none of its tensors: not so of the format of PyTorch before 1.6."""
    return path.suffix == ".safetensors" or is_gguf(path) or _first_bytes(path).startswith(_ZIP)


@contextmanager
def open_weight_file(path: Path) -> Iterator[WeightFile]:
    """Open one file of weights; absent, truncated or unreadable is a MissingWeightsError.

    Matrices that are packed are read as floats (`paceline.decoder.weights.packed`).
    """
    with open_plain(path) as source:
        if path.suffix != ".safetensors":
            yield source
            return
        from paceline.decoder.weights.packed import PackedFile  # it imports this module

        yield PackedFile.around(source, path)


@contextmanager
def open_plain(path: Path) -> Iterator[WeightFile]:
    """The same with every tensor as it is stored."""
    start = _first_bytes(path)
    if start.startswith(b"version https://git-lfs"):
        raise MissingWeightsError(
            f"{path} is a Git LFS pointer and not the weights themselves; run `git lfs pull` in its folder."
        )
    if is_gguf(path):
        from paceline.decoder.gguf.checkpoint import GgufFile  # it imports this module

        yield GgufFile.open(path)
        return
    if path.suffix != ".safetensors":
        yield _PickleFile(path, _unpickle(path, start))
        return
    try:
        # safe_open compares the header with the file's size, so that a truncated file fails before any read.
        with safe_open(path, framework="pt", device="cpu") as handle:
            yield _SafetensorsFile(handle)
    except SafetensorError as error:
        raise MissingWeightsError(f"{path} is truncated or not a safetensors file ({error}); {_AGAIN}.") from error


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

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        names = self.handle.keys()
        if name + SCALE not in names:
            return None
        data = self.handle.get_tensor(name)
        scales = self.handle.get_tensor(name + SCALE).float().flatten()
        scales = scales.expand(len(data)) if len(scales) == 1 else scales
        if len(scales) != len(data) or not bool((torch.isfinite(scales) & (scales > 0)).all()):
            raise WeightValueError(
                f"{name}{SCALE} must have a positive number for each of {len(data)} rows, or one for all; the "
                f"checkpoint is damaged, {_AGAIN}."
            )
        if data.dtype.is_floating_point and bool(data.float().isnan().any()):
            raise WeightValueError(f"{name} holds NaN; the checkpoint is damaged, {_AGAIN}.")
        form = STORED_FORMATS[self.handle.get_slice(name).get_dtype()]
        return QuantizedTensor(data.clone(), scales.clone(), form, data.shape[1])


@dataclass(frozen=True, slots=True)
class _PickleFile:
    path: Path
    tensors: dict[str, Tensor]

    def infos(self) -> dict[str, TensorInfo]:
        return {name: TensorInfo(tuple(tensor.shape), _dtype_name(tensor)) for name, tensor in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.tensors[name].detach()

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        return self.read(name).narrow(dim, span[0], span[1] - span[0])

    def read_quantized(self, name: str) -> QuantizedTensor | None:
        return None


def write_weight_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a file of weights, whole or not at all, for everyone to read: safetensors, or a pickle named .pt.

    Raises:
        StorageError: it cannot be written.
    """
    if path.suffix == ".pt":
        save_pickle(path, tensors)
    else:
        save_tensors(path, tensors, {"format": "pt"})
    path.chmod(0o644)  # safetensors makes a file that only its owner reads


def check_stored(name: str, dtype: str, *, where: Path) -> None:
    """Raise CheckpointError unless a tensor's numbers are what they say, and not a quantised form of others."""
    if dtype not in FLOAT_NAMES:
        raise CheckpointError(
            f"{where}: {name} is stored as {dtype}; quantised weights of this kind are not supported, "
            "use the checkpoint in float32, bfloat16 or float16."
        )


def check_finite(name: str, tensor: Tensor, dtype: torch.dtype, *, where: Path) -> Tensor:
    """A tensor that was read from a checkpoint, in the type it is computed with.

    Raises:
        CheckpointError: it is quantised.
        WeightValueError: it holds NaN, infinity, or values beyond that type.
    """
    check_stored(name, _dtype_name(tensor), where=where)
    converted = tensor.to(dtype)
    if not bool(torch.isfinite(converted).all()):
        if not bool(torch.isfinite(tensor).all()):
            raise WeightValueError(f"{where}: {name} holds NaN or infinity; the checkpoint is damaged, fetch it again")
        raise WeightValueError(f"{where}: {name} holds values beyond {dtype}; load the target with amp='f32'")
    return converted


def _dtype_name(tensor: Tensor) -> str:
    return _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))


def _indexed_files(index: Path) -> list[Path]:
    """The shards an index names. Only plain names in its own folder with its own format are followed."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no weight_map, so it names no files; {_AGAIN}.")
    suffix = ".safetensors" if ".safetensors." in index.name else ".bin"
    names = []
    for name in dict.fromkeys(map(str, weight_map.values())):
        # Compared as text and not by resolving links: the Hugging Face cache keeps every file behind a link
        # that leaves its folder, and those the user's own machine made.
        if not name.isprintable() or any(sign in name for sign in "/\\:") or not name.endswith(suffix):
            raise CheckpointError(
                f"{index} names the file {name!r}; an index may only name {suffix} files in its own folder. "
                "Do not use this checkpoint unless you know who wrote it."
            )
        names.append(name)
    return [index.with_name(name) for name in names]


def _first_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except FileNotFoundError as error:
        raise MissingWeightsError(f"{path} does not exist; download the checkpoint in full.") from error
    except OSError as error:
        raise MissingWeightsError(f"{path} cannot be read ({error}); check its permissions.") from error


def _unpickle(path: Path, start: bytes) -> dict[str, Tensor]:
    zipped = start.startswith(_ZIP)
    if not zipped and not start.startswith(b"\x80"):
        raise MissingWeightsError(f"{path} is empty or not a PyTorch file; {_AGAIN}.")
    try:
        # Files from before PyTorch 1.6 are no zip archives and cannot be mapped: they are read whole.
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} is refused: it is damaged or holds more than tensors ({_refusal(error)}), and nothing "
            "in it was run. Use a safetensors checkpoint, or one from an author you trust."
        ) from error
    # A damaged pickle can fail in any way: in the archive, in an opcode, in a tensor's bounds.
    except Exception as error:
        raise MissingWeightsError(f"{path} cannot be read, it is truncated or damaged ({error}); {_AGAIN}.") from error
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path} holds a {type(state).__name__}, not a dictionary of tensors; save model.state_dict() instead."
        )
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{path}: the entry {name!r} is a {type(tensor).__name__}, not a dense tensor with a name; "
                "save model.state_dict() alone."
            )
    return dict(state)


def _refusal(error: pickle.UnpicklingError) -> str:
    """torch's reason, without the advice around it to load the file unrestricted."""
    reason = str(error.__context__ or "").strip()
    return reason.split(". ")[0].split("\n")[0].rstrip(".") or "no reason given"
