"""Small checkpoints in every format, for the tests of weights; no tests."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.core.errors import CheckpointError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights.checkpoint import load_weights

State = dict[str, Tensor]
INDEX = "model.safetensors.index.json"


def model(*, tied: bool = False, bias: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    network = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, tie_word_embeddings=tied, attention_bias=bias, mlp_bias=bias,
        )
    )  # fmt: skip
    for parameter in network.parameters():  # norms and biases are constants at first and would hide a mix-up
        torch.nn.init.normal_(parameter)
    return network


def small_model(folder: Path) -> State:
    """The tensors of a small model, whose config.json, and nothing else, is written into ``folder``."""
    network = model()
    network.config.save_pretrained(folder)
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> State:
    return load_weights(folder, ModelConfig.from_pretrained(folder), dtype)


def refused(folder: Path, error: type[Exception], *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert type(caught.value) is error
    for part in (str(folder), *parts):
        assert part in str(caught.value), str(caught.value)


def save_shards(folder: Path, state: State, suffix: str, *, save: Callable[[State, Path], None]) -> None:
    names = list(state)
    parts = [names[:3], names[3:9], names[9:]]
    stem = "model" if suffix == "safetensors" else "pytorch_model"
    weight_map = {}
    for number, part in enumerate(parts, 1):
        file = f"{stem}-{number:05d}-of-{len(parts):05d}.{suffix}"
        save({name: state[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))


def save_legacy(state: State, path: Path) -> None:
    torch.save(state, path, _use_new_zipfile_serialization=False)


FORMATS: dict[str, Callable[[Path, State], None]] = {
    "safetensors": lambda folder, state: save_file(state, folder / "model.safetensors"),
    "safetensors shards": lambda folder, state: save_shards(folder, state, "safetensors", save=save_file),
    "bin": lambda folder, state: torch.save(state, folder / "pytorch_model.bin"),
    "bin shards": lambda folder, state: save_shards(folder, state, "bin", save=torch.save),
    "legacy bin": lambda folder, state: save_legacy(state, folder / "pytorch_model.bin"),
    "legacy bin shards": lambda folder, state: save_shards(folder, state, "bin", save=save_legacy),
}
