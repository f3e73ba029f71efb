"""Checkpoints with int8 weights: written, loaded as they stand, and refused where they are something else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline import AutoDecoder, save_quantized
from paceline.auto import SamplingDecoder
from paceline.core.errors import (
    CheckpointError,
    ConfigurationError,
    PacelineError,
    UnknownArchitectureError,
    WeightValueError,
)
from paceline.decoder import steps
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.save_quantized import QUANTIZATION_CONFIG, quantization_config
from tests.decoder import tiny

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


def load(folder: Path, **options: Any) -> SamplingDecoder:
    return AutoDecoder.from_pretrained(
        folder, backend="eager", batch_size=2, amp="f32", context_length_estimate=[tiny.CHUNK], **options
    )


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


@pytest.mark.parametrize("form", ["int8_per_tensor", "fp8_e4m3"])
def test_other_8_bit_formats_are_read(original: Path, tmp_path: Path, form: str) -> None:
    save_quantized(original, tmp_path / "made", form)
    made, expected = load(tmp_path / "made"), load(original, quantization=form)
    assert texts(made) == texts(expected) == texts(load(tmp_path / "made", quantization=form))
    said = json.loads((tmp_path / "made" / "config.json").read_text())["quantization_config"]
    assert said == quantization_config(WeightFormat.of(form)) != QUANTIZATION_CONFIG
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert tensors[name].dtype is WeightFormat.of(form).dtype
    assert tensors[name + "_scale"].shape == ((1,) if form == "int8_per_tensor" else (48, 1))
    with pytest.raises(ConfigurationError, match=r"the checkpoint is already (int8|fp8_e4m3), .*; omit it"):
        load(tmp_path / "made", quantization="fp8_e5m2")


def test_a_nan_in_8_bits_is_rejected(original: Path, tmp_path: Path) -> None:
    save_quantized(original, tmp_path / "made", "fp8_e4m3")
    tensors = load_file(tmp_path / "made" / "model.safetensors")
    tensors["lm_head.weight"].view(torch.uint8)[3, 4] = 0x7F
    save_file(tensors, tmp_path / "made" / "model.safetensors")
    with pytest.raises(WeightValueError, match=r"lm_head.weight contains NaN"):
        load(tmp_path / "made")


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


def test_damaged_quantised_checkpoints_are_rejected(quantized: Path, tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    for index, value in enumerate((0.0, -1.0, float("nan"))):
        folder, tensors = altered(quantized, tmp_path / str(index))
        tensors[name + "_scale"][0] = value
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(WeightValueError, match="a positive scale for each of 48 rows"):
            load(folder)
    folder, tensors = altered(quantized, tmp_path / "no scale")
    tensors.pop(name + "_scale")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{name}: the data type I8 is not supported"):
        load(folder)


def test_a_matrix_and_its_scales_may_be_in_two_files(quantized: Path, tmp_path: Path) -> None:
    folder, tensors = altered(quantized, tmp_path / "other")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    save_file({name: tensors.pop(name)}, folder / "two.safetensors")
    save_file(tensors, folder / "one.safetensors")
    places = {**dict.fromkeys(tensors, "one.safetensors"), name: "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert texts(load(folder)) == texts(load(quantized))


WEIGHTS = QUANTIZATION_CONFIG["config_groups"]["group_0"]["weights"]
OTHERS: dict[str, dict[str, Any]] = {
    "format = 'marlin-24'": {"format": "marlin-24"},
    "kv_cache_scheme": {"kv_cache_scheme": {"num_bits": 8}},
    "config_groups that are missing": {"config_groups": {}},
    "a group without weights": {"config_groups": {"a": {}}},
    "num_bits = 4": {"config_groups": {"a": {"weights": {**WEIGHTS, "num_bits": 4}}}},
    "symmetric = False": {"config_groups": {"a": {"weights": {**WEIGHTS, "symmetric": False}}}},
    "strategy = 'group'": {"config_groups": {"a": {"weights": {**WEIGHTS, "strategy": "group"}}}},
    "input_activations": {"config_groups": {"a": {"weights": WEIGHTS, "input_activations": {"num_bits": 8}}}},
}


@pytest.mark.parametrize("words", OTHERS)
def test_other_quantisation_methods_are_rejected_by_name(quantized: Path, tmp_path: Path, words: str) -> None:
    folder, _ = altered(quantized, tmp_path / "other", quantization_config={**QUANTIZATION_CONFIG, **OTHERS[words]})
    with pytest.raises(UnknownArchitectureError, match=words):
        ModelConfig.from_pretrained(folder)


def test_impossible_saves_are_rejected(original: Path, quantized: Path, tmp_path: Path) -> None:
    for source, into, form, words in (
        (original, original, "int8", "expected another folder than the checkpoint's"),
        (original, tmp_path, "q4_1", "q4_0 for safetensors"),
        (tmp_path / "some.gguf", tmp_path, "int8", "GGUF"),
    ):
        with pytest.raises(PacelineError, match=words):
            save_quantized(source, into, form)
    with pytest.raises(ConfigurationError, match="the checkpoint is already int8, got 'q8_0'; omit it"):
        load(quantized, quantization="q8_0")
