"""Checkpoints whose matrices compressed-tensors packed: the numbers, the tokens, and what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import CheckpointError, MissingWeightsError, UnknownArchitectureError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import Layout, Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.compressed import QUANTIZATION_CONFIG
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import QuantizedTensor
from tests.decoder import tiny

PROMPTS = [[5, 9, 13, 5], [40, 2]]
PACKED = "model.layers.0.mlp.up_proj.weight"


def packed(values: Tensor, bits: int) -> Tensor:
    """Rows of numbers in int32 words, bit by bit: number i of a row begins at bit i * bits."""
    unsigned = values.to(torch.int64) + (1 << (bits - 1))
    words = torch.zeros(len(values), -(-values.shape[1] * bits // 32), dtype=torch.int64)
    for column in range(values.shape[1]):
        word, bit = divmod(column * bits, 32)
        words[:, word] |= unsigned[:, column] << bit
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def parts(weight: Tensor, *, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """A matrix packed, with the matrix that its numbers mean as ``weight``."""
    rows, columns = weight.shape
    blocks = weight.view(rows, -1, group or columns)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if symmetric:
        scales = (blocks.abs().amax(2) / high).to(dtype)
        zeros = torch.zeros_like(scales)
    else:
        scales = ((blocks.amax(2) - blocks.amin(2)) / (high - low)).to(dtype)
        zeros = (low - blocks.amin(2) / scales.float()).round().clamp(low, high)
    numbers = (blocks / scales.float().unsqueeze(2) + zeros.float().unsqueeze(2)).round().clamp(low, high)
    meant = (numbers - zeros.float().unsqueeze(2)) * scales.float().unsqueeze(2)
    found = {
        "weight": meant.flatten(1),
        "weight_packed": packed(numbers.flatten(1), bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not symmetric:
        found["weight_zero_point"] = packed(zeros.float().t(), bits).t().contiguous()
    return found


KINDS: dict[str, dict[str, Any]] = {
    "4 bits in groups": {"bits": 4, "group": 16, "symmetric": True, "dtype": torch.bfloat16},
    "asymmetric": {"bits": 4, "group": 16, "symmetric": False, "dtype": torch.float16},
    "4 bits a row": {"bits": 4, "group": 0, "symmetric": True, "dtype": torch.float32},
    "8 bits a row": {"bits": 8, "group": 0, "symmetric": True, "dtype": torch.float32},
}


def settings(kind: str) -> dict[str, Any]:
    """What config.json says of it."""
    how, made = KINDS[kind], copy.deepcopy(QUANTIZATION_CONFIG)
    made["ignore"], made["config_groups"]["group_0"]["targets"] = ["lm_head"], ["Linear"]
    weights = made["config_groups"]["group_0"]["weights"]
    made["format"] = "pack-quantized"
    weights |= {"num_bits": how["bits"], "symmetric": how["symmetric"], "group_size": how["group"] or None}
    weights["strategy"] = "group" if how["group"] else "channel"
    return made


def save(folder: Path, kind: str, *, files: int = 1) -> tuple[Path, Path]:
    """A random model packed, and one of the floats that this means."""
    torch.manual_seed(0)
    network = tiny.network("blocks")
    made, meant = folder / "packed", folder / "floats"
    network.save_pretrained(made)
    network.save_pretrained(meant)
    tensors, dense = load_file(made / "model.safetensors"), load_file(meant / "model.safetensors")
    for name in [name for name in tensors if "_proj." in name]:
        found = parts(tensors.pop(name), **KINDS[kind])
        dense[name] = found.pop("weight").contiguous()
        tensors |= {name.removesuffix("weight") + part: one.contiguous() for part, one in found.items()}
    save_file(dense, meant / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text()) | {"quantization_config": settings(kind)}
    (made / "config.json").write_text(json.dumps(config))
    (made / "model.safetensors").unlink()
    places = {name: f"model-{number % files}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, made / file, {"format": "pt"})
    if files == 1:
        (made / "model-0.safetensors").rename(made / "model.safetensors")
    else:
        (made / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return made, meant


def load(folder: Path, **options: Any) -> SamplingDecoder:
    return AutoDecoder.from_pretrained(
        folder, backend="eager", batch_size=2, amp="f32", context_length_estimate=[tiny.CHUNK], **options
    )


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_model_that_its_numbers_mean(tmp_path: Path, kind: str, files: int) -> None:
    made, meant = save(tmp_path, kind, files=files)
    config = ModelConfig.from_pretrained(made)
    for shard in (None, Shard(config, Layout(2), 1)):
        loaded, expected = (load_weights(one, config, torch.float32, shard=shard) for one in (made, meant))
        assert loaded.keys() == expected.keys()
        for name, tensor in loaded.items():
            other = expected[name]
            assert isinstance(tensor, Tensor) and isinstance(other, Tensor) and torch.equal(tensor, other), name


@pytest.mark.parametrize("kind", ["asymmetric", "8 bits a row"])
def test_speculation_on_it_keeps_the_tokens(tmp_path: Path, kind: str) -> None:
    made, meant = save(tmp_path, kind)
    target, wishes = load(made), {"max_new_tokens": 20, "do_sample": True, "seed": 3}
    expected = load(meant).sample(PROMPTS, **wishes)
    assert torch.equal(target.sample(PROMPTS, **wishes), expected)
    for draft in (load(meant, quantization="q4_0"), "ngram"):
        assert torch.equal(SpeculativeGenerator(draft, target, k=3).sample(PROMPTS, **wishes), expected)


def test_numbers_are_kept_in_a_format_that_has_them(tmp_path: Path) -> None:
    """Four bits with scales of float16 are Q4_0, and eight bits with a scale for every row are int8."""
    torch.manual_seed(1)
    KINDS["kept"] = {"bits": 4, "group": 32, "symmetric": True, "dtype": torch.float16}
    try:
        four, four_meant = save(tmp_path / "four", "kept")
        eight, eight_meant = save(tmp_path / "eight", "8 bits a row")
    finally:
        del KINDS["kept"]
    for folder, meant, form in ((four, four_meant, WeightFormat.Q4_0), (eight, eight_meant, WeightFormat.INT8)):
        config = ModelConfig.from_pretrained(folder)
        found = load_weights(folder, config, torch.float32, quantization=form.value)[PACKED]
        assert isinstance(found, QuantizedTensor) and found.format is form
        expected = load_weights(meant, config, torch.float32)[PACKED]
        assert isinstance(expected, Tensor) and torch.equal(found.dequantize(), expected)


OTHERS: dict[str, dict[str, Any]] = {
    "num_bits = 2": {"num_bits": 2},
    "strategy = 'block'": {"strategy": "block"},
    "actorder = 'group'": {"actorder": "group"},
    "type = 'float'": {"type": "float"},
}


@pytest.mark.parametrize("words", OTHERS)
def test_other_ways_to_pack_are_refused_by_name(tmp_path: Path, words: str) -> None:
    made, _ = save(tmp_path, "4 bits in groups")
    config = json.loads((made / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= OTHERS[words]
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownArchitectureError, match=words):
        ModelConfig.from_pretrained(made)


def test_damaged_ones_are_refused(tmp_path: Path) -> None:
    made, _ = save(tmp_path, "asymmetric")
    whole = load_file(made / "model.safetensors")
    for change, error, words in (
        ({PACKED + "_shape": None}, MissingWeightsError, "up_proj.weight_shape, got none"),
        ({PACKED + "_scale": None}, MissingWeightsError, "up_proj.weight_scale, got none"),
        ({PACKED + "_packed": torch.zeros(64, 3, dtype=torch.int32)}, CheckpointError, "expected 64 x 32 numbers"),
        (
            {PACKED + "_zero_point": torch.zeros(8, 3, dtype=torch.int32)},
            CheckpointError,
            "expected zero points for 64 rows",
        ),
        (
            {PACKED + "_g_idx": torch.zeros(32, dtype=torch.int32)},
            UnknownArchitectureError,
            "expected columns in their original order",
        ),
    ):
        tensors = {name: one for name, one in {**whole, **change}.items() if one is not None}
        save_file(tensors, made / "model.safetensors", {"format": "pt"})
        with pytest.raises(error, match=words):
            load(made)


def test_the_package_that_packs_reads_the_same() -> None:
    """compressed-tensors' own functions, where the package is installed."""
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch.manual_seed(2)
    for bits, columns in ((4, 32), (4, 37), (8, 6)):
        numbers = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (24, columns), dtype=torch.int8)
        assert torch.equal(helpers.pack_to_int32(numbers, bits), packed(numbers, bits))
        along = helpers.pack_to_int32(numbers, bits, packed_dim=0)
        assert torch.equal(along, packed(numbers.t(), bits).t())
