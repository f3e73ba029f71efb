"""Tensors of all experts in one: gpt-oss in MXFP4, with the numbers that transformers dequantises to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from paceline.core.errors import CheckpointError, MissingWeightsError, WeightValueError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights import checkpoint
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor
from tests.decoder.families import network

Change = Callable[[Tensor], Tensor | None]
SIZES: dict[str, object] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}


def save(folder: Path) -> tuple[Path, Path]:
    """A checkpoint as gpt-oss is published, and the same in bfloat16 by transformers' own code."""
    network("gpt oss", layers=2, **SIZES).save_pretrained(folder / "plain")
    (folder / "packed").mkdir()
    tensors = load_file(folder / "plain" / "model.safetensors")
    drawn = torch.Generator().manual_seed(0)
    packed = dict(tensors)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, width, rows = packed.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8, generator=drawn)
        scales = torch.randint(118, 126, blocks.shape[:-1], dtype=torch.uint8, generator=drawn)
        packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
    save_file(tensors, folder / "plain" / "model.safetensors", {"format": "pt"})
    save_file(packed, folder / "packed" / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "plain" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "packed" / "config.json").write_text(json.dumps(config))
    return folder / "plain", folder / "packed"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save(tmp_path_factory.mktemp("mxfp4"))


def test_mxfp4_has_the_numbers_of_transformers(folders: tuple[Path, Path]) -> None:
    plain, packed = folders
    config = ModelConfig.from_pretrained(packed)
    wanted = checkpoint.load_weights(plain, ModelConfig.from_pretrained(plain), torch.float32)
    for blocks in (True, False):
        found = checkpoint.load_weights(packed, config, torch.float32, blocks=blocks)
        assert found.keys() == wanted.keys()
        kept = {name for name, one in found.items() if isinstance(one, QuantizedTensor)}
        assert kept == (
            {name for name in found if ".experts." in name and name.endswith("weight")} if blocks else set()
        )
        for name, one in found.items():
            number = one.dequantize() if isinstance(one, QuantizedTensor) else one
            assert torch.equal(number, wanted[name]), name  # type: ignore[arg-type]
            assert not isinstance(one, QuantizedTensor) or one.format is WeightFormat.Q8_0


def not_a_number(scales: Tensor) -> Tensor:
    scales[1, 2, 0] = 255
    return scales


@pytest.mark.parametrize(
    ("change", "error", "part"),
    [
        (lambda _scales: None, MissingWeightsError, "gate_proj.weight_scale, got none"),
        (not_a_number, WeightValueError, "experts.1.gate_proj.weight: expected a finite scale"),
        (lambda scales: scales[:, :-2], CheckpointError, "expected 64 x 2 exponents"),
        (lambda scales: scales[:-1], MissingWeightsError, "experts.4.gate_proj.weight_scale, got none"),
    ],
)
def test_a_damaged_tensor_of_experts_is_named(
    folders: tuple[Path, Path], tmp_path: Path, change: Change, error: type[Exception], part: str
) -> None:
    tensors, name = load_file(folders[1] / "model.safetensors"), "model.layers.1.mlp.experts.gate_up_proj_scales"
    made = change(tensors.pop(name))
    tensors |= {} if made is None else {name: made.contiguous()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folders[1] / "config.json").read_text())
    with pytest.raises(error, match=part):
        checkpoint.load_weights(tmp_path, ModelConfig.from_pretrained(tmp_path), torch.float32)
