"""`save_quantized`: a checkpoint with weights of 8 or 4 bits, made of one with floats, in the layout of
compressed-tensors.

It loads faster and takes a quarter of the disk of float32, or less; the model is the one that the same ``quantization``
makes of the original when it is loaded, number by number.
"""

import json
import os
import shutil
from pathlib import Path

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.compressed import SCALE, quantization_config
from paceline.decoder.weights.files import write_weight_file
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.hub import checkpoint_path
from paceline.decoder.weights.packed import packed_parts
from paceline.decoder.weights.quantize import QuantizedTensor

_COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")


def save_quantized(path: str | os.PathLike[str], folder: str | os.PathLike[str], quantization: str = "int8") -> None:
    """Write the checkpoint ``path`` into ``folder`` with quantised matrices: those of layers and of the vocabulary.

    `AutoDecoder.from_pretrained` loads 8 bits with scales for rows as they stand, without an option. "q4_0" and "q8_0"
    are written as numbers that are packed in groups, which it loads as ``amp`` says, or as they stand if it is given
    the same ``quantization``.

    Raises:
        ConfigurationError: the format is none of "int8", "int8_per_tensor", "fp8_e4m3", "fp8_e5m2", "q8_0" and "q4_0",
            both folders are one, or the family stores its matrices turned and the format has blocks.
        CheckpointError: the checkpoint cannot be used.
        StorageError: the folder cannot be written.
    """
    place, into = checkpoint_path(path), Path(folder)
    form = None if quantization == "gguf" else WeightFormat.of(quantization)
    if form is None or form is WeightFormat.Q4_1:
        raise ConfigurationError(
            "quantization: expected int8, int8_per_tensor, fp8_e4m3, fp8_e5m2, q8_0 or q4_0 for safetensors, got "
            f"{quantization!r}; use one of them, or write a GGUF file with the package gguf"
        )
    if is_gguf(place):
        raise ConfigurationError(
            f"{place}: expected a folder with config.json for save_quantized, got a GGUF file; give the folder"
        )
    if into.resolve() == place.resolve():
        raise ConfigurationError(f"{into}: expected another folder than the checkpoint's; give one")
    config = ModelConfig.from_pretrained(place)
    specs = registry.family(config.model_type).tensors(config)
    said = quantization_config(form, turned=any(spec.transposed for spec in specs.values()))
    if said is None:
        raise ConfigurationError(
            f"quantization: expected int8, int8_per_tensor, fp8_e4m3 or fp8_e5m2 for {config.model_type}, whose "
            "matrices are stored as [in, out], got blocks; use one of these"
        )
    tensors: dict[str, Tensor] = {}
    for name, stored in load_weights(place, config, torch.float32, quantization=quantization).items():
        if isinstance(stored, QuantizedTensor):
            tensors |= _parts(name, stored, turned=specs[name].transposed)
        else:
            tensors[name] = stored
    with atomic_write(into):
        into.mkdir(parents=True, exist_ok=True)
        for pattern in _COPIED:
            for file in place.glob(pattern):
                shutil.copyfile(file, into / file.name)
        write_weight_file(into / "model.safetensors", tensors)
        fields = {**read_json_object(place / "config.json"), "quantization_config": said}
        (into / "config.json").write_text(json.dumps(fields, indent=2), encoding="utf-8")


def _parts(name: str, matrix: QuantizedTensor, *, turned: bool) -> dict[str, Tensor]:
    """The tensors of a quantised matrix [out, in]; ``turned``: as [in, out]."""
    if matrix.scales is None:
        return packed_parts(name, matrix)
    if matrix.format is WeightFormat.INT8_PER_TENSOR:
        scales = matrix.scales[:1]
    else:
        scales = matrix.scales.unsqueeze(0 if turned else 1)
    return {name: matrix.data.t().contiguous() if turned else matrix.data, name + SCALE: scales}
