"""Files of a checkpoint's weights, found by their names. No weight file is opened, only an index."""

from __future__ import annotations

import re
from pathlib import Path

from paceline.core.errors import CheckpointError, ConfigurationError, MissingWeightsError
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.weights.formats import WeightFormat

AGAIN = "download the file again"
_CANDIDATES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_SPLIT = "pytorch_model.bin"  # a folder of that name has a file for every tensor, see `paceline.decoder.weights.files`
_PRESHARDED = "DecoderLMHead.safetensors"


def is_gguf(path: Path) -> bool:
    """Whether a path is named as a GGUF file, existing or not."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def resolved(path: Path) -> Path:
    """The path without links; one to a GGUF file stays, as the hub's cache keeps files by names without a suffix."""
    real = path.resolve()
    return path.absolute() if is_gguf(path) and not is_gguf(real) else real


_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


def parts(path: Path) -> list[Path]:
    """Return the files of the model to which the file ``path`` belongs: -00001-of-0000N, or only itself."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    return [path.with_name(f"{match['stem']}-{n:05d}-of-{count:05d}{path.suffix}") for n in range(1, count + 1)]


def check_kept(path: Path, quantization: str | None) -> None:
    """Raise ConfigurationError if the formats of a GGUF file are to be kept, and the checkpoint is none."""
    if quantization == "gguf" and not is_gguf(path):
        names = ", ".join(form.value for form in WeightFormat)
        raise ConfigurationError(
            f"quantization: expected a GGUF file for 'gguf', which keeps the formats of that file, got {path}; use "
            f"{names}"
        )


def has_weight_files(folder: Path) -> bool:
    """Whether a folder holds safetensors or pickles by the usual names."""
    return any((folder / name).is_file() for name in _CANDIDATES) or (folder / _SPLIT).is_dir()


def find_weight_files(folder: Path) -> list[Path]:
    """The files of the checkpoint in ``folder``: safetensors before pickles, one file before shards."""
    for name in _CANDIDATES:
        if (folder / name).is_file():
            return _indexed_files(folder / name) if name.endswith(".json") else [folder / name]
    if (folder / _SPLIT).is_dir():
        return [folder / _SPLIT]
    if (folder / _PRESHARDED).is_file():
        raise CheckpointError(
            f"{folder}: expected whole tensors, got weights that transformers-neuronx has sharded for one tp_degree "
            f"({_PRESHARDED}); give the checkpoint they were made from"
        )
    raise MissingWeightsError(
        f"{folder}: expected weights (one of {', '.join(_CANDIDATES)}), got none; download the checkpoint in full, "
        "or convert it to one of these formats"
    )


def _indexed_files(index: Path) -> list[Path]:
    """The shards an index names. Only names with its own format are followed."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: expected the key weight_map, got none; {AGAIN}")
    suffix = ".safetensors" if ".safetensors." in index.name else ".bin"
    return [beside(index, name, suffix) for name in dict.fromkeys(map(str, weight_map.values()))]


def beside(index: Path, name: object, suffix: str = "") -> Path:
    """A file that an index names; raise CheckpointError unless it is a plain name, of a file in its own folder."""
    # Compared as text and not by resolving links: the Hugging Face cache keeps every file behind a link
    # that leaves its folder, and those the user's own machine made.
    plain = isinstance(name, str) and name.isprintable() and not any(sign in name for sign in "/\\:")
    if not plain or name in ("", ".", "..") or not str(name).endswith(suffix):
        raise CheckpointError(
            f"{index}: expected names of{suffix and ' ' + suffix} files in its own folder, got {name!r}; do not use "
            "this checkpoint unless you know who wrote it"
        )
    return index.with_name(str(name))
