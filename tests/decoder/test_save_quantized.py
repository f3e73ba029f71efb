"""Checkpoints that `save_quantized` writes: loaded as they stand, with the numbers that loading the original gives, and
refused where they are something else.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import save_quantized
from paceline.auto import SamplingDecoder
from paceline.core.errors import (
    CheckpointError,
    ConfigurationError,
    PacelineError,
    WeightValueError,
)
from paceline.decoder import steps
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import Layout, Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.layouts import OWN_METHOD
from paceline.decoder.weights.quantize import QuantizedTensor, Stored, quantize
from paceline.decoder.weights.save_quantized import QUANTIZATION_CONFIG, packed_parts, quantization_config
from tests.decoder import families, tiny
from tests.decoder.test_coded import packed

PROMPTS = [[5, 9, 13, 5], [40, 2]]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("original")
    tiny.network().save_pretrained(made)
    (made / "vocab.txt").write_text("w0")
    return made


@pytest.fixture(scope="module")
def quantized(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("saved") / "int8"
    save_quantized(original, made)
    return made


load = partial(tiny.load, batch_size=2, context_length_estimate=[tiny.CHUNK])


def texts(decoder: SamplingDecoder, **asked: Any) -> list[list[int]]:
    made = decoder.sample(PROMPTS, max_new_tokens=20, **asked)
    assert isinstance(made, torch.Tensor)
    return made.tolist()


def test_a_saved_quantised_model_equals_one_quantised_at_load(original: Path, quantized: Path) -> None:
    made, expected = load(quantized), load(original, quantization="int8")
    for asked in ({}, {"do_sample": True, "seed": 3}):
        assert texts(made, **asked) == texts(expected, **asked)
    assert texts(made) != texts(load(original))
    assert made.cache_key() == {**expected.cache_key(), "config": made.config.fingerprint()}
    assert texts(load(quantized, quantization="int8")) == texts(made)
    assert (quantized / "vocab.txt").read_text() == "w0"
    files = [folder / "model.safetensors" for folder in (original, quantized)]
    assert files[1].stat().st_size < 0.5 * files[0].stat().st_size


def test_other_8_bit_formats_say_what_they_are(original: Path, tmp_path: Path) -> None:
    form = "fp8_e4m3"
    save_quantized(original, tmp_path / "made", form)
    said = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert said == quantization_config(WeightFormat.of(form)) != QUANTIZATION_CONFIG
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert tensors[name].dtype is WeightFormat.of(form).dtype
    assert tensors[name + "_scale"].shape == (48, 1)
    with pytest.raises(ConfigurationError, match=r"the checkpoint is already fp8_e4m3, .*; omit it"):
        load(tmp_path / "made", quantization="int8")


def test_stored_floats_of_two_bits_of_mantissa_are_read_as_floats(original: Path, tmp_path: Path) -> None:
    save_quantized(original, tmp_path / "made", "fp8_e4m3")
    tensors, name = load_file(tmp_path / "made" / "model.safetensors"), "lm_head.weight"
    tensors[name] = tensors[name].float().to(torch.float8_e5m2)
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    (found,) = [one for key, one in weights_of(tmp_path / "made", None, None).items() if key == name]
    assert isinstance(found, Tensor) and torch.equal(found, tensors[name].float() * tensors[name + "_scale"])


def altered(quantized: Path, folder: Path, **fields: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A copy with other fields in its config.json; and its tensors."""
    folder.mkdir()
    config = json.loads((quantized / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder, load_file(quantized / "model.safetensors")


def test_a_vocabulary_may_stay_in_floats(original: Path, quantized: Path, tmp_path: Path) -> None:
    """A checkpoint as other programs write it: only linear layers, scales in bfloat16."""
    settings = copy.deepcopy(QUANTIZATION_CONFIG)
    settings["ignore"], settings["config_groups"]["group_0"]["targets"] = ["lm_head"], ["Linear"]
    folder, tensors = altered(quantized, tmp_path / "other", quantization_config=settings)
    floats = load_file(original / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        del tensors[name + "_scale"]
        tensors[name] = floats[name]
    tensors = {name: one.bfloat16() if name.endswith("_scale") else one for name, one in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    decoder = load(folder)
    assert len(texts(decoder)[0]) == len(PROMPTS[0]) + 20
    text = torch.tensor(PROMPTS[:1] * 2, dtype=torch.int32)

    start = torch.zeros(2, dtype=torch.int32)
    made, exact = (steps.window(one, text, start, bucket=one.n_positions)[0] for one in (decoder, load(original)))
    assert 0 < float((made - exact).abs().max()) < 0.1 * float(exact.abs().max())


def test_damaged_quantised_checkpoints_are_rejected(original: Path, quantized: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for index, value in enumerate((0.0, -1.0, float("nan"))):
        folder, tensors = altered(quantized, tmp_path / str(index))
        tensors[name + "_scale"][0] = value
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(WeightValueError, match="a positive scale for each of 48 rows"):
            load(folder)
    save_quantized(original, tmp_path / "nan", "fp8_e4m3")
    tensors = load_file(tmp_path / "nan" / "model.safetensors")
    tensors["lm_head.weight"].view(torch.uint8)[3, 4] = 0x7F
    save_file(tensors, tmp_path / "nan" / "model.safetensors")
    with pytest.raises(WeightValueError, match=r"lm_head.weight contains NaN"):
        load(tmp_path / "nan")
    folder, tensors = altered(quantized, tmp_path / "no scale")
    tensors.pop(name + "_scale")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: the data type I8 is not supported"):
        load(folder)


def test_impossible_saves_are_rejected(
    original: Path, originals: dict[str, Path], quantized: Path, tmp_path: Path
) -> None:
    for source, into, form, words in (
        (original, original, "int8", "expected another folder than the checkpoint's"),
        (original, tmp_path, "q4_1", "q4_0 for safetensors"),
        (tmp_path / "some.gguf", tmp_path, "int8", "GGUF"),
        (
            originals["gpt2"],
            tmp_path / "made",
            "q4_0",
            r"for gpt2, whose matrices are stored as \[in, out\], got blocks",
        ),
    ):
        with pytest.raises(PacelineError, match=words):
            save_quantized(source, into, form)
    assert not (tmp_path / "made").exists()
    with pytest.raises(ConfigurationError, match="the checkpoint is already int8, got 'q8_0'; omit it"):
        load(quantized, quantization="q8_0")


# ---- number by number

ROWS = ["int8", "fp8_e4m3"]
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


def weights_of(folder: Path, form: str | None, rank: int | None) -> dict[str, Stored]:
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
    + [("tied", "fp8_e4m3"), ("mixtral", "fp8_e4m3"), ("mixtral", "int8")],
)
def test_every_saved_number_is_read_back(
    originals: dict[str, Path], tmp_path: Path, name: str, form: str, rank: int | None
) -> None:
    save_quantized(originals[name], tmp_path / "made", form)
    expected = weights_of(originals[name], form, rank)
    if name == "gpt2":
        stored = load_file(tmp_path / "made" / "model.safetensors")
        assert stored["transformer.h.0.mlp.c_fc.weight_scale"].shape == (1, 128), "one for each column of [in, out]"
    assert sum(isinstance(one, QuantizedTensor) for one in expected.values()) > 10
    for asked in (None, form):
        found = weights_of(tmp_path / "made", asked, rank)
        assert found.keys() == expected.keys()
        assert [key for key, one in found.items() if not equal(one, expected[key])] == []


def test_backends_without_blocks_get_packed_matrices_as_floats(originals: dict[str, Path], tmp_path: Path) -> None:
    for form in BLOCKS:
        save_quantized(originals["llama"], tmp_path / form, form)
        config = ModelConfig.from_pretrained(tmp_path / form)
        found = load_weights(tmp_path / form, config, torch.float32, blocks=False)
        for key, one in weights_of(originals["llama"], form, None).items():
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
        ("gpt2", "int8", OWN_METHOD),
    ):  # fmt: skip
        into = tmp_path / f"{name} {form}"
        save_quantized(originals[name], into, form)
        assert json.loads((into / "config.json").read_text())["quantization_config"]["quant_method"] == method
