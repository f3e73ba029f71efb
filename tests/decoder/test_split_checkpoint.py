"""Checkpoints as transformers-neuronx and NxD Inference write them: split into files, and with scales for int8."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import CheckpointError, MissingWeightsError, PacelineError, WeightValueError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel.sharding import Layout, Shard
from paceline.decoder.weights.checkpoint import load_weights
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.hub import checkpoint_path
from paceline.decoder.weights.quantize import QuantizedTensor, quantize
from tests.decoder.checkpoints import FORMATS, State, load, refused
from tests.decoder.test_weight_files import Attack

INDEX = "key_to_filename.json"
NORM = "model.norm.weight"
MATRIX = "model.layers.0.mlp.up_proj.weight"


def save_split(folder: Path, state: dict[str, Any]) -> Path:
    """Save as transformers-neuronx does, in a folder that is named as a file is."""
    place = folder / "pytorch_model.bin"
    place.mkdir(exist_ok=True)
    names = {name: f"p{number}.{name}" for number, name in enumerate(state)}
    (place / INDEX).write_text(json.dumps(names))
    for name, tensor in state.items():
        torch.save(tensor, place / names[name])
    return place


def test_a_split_folder_is_a_checkpoint(tmp_path: Path, state: State) -> None:
    place = save_split(tmp_path, state | {"lm_head.weight": torch.nn.Parameter(state["lm_head.weight"])})
    assert checkpoint_path(tmp_path) == tmp_path
    loaded = load(tmp_path)
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], state[name]) for name in state)
    config = ModelConfig.from_pretrained(tmp_path)
    shard = Shard(config, Layout(2), 1)
    made = load_weights(tmp_path, config, torch.float32, shard=shard)[MATRIX]
    assert isinstance(made, Tensor) and torch.equal(made, state[MATRIX][16:])
    whole = load_weights(tmp_path, config, torch.float32, quantization="int8")[MATRIX]
    assert isinstance(whole, QuantizedTensor)
    assert torch.equal(whole.data, quantize(state[MATRIX], WeightFormat.INT8).data)
    for file in place.iterdir():  # the result is a copy
        file.unlink()
    assert torch.equal(loaded[NORM], state[NORM])


def test_old_pytorch_files_are_read(tmp_path: Path, state: State) -> None:
    place = save_split(tmp_path, state)
    for file in place.glob("p*"):
        torch.save(torch.load(file), file, _use_new_zipfile_serialization=False)
    assert torch.equal(load(tmp_path)[NORM], state[NORM])


@pytest.mark.parametrize("name", ["../p0", "/etc/p0", "sub/p0", "..\\p0", "c:p0", "..", "", 3, "p\0"])
def test_an_index_may_only_name_files_in_its_folder(tmp_path: Path, state: State, name: object) -> None:
    place = save_split(tmp_path, state)
    (place / INDEX).write_text(json.dumps({NORM: name}))
    refused(tmp_path, CheckpointError, INDEX, repr(name), "its own folder")


def test_invalid_split_checkpoints_are_rejected(tmp_path: Path, state: State) -> None:
    place = save_split(tmp_path, state)
    names = json.loads((place / INDEX).read_text())
    (place / INDEX).write_text(json.dumps(names | {NORM: f"{names[NORM]}.empty_json"}))
    refused(tmp_path, CheckpointError, f"{names[NORM]}.empty_json", "random numbers")
    (place / INDEX).write_text("{}")
    refused(tmp_path, CheckpointError, "expected tensor names, got none; download the checkpoint in")
    (place / INDEX).unlink()
    refused(tmp_path, CheckpointError, f"a folder with {INDEX}", "save_pretrained_split", "got a folder without it")


def test_missing_damaged_or_wrong_tensors_are_rejected(tmp_path: Path, state: State) -> None:
    place = save_split(tmp_path, state)
    file = place / json.loads((place / INDEX).read_text())[NORM]
    torch.save([state[NORM]], file)
    refused(tmp_path, CheckpointError, f"expected the tensor {NORM}", "got a list")
    os.truncate(file, 100)
    refused(tmp_path, MissingWeightsError, file.name, "download the file again")
    file.unlink()
    refused(tmp_path, MissingWeightsError, file.name, "does not exist")
    torch.save(Attack(tmp_path / "trap"), file)
    refused(tmp_path, CheckpointError, "expected tensors only", "mkdir")
    assert not (tmp_path / "trap").exists()


def test_weights_presharded_for_devices_are_rejected(tmp_path: Path, state: State) -> None:
    save_file({"ln_f_weight*0": state[NORM]}, tmp_path / "DecoderLMHead.safetensors")
    refused(tmp_path, CheckpointError, "DecoderLMHead.safetensors", "tp_degree")


def eight_bits(tensor: torch.Tensor, *, whole: bool) -> QuantizedTensor:
    """A matrix in int8; ``whole``: with the same scale in all rows."""
    matrix = quantize(tensor, WeightFormat.INT8)
    if not whole:
        return matrix
    scale = tensor.abs().max() / 127
    return replace(matrix, data=(tensor / scale).round().to(torch.int8), scales=scale.expand(len(tensor)))


def nxd(state: State, *, whole: bool) -> State:
    """Linear layers in int8 as NxD writes them: X.weight, and X.scale [N, 1] or [1]; the embedding stays."""
    made: State = {}
    for name, tensor in state.items():
        bare = name.removeprefix("model.")  # of the model without its head it takes the names
        if tensor.ndim < 2 or "embed" in name:
            made[bare] = tensor
            continue
        matrix = eight_bits(tensor, whole=whole)
        assert matrix.scales is not None
        made[bare] = matrix.data
        made[bare.removesuffix("weight") + "scale"] = matrix.scales[:1] if whole else matrix.scales.unsqueeze(1)
    return made


@pytest.mark.parametrize("form", ["safetensors", "bin", "split"])
@pytest.mark.parametrize("whole", [False, True])
def test_scales_with_the_names_of_nxd_are_read(tmp_path: Path, state: State, form: str, whole: bool) -> None:
    (FORMATS | {"split": save_split})[form](tmp_path, nxd(state, whole=whole))
    loaded = load_weights(tmp_path, ModelConfig.from_pretrained(tmp_path), torch.float32)
    assert loaded.keys() == state.keys()
    expected = eight_bits(state[MATRIX], whole=whole)
    made = loaded[MATRIX]
    assert isinstance(made, QuantizedTensor) and made.format is WeightFormat.INT8
    assert torch.equal(made.dequantize(), expected.dequantize())
    embedding = loaded["model.embed_tokens.weight"]
    assert isinstance(embedding, Tensor) and torch.equal(embedding, state["model.embed_tokens.weight"])


@pytest.mark.parametrize("scales", [torch.ones(3, 1), torch.zeros(32, 1), torch.full((1,), float("nan")), None])
def test_invalid_scales_are_rejected(tmp_path: Path, state: State, scales: Tensor | None) -> None:
    tensors = nxd(state, whole=False)
    name = MATRIX.removeprefix("model.").removesuffix("weight") + "scale"
    del tensors[name]
    torch.save(tensors if scales is None else tensors | {name: scales}, tmp_path / "pytorch_model.bin")
    with pytest.raises(PacelineError) as caught:
        load(tmp_path)
    assert type(caught.value) is (CheckpointError if scales is None else WeightValueError)
    assert MATRIX.removeprefix("model.") in str(caught.value)
