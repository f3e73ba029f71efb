"""Checkpoints that `save_quantized` writes: read again they are the numbers that loading the original gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline import save_quantized
from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import Layout, Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.layouts import OWN_METHOD
from paceline.decoder.weights.quantize import QuantizedTensor, Stored, quantize
from paceline.decoder.weights.save_quantized import packed_parts
from tests.decoder import families, tiny
from tests.decoder.test_coded import packed

ROWS = ["int8", "int8_per_tensor", "fp8_e4m3", "fp8_e5m2"]
BLOCKS = ["q8_0", "q4_0"]
SHARDS = [None, 0, 1]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A Llama with rows of whole blocks; GPT-2, whose products are [in, out]; tied tables; a mixture."""
    made = {}
    for name, network in (
        ("llama", tiny.network("blocks of two ranks")),
        ("tied", tiny.network("llama 3")),
        ("gpt2", families.network("gpt2")),
        ("mixtral", families.network("mixtral")),
    ):
        made[name] = tmp_path_factory.mktemp(name)
        network.save_pretrained(made[name])
    return made


def weights(folder: Path, form: str | None, rank: int | None) -> dict[str, Stored]:
    config = ModelConfig.from_pretrained(folder)
    shard = None if rank is None else Shard(config, Layout(2), rank)
    return load_weights(folder, config, torch.float32, shard=shard, quantization=form)


def equal(one: Stored, other: Stored) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)
    scales = [torch.zeros(0) if found.scales is None else found.scales for found in (one, other)]
    same = torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8)) and torch.equal(*scales)
    return same and (one.format.dtype, one.columns) == (other.format.dtype, other.columns)


@pytest.mark.parametrize("rank", SHARDS)
@pytest.mark.parametrize(
    ("name", "form"),
    [("llama", form) for form in ROWS + BLOCKS]
    + [("gpt2", form) for form in ROWS]
    + [("tied", "fp8_e5m2"), ("mixtral", "fp8_e5m2"), ("mixtral", "int8")],
)
def test_every_saved_number_is_read_back(
    originals: dict[str, Path], tmp_path: Path, name: str, form: str, rank: int | None
) -> None:
    save_quantized(originals[name], tmp_path / "made", form)
    expected = weights(originals[name], form, rank)
    if name == "gpt2" and form != "int8_per_tensor":
        stored = load_file(tmp_path / "made" / "model.safetensors")
        assert stored["transformer.h.0.mlp.c_fc.weight_scale"].shape == (1, 128), "one for each column of [in, out]"
    assert sum(isinstance(one, QuantizedTensor) for one in expected.values()) > 10
    for asked in (None, form):
        found = weights(tmp_path / "made", asked, rank)
        assert found.keys() == expected.keys()
        assert [key for key, one in found.items() if not equal(one, expected[key])] == []


def test_backends_without_blocks_get_packed_matrices_as_floats(originals: dict[str, Path], tmp_path: Path) -> None:
    for form in BLOCKS:
        save_quantized(originals["llama"], tmp_path / form, form)
        config = ModelConfig.from_pretrained(tmp_path / form)
        found = load_weights(tmp_path / form, config, torch.float32, blocks=False)
        for key, one in weights(originals["llama"], form, None).items():
            other = found[key]
            meant = one.dequantize() if isinstance(one, QuantizedTensor) else one
            assert isinstance(other, Tensor) and torch.equal(meant, other)
        assert (tmp_path / form / "model.safetensors").stat().st_size < 0.65 * (
            originals["llama"] / "model.safetensors"
        ).stat().st_size


@pytest.mark.parametrize("form", BLOCKS)
def test_packed_words_equal_those_of_compressed_tensors(form: str) -> None:
    """Number i of a row begins at bit i * bits, with 2^(bits - 1) added."""
    matrix = quantize(torch.randn(5, 96, generator=torch.Generator().manual_seed(0)), WeightFormat(form))
    made = packed_parts("x.weight", matrix)
    scales = made["x.weight_scale"].float().repeat_interleave(32, 1)
    numbers = (matrix.dequantize() / scales).round().to(torch.int8)
    assert torch.equal(made["x.weight_packed"], packed(numbers, 4 if form == "q4_0" else 8))
    assert made["x.weight_shape"].tolist() == [5, 96] and made["x.weight_scale"].dtype is torch.float16


def test_only_layouts_that_others_read_are_named_compressed_tensors(originals: dict[str, Path], tmp_path: Path) -> None:
    for name, form, method in (
        ("llama", "fp8_e4m3", "compressed-tensors"), ("llama", "q4_0", "compressed-tensors"),
        ("llama", "fp8_e5m2", OWN_METHOD), ("gpt2", "int8", OWN_METHOD),
    ):  # fmt: skip
        into = tmp_path / f"{name} {form}"
        save_quantized(originals[name], into, form)
        assert json.loads((into / "config.json").read_text())["quantization_config"]["quant_method"] == method


def test_formats_without_a_file_layout_are_rejected_by_name(originals: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="for safetensors, got 'q4_1'"):
        save_quantized(originals["llama"], tmp_path / "made", "q4_1")
    with pytest.raises(ConfigurationError, match=r"for gpt2, whose matrices are stored as \[in, out\], got blocks"):
        save_quantized(originals["gpt2"], tmp_path / "made", "q4_0")
    assert not (tmp_path / "made").exists()
