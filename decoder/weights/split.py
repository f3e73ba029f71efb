"""The split checkpoints of transformers-neuronx: a folder named pytorch_model.bin with a pickle for every tensor.

`save_pretrained_split` writes pytorch_model.bin/key_to_filename.json, an object of file names by tensor names, and the
files beside it, p0.model.embed_tokens.weight and so on. Each is opened when its tensor is read. Pickles are read by
torch's restricted unpickler only. Not here: other files of weights (`paceline.decoder.weights.files`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import CheckpointError
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.weights.files import TensorInfo, dtype_name, load_pickle, scaled_matrix_in
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor

INDEX = "key_to_filename.json"
_RANDOM = ".empty_json"


@dataclass(frozen=True, slots=True)
class SplitFolder:
    """A `paceline.decoder.weights.files.WeightFile`: the folder, and its files by the names of their tensors."""

    folder: Path
    files: dict[str, Path]

    @classmethod
    def open(cls, folder: Path) -> SplitFolder:
        """Read the names; of the files none is opened.

        Raises:
            CheckpointError: the index is absent or damaged, names a file elsewhere, or one without numbers.
        """
        if not (folder / INDEX).is_file():
            raise CheckpointError(
                f"{folder} is a folder without {INDEX}; it must be a file of weights, or what save_pretrained_split of "
                "transformers-neuronx writes: download the checkpoint in full."
            )
        names = read_json_object(folder / INDEX)
        if not names:
            raise CheckpointError(f"{folder / INDEX} names no tensors; download the checkpoint in full.")
        return cls(folder, {name: _place(folder, file) for name, file in names.items()})

    def infos(self) -> dict[str, TensorInfo]:
        """See `WeightFile`; every file is opened for it."""
        tensors = ((name, self.read(name)) for name in self.files)
        return {name: TensorInfo(tuple(tensor.shape), dtype_name(tensor)) for name, tensor in tensors}

    def read(self, name: str) -> Tensor:
        """The tensor, in the memory of its file."""
        file = self.files[name]
        tensor = load_pickle(file)
        if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise CheckpointError(
                f"{file} holds a {type(tensor).__name__}, and {INDEX} says that it is the tensor {name}; use a "
                "safetensors checkpoint."
            )
        return tensor.detach()

    def read_range(self, name: str, span: tuple[int, int], *, dim: int) -> Tensor:
        return self.read(name).narrow(dim, span[0], span[1] - span[0])

    def read_quantized(self, name: str, wanted: WeightFormat | None = None) -> QuantizedTensor | None:
        return scaled_matrix_in(self, name, self.files, wanted=wanted)


def _place(folder: Path, file: object) -> Path:
    if (
        not isinstance(file, str)
        or not file.isprintable()
        or any(sign in file for sign in "/\\:")
        or file in ("", ".", "..")
    ):
        raise CheckpointError(
            f"{folder / INDEX} names the file {file!r}; it may only name files in its own folder. Do not use this "
            "checkpoint unless you know who wrote it."
        )
    if file.endswith(_RANDOM):
        raise CheckpointError(
            f"{folder / INDEX} names {file}, a size for random numbers and not weights; save the model itself with "
            "save_pretrained."
        )
    return folder / file
