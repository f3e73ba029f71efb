"""GGUF files as checkpoints: what transformers reads in them, what it passes over, and what is rejected before work."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.errors import CheckpointError, MissingWeightsError, UnknownArchitectureError
from paceline.decoder import steps
from paceline.decoder.gguf import checkpoint as gguf_checkpoint
from paceline.decoder.gguf.header import read_header
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.weights import checkpoint
from paceline.decoder.weights.hub import checkpoint_path
from paceline.decoder.weights.open import open_weight_file
from tests.decoder.gguf_files import END, HEADS, SCALES, START, TOKENS, VOCABULARY, network, write
from tests.decoder.tiny import load
from tests.fakes_models import generated

PROMPT = [START, 40, 41, 257, 12, 99, 100, 7]
TYPES = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, *SCALES]


def check_logits(decoder: SamplingDecoder, model: LlamaForCausalLM, *, atol: float = 1e-4) -> None:
    """Logits after every token of the prompt, and what follows greedily."""
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    tokens = torch.tensor([PROMPT], dtype=torch.int32)
    got = steps.window(decoder, tokens, torch.tensor([0], dtype=torch.int32), bucket=decoder.bucket_for(len(PROMPT)))[0]
    torch.testing.assert_close(got[0], expected, atol=atol, rtol=0)
    made = decoder.sample([PROMPT], max_new_tokens=24)
    assert isinstance(made, torch.Tensor)
    assert made[0].tolist() == generated(model, PROMPT, max_new_tokens=24)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_every_tensor_type_equals_transformers(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path / "model.gguf", network(tied=kind is Kind.Q8_0), kind)
    judge = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    judge.generation_config.pad_token_id = 0
    config = ModelConfig.from_pretrained(path)
    expected = judge.state_dict()
    found = checkpoint.load_weights(path, config, torch.float32)
    assert len(found) == len(list(judge.parameters()))
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    check_logits(load(path), judge)


@pytest.mark.parametrize("kind", [Kind.BF16, Kind.Q4_1, Kind.Q4_K], ids=lambda kind: kind.name)
def test_shards_may_start_inside_a_block(tmp_path: Path, kind: Kind) -> None:
    path = write(tmp_path / "model.gguf", network(), kind)
    with open_weight_file(path) as source:
        for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
            whole = source.read(name)
            for first, last in ((0, 256), (40, 100), (7, 8), (250, 256)):
                assert torch.equal(source.read_range(name, (first, last), dim=0), whole[first:last])
                assert torch.equal(source.read_range(name, (first, last), dim=1), whole[:, first:last])


def test_biases_are_permuted_like_their_weights(tmp_path: Path) -> None:
    made = network(bias=True)
    path = write(tmp_path / "model.gguf", made)
    config = ModelConfig.from_pretrained(path)
    assert config.attention_bias and config.mlp_bias
    check_logits(load(path), made, atol=1e-5)


LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip


def llama_3_factors(head_dim: int, theta: float) -> np.ndarray[Any, Any]:
    """Factors that llama.cpp's converter writes as rope_freqs.weight for LLAMA_3."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = (32 / wavelengths - 1.0) / (4.0 - 1.0)
    between = 1 / ((1 - smooth) / 8.0 + smooth)
    return np.where(wavelengths < 32 / 4.0, 1.0, np.where(wavelengths > 32.0, 8.0, between)).astype(np.float32)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
YARN_KEYS = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}
SCALINGS: dict[str, tuple[Mapping[str, object], Mapping[str, object]]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0}, {"scaling.type": "linear", "scaling.factor": 4.0}),
    "linear, as it was written before": ({"rope_type": "linear", "factor": 4.0}, {"scale_linear": 4.0}),
    "yarn": (YARN, YARN_KEYS),
    "yarn with a share of its own": (
        {**YARN, "attention_factor": 1.5 * (0.1 * math.log(4.0) + 1.0), "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN_KEYS, "scaling.attn_factor": 1.5, "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0},
    ),
    "llama 3": (LLAMA_3, {}),
}
"""Settings of config.json, and keys of the file below llama.rope."""


