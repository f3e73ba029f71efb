"""Loading weights: every format gives the model's own tensors, and no wrong tensor passes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import (
    CheckpointError,
    ConfigurationError,
    MissingWeightsError,
    WeightShapeError,
    WeightValueError,
)
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.registry import family
from paceline.decoder.weights.checkpoint import load_weights
from tests.decoder.checkpoints import FORMATS, INDEX, State, load, model, refused

NORM = "model.norm.weight"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_format_gives_the_same_tensors(tmp_path: Path, state: State, form: str, dtype: torch.dtype) -> None:
    FORMATS[form](tmp_path, state)
    config = ModelConfig.from_pretrained(tmp_path)
    calls: list[tuple[int, int]] = []
    loaded = load_weights(tmp_path, config, dtype, progress=lambda done, total: calls.append((done, total)))
    assert list(loaded) == list(family("llama").tensors(config))
    for name, tensor in loaded.items():
        assert tensor.is_contiguous()
        assert tensor.dtype == dtype
        assert torch.equal(tensor, state[name].to(dtype)), name
    assert calls == [(done, len(state)) for done in range(1, len(state) + 1)]


@pytest.mark.parametrize("size", ["10GB", "5KB"])
def test_weights_saved_by_transformers_are_read(tmp_path: Path, size: str) -> None:
    network = model().bfloat16()
    network.save_pretrained(tmp_path, max_shard_size=size)
    assert (tmp_path / INDEX).exists() == (size == "5KB")
    loaded = load(tmp_path, torch.bfloat16)
    theirs = network.state_dict()
    assert loaded.keys() == theirs.keys()
    assert all(torch.equal(loaded[name], theirs[name]) for name in loaded)


def test_tied_head_may_be_stored_but_must_be_the_embedding(tmp_path: Path) -> None:
    network = model(tied=True)
    network.config.save_pretrained(tmp_path)
    state = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    assert HEAD in state
    assert HEAD not in load(tmp_path)
    state[HEAD][3, 4] += 1
    save_file(state, tmp_path / "model.safetensors")
    refused(tmp_path, CheckpointError, HEAD, "differs from", "tie_word_embeddings", "to false")


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_the_result_does_not_share_memory_with_the_file(tmp_path: Path, state: State, form: str) -> None:
    FORMATS[form](tmp_path, state)
    loaded = load(tmp_path)
    (file,) = (path for path in tmp_path.iterdir() if path.suffix in (".safetensors", ".bin"))
    with file.open("r+b") as handle:  # in place: the same inode that a mapping would show
        handle.write(bytes(file.stat().st_size))
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)


def test_harmless_extra_tensors_are_ignored(tmp_path: Path, state: State) -> None:
    state["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    state["model.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(state, tmp_path / "model.safetensors")
    assert "model.rotary_emb.inv_freq" not in load(tmp_path)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({NORM: None}, MissingWeightsError, [NORM, "download the checkpoint in full"]),
        ({HEAD: torch.ones(41, 24)}, WeightShapeError, [HEAD, "[41, 24]", "[40, 24]", "config.json"]),
        ({HEAD: torch.ones(40, 24, dtype=torch.int8)}, CheckpointError, [HEAD, "the data type I8 is not supported"]),
        (
            {f"medusa.{number}.weight": torch.ones(4) for number in range(5)},
            CheckpointError,
            ["medusa.0.weight, medusa.1.weight, medusa.2.weight and 2 more"],
        ),
        *(
            ({EMBEDDING: torch.full((40, 24), bad).triu(23)}, WeightValueError, [EMBEDDING, "NaN or infinity"])
            for bad in (float("nan"), float("inf"), -float("inf"))
        ),
    ],
)
def test_a_wrong_tensor_is_rejected(
    tmp_path: Path, state: State, form: str, changes: dict[str, Tensor | None], error: type[Exception], parts: list[str]
) -> None:
    """One of another shape before anything is loaded."""
    FORMATS[form](tmp_path, {name: one for name, one in (state | changes).items() if one is not None})
    config, seen = ModelConfig.from_pretrained(tmp_path), []
    with pytest.raises(CheckpointError) as caught:
        load_weights(tmp_path, config, torch.float32, progress=lambda done, _: seen.append(done))
    assert type(caught.value) is error and all(part in str(caught.value) for part in (str(tmp_path), *parts))
    assert not seen or error is not WeightShapeError


def test_values_beyond_float16_are_rejected(tmp_path: Path, state: State) -> None:
    state[EMBEDDING][17, 5] = 1e6
    save_file(state, tmp_path / "model.safetensors")
    assert load(tmp_path, torch.bfloat16)[EMBEDDING].dtype == torch.bfloat16
    with pytest.raises(WeightValueError, match=r"embed_tokens.*beyond the range of torch\.float16; load it in"):
        load(tmp_path, torch.float16)


def test_an_unsuitable_dtype_is_rejected(tmp_path: Path, state: State) -> None:
    with pytest.raises(ConfigurationError, match=r"expected one of torch\.float32.*, got torch\.int8"):
        load(tmp_path, torch.int8)
