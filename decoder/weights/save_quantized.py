"""`save_quantized`: a checkpoint with weights of 8 or 4 bits, made of one with floats: the model that the same
``quantization`` makes when the original is loaded, number by number.
"""

import copy
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.json_fields import read_json_object
from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.atomic_write import atomic_write
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.files import write_weight_file
from paceline.decoder.weights.folder import is_gguf
from paceline.decoder.weights.formats import GROUP, WeightFormat
from paceline.decoder.weights.hub import checkpoint_path
from paceline.decoder.weights.layouts import OWN_METHOD
from paceline.decoder.weights.quantize import QuantizedTensor

_PIECE = 1 << 15  # numbers that are packed at a time
_COPIED = ("generation_config.json", "tokenizer*", "special_tokens_map.json", "vocab.*", "merges.txt", "chat_template*")

QUANTIZATION_CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear", "Embedding"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "group_size": None,
                "dynamic": False,
            },
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
    "kv_cache_scheme": None,
}
"""What config.json says of a checkpoint with ``quantization="int8"``."""


def quantization_config(form: WeightFormat, *, turned: bool = False) -> dict[str, Any] | None:
    """Return the description of matrices of a format for config.json; None: the layout cannot describe it.

    What compressed-tensors has no place for has another ``quant_method``, so that no other program takes it for what it
    is not: matrices [in, out] (``turned``), with scales [1, out].
    """
    if form is WeightFormat.Q4_1 or (turned and form.block_bytes):
        return None
    made = copy.deepcopy(QUANTIZATION_CONFIG)
    weights = made["config_groups"]["group_0"]["weights"]
    if form.block_bytes:
        made["format"] = "pack-quantized"
        weights.update(num_bits=4 if form is WeightFormat.Q4_0 else 8, strategy="group", group_size=GROUP)
    if form.dtype.is_floating_point:
        made["format"], weights["type"] = "float-quantized", "float"
    if turned:
        made["quant_method"] = OWN_METHOD
    return made


def save_quantized(path: str | os.PathLike[str], folder: str | os.PathLike[str], quantization: str = "int8") -> None:
    """Write the checkpoint ``path`` into ``folder`` with quantised matrices: those of layers and of the vocabulary.

    `AutoDecoder.from_pretrained` loads it as it stands, without an option. Formats: int8, fp8_e4m3, q8_0 and q4_0, the
    last two not for families that store their matrices turned.

    Raises:
        ConfigurationError: the format is another one, or both folders are one.
        CheckpointError: the checkpoint cannot be used.
        StorageError: the folder cannot be written.
    """
    place, into = checkpoint_path(path), Path(folder)
    form = None if quantization == "gguf" else WeightFormat.of(quantization)
    if form is None or form is WeightFormat.Q4_1:
        raise ConfigurationError(
            f"quantization: expected int8, fp8_e4m3, q8_0 or q4_0 for safetensors, got {quantization!r}; use one of "
            "them, or write a GGUF file with the package gguf"
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
            f"quantization: expected int8 or fp8_e4m3 for {config.model_type}, whose matrices are stored as [in, out], "
            "got blocks; use one of these"
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
    if matrix.scales is None:
        return packed_parts(name, matrix)
    scales = matrix.scales.unsqueeze(0 if turned else 1)
    return {name: matrix.data.t().contiguous() if turned else matrix.data, name + "_scale": scales}


def packed_parts(name: str, matrix: QuantizedTensor) -> dict[str, Tensor]:
    """The tensors of a matrix of Q4_0 or Q8_0, by their names; read again they are the same blocks."""
    form, (rows, columns) = matrix.format, matrix.shape
    assert form in (WeightFormat.Q4_0, WeightFormat.Q8_0), "blocks with a scale alone"
    bits = 4 if form is WeightFormat.Q4_0 else 8
    blocks = matrix.data.view(rows, -1, form.block_bytes)
    words = torch.empty(rows, columns * bits // 32, dtype=torch.int32)
    step = max(1, _PIECE // columns)
    for begin in range(0, rows, step):
        stored = blocks[begin : begin + step, :, 2:]
        # Words are little-endian, as the processors are: their bytes in order, two numbers of 4 bits in each.
        if bits == 4:
            numbers = torch.cat((stored & 15, stored >> 4), 2).flatten(1)
            line = numbers[:, 0::2] | numbers[:, 1::2] << 4
        else:
            line = (stored ^ 0x80).flatten(1)  # 128 more than the signed number
        words[begin : begin + step] = line.contiguous().view(torch.int32)
    return {
        f"{name}_packed": words,
        f"{name}_scale": blocks[:, :, :2].contiguous().view(torch.float16).squeeze(2),
        f"{name}_shape": torch.tensor([rows, columns]),
    }