@pytest.mark.parametrize("name", SCALINGS)
def test_rope_scaling_equals_the_original_models(tmp_path: Path, name: str) -> None:
    """transformers reads none of these keys, so the model before its conversion is the judge."""
    rope, keys = SCALINGS[name]
    changes = {f"llama.rope.{key}": value for key, value in keys.items()}
    made = network(rope=rope)
    extra = {"rope_freqs.weight": llama_3_factors(64, 50000.0)} if name == "llama 3" else {}
    decoder = load(write(tmp_path / "model.gguf", made, changes=changes, extra=extra))
    assert decoder.config.rope.type == {"llama 3": "longrope"}.get(name, rope["rope_type"])
    check_logits(decoder, made, atol=2e-5)


def test_gguf_configuration_equals_the_folders(tmp_path: Path) -> None:
    made = network()
    made.save_pretrained(tmp_path / "folder")
    path = write(tmp_path / "model.gguf", made)
    assert ModelConfig.from_pretrained(path) == ModelConfig.from_pretrained(tmp_path / "folder")
    other = write(
        tmp_path / "other.gguf", made, changes={"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.bos_token_id": None}
    )
    config = ModelConfig.from_pretrained(other)
    assert (config.eos_token_ids, config.bos_token_id) == ((END, 5), None)


def test_header_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", network(), Kind.Q4_K)
    header, known = read_header(path), gguf.GGUFReader(path)
    assert header.metadata == {
        key: field.contents() for key, field in known.fields.items() if not key.startswith("GGUF.")
    }
    assert list(header.tensors) == [tensor.name for tensor in known.tensors]
    for tensor in known.tensors:
        ours = header.tensors[tensor.name]
        assert (ours.offset, ours.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert ours.shape == tuple(reversed(tensor.shape.tolist())) and ours.type == tensor.tensor_type.name


def test_the_header_is_read_once_for_all_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The header has every word of the vocabulary."""
    path, read = write(tmp_path / "model.gguf", network(), Kind.Q4_1), []
    config = ModelConfig.from_pretrained(path)
    monkeypatch.setattr(checkpoint, "_PORTION", 1)
    monkeypatch.setattr(checkpoint, "_PORTIONS", 1 << 40)
    monkeypatch.setattr(gguf_checkpoint, "read_header", lambda path: read.append(path) or read_header(path))
    assert len(checkpoint.load_weights(path, config, torch.float32)) > len(read) == 2  # for names, and for tensors


def test_a_file_drafts_for_a_folder(tmp_path: Path) -> None:
    made = network()
    made.save_pretrained(tmp_path / "folder")
    target = load(tmp_path / "folder")
    path = write(tmp_path / "draft.gguf", made, Kind.Q8_0)
    generator = SpeculativeGenerator(str(path), target, k=3)
    done = generator.sample([PROMPT], max_new_tokens=20)
    assert torch.equal(done, target.sample([PROMPT], max_new_tokens=20))
    assert generator.statistics.num_accepted_tokens > 10


def test_a_folder_with_one_gguf_file_loads_and_with_several_is_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", network())
    assert checkpoint_path(tmp_path) == path
    assert load(tmp_path).folder == path
    write(tmp_path / "other.gguf", network())
    with pytest.raises(CheckpointError, match=r"2 GGUF files .* give one of them: model.gguf, other.gguf"):
        load(tmp_path)
    network().save_pretrained(tmp_path)
    assert checkpoint_path(tmp_path) == tmp_path  # safetensors come first


def test_every_end_id_is_read(tmp_path: Path) -> None:
    """Those of the keys, and those that llama.cpp knows by their text."""
    tokens = [*TOKENS]
    tokens[10:14] = ["<|im_end|>", "<|eot_id|>", "<|file_sep|>", "</s>"]
    changes = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eom_token_id": 20}
    path = write(tmp_path / "model.gguf", network(), changes=changes)
    assert ModelConfig.from_pretrained(path).eos_token_ids == (END, 20, 12, 10, 11, 13)
    tokens[14:17] = ["<|return|>", "<|call|>", "<|tool_response>"]  # "<|end|>" ends a message, and "</s>" nothing
    path = write(tmp_path / "model.gguf", network(), changes=changes)
    assert ModelConfig.from_pretrained(path).eos_token_ids == (20, 12, 10, 11, 14, 15, 16)


# ---- what is refused

REFUSED: dict[str, tuple[dict[str, object], type[CheckpointError], str]] = {
    "no size": ({"llama.block_count": None}, CheckpointError, "'llama.block_count' is missing"),
    "no eps": ({"llama.attention.layer_norm_rms_epsilon": None}, CheckpointError, "rms_epsilon' is missing"),
    "groups": ({"llama.expert_group_count": 8}, UnknownArchitectureError, "expert_group_count .*8"),
    "factors": ({"llama.rope.scaling.attn_factor": 1.5}, UnknownArchitectureError, "attn_factor 1.5"),
    "a key of tomorrow": ({"llama.attention.twist": 1.5}, UnknownArchitectureError, "llama.attention.twist"),
    "half rotated": ({"llama.rope.dimension_count": 32}, UnknownArchitectureError, "rope.dimension_count"),
    "rope": ({"llama.rope.scaling.type": "longrope"}, UnknownArchitectureError, "'longrope'"),
    "a part": ({"split.count": 3}, CheckpointError, "3 parts"),
    "a wrong type": ({"llama.block_count": "two"}, CheckpointError, "block_count: expected an integer .*, got 'two'"),
    "eos": ({"tokenizer.ggml.eos_token_id": VOCABULARY}, CheckpointError, "eos_token_id: expected .*size 266, got 266"),
    "a missing layer": (
        {"llama.block_count": 3}, MissingWeightsError,
        r"expected the tensors model.layers.2.* the file's metadata belongs",
    ),
    "other sizes": (
        {"llama.attention.head_count": 2 * HEADS, "llama.rope.dimension_count": 32}, CheckpointError,
        r"k_proj.weight: expected shape .* from the file's metadata, got \[128, 256\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_change_the_output_are_rejected_by_name(tmp_path: Path, name: str) -> None:
    changes, error, words = REFUSED[name]
    path = write(tmp_path / "model.gguf", network(), changes=changes)
    with pytest.raises(error, match=words) as caught:
        load(path)
    assert str(path) in str(caught.value)


def test_other_architectures_tensors_and_types_are_rejected(tmp_path: Path) -> None:
    path, ones = tmp_path / "model.gguf", np.ones((256, 256), np.int32)
    write(path, network(), architecture="mamba")
    with pytest.raises(UnknownArchitectureError, match=r"architecture: expected one of llama, .*, got 'mamba'"):
        ModelConfig.from_pretrained(path)
    write(path, network(), extra={"blk.0.attn_q.weight": ones})
    with pytest.raises(UnknownArchitectureError, match=r"attn_q.weight: the type I32 cannot be dequantised"):
        ModelConfig.from_pretrained(path)
    write(path, network(), extra={"blk.0.attn_q_norm.weight": np.ones(64, np.float32)})
    with pytest.raises(CheckpointError, match=r"expected only tensors .*, got also model.layers.0.self_attn.q_norm"):
        load(path)


def test_damaged_and_other_files_are_rejected(tmp_path: Path) -> None:
    """Cut anywhere, with a header that announces more than there is (counts, texts, lists, dimensions), or no GGUF."""
    whole, path = write(tmp_path / "model.gguf", network(), Kind.Q4_0).read_bytes(), tmp_path / "bad.gguf"
    with pytest.raises(MissingWeightsError, match="does not exist"):
        load(path)
    name, types = whole.index(b"output_norm.weight"), whole.index(b"tokenizer.ggml.token_type")
    ends = (0, 2, 7, 20, 200, 3000, name, name + 30, len(whole) - 100_000, len(whole) - 1)
    lengths = (8, 16, 24, types + len("tokenizer.ggml.token_type") + 8, name - 8, name + len("output_norm.weight") + 4)
    for content, words in (
        *((whole[:size], "(truncated|empty|expected a GGUF)") for size in ends),
        *((whole[:at] + struct.pack("<Q", 1 << 60) + whole[at + 8 :], "is (truncated|damaged)") for at in lengths),
        (b"PK\x03\x04 and more", "expected a GGUF file, got one that starts with"),
        (b"version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(40), "expected GGUF version 2 or 3, got 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
    ):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"bad.gguf: .*{words}"):
            load(path)


def test_nan_weights_are_rejected(tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", network())
    at = read_header(path).tensors["blk.1.ffn_down.weight"].offset
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<f", float("nan")))
    with pytest.raises(CheckpointError, match=r"mlp.down_proj.weight contains NaN"):
        load(path)
