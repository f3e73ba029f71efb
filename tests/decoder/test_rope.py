"""Rotary tables against transformers' own, type by type."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline import AutoDecoder
from paceline.core.errors import CheckpointError, ConfigurationError, UnknownArchitectureError
from paceline.decoder.kernels.plain import apply_rope
from paceline.decoder.models.config import ModelConfig, RopeConfig
from paceline.decoder.models.rope import rope_tables
from paceline.eagle.train import default_config

HEAD = 16
LENGTH = 256  # max_position_embeddings of every configuration here
ORIGINAL = 64

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LLAMA_3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0 + 0.1 * i for i in range(HEAD // 2)],
    "long_factor": [1.5 + 0.7 * i for i in range(HEAD // 2)],
}
CASES: dict[str, tuple[dict[str, object], int]] = {
    "default": ({"rope_type": "default"}, LENGTH),
    "default beyond training": ({"rope_type": "default", "rope_theta": 500000.0}, 3 * LENGTH),
    "linear": ({"rope_type": "linear", "factor": 2.5}, LENGTH),
    "dynamic": ({"rope_type": "dynamic", "factor": 3.0}, LENGTH),
    "llama3": (LLAMA_3, LENGTH),
    "yarn": (YARN, LENGTH),
    "yarn smooth ends": (YARN | {"truncate": False, "beta_fast": 16, "beta_slow": 2}, LENGTH),
    "yarn mscale": (YARN | {"mscale": 0.7, "mscale_all_dim": 1.1}, LENGTH),
    "yarn attention_factor": (YARN | {"attention_factor": 1.3}, LENGTH),
    "yarn factor from lengths": (YARN | {"factor": None}, LENGTH),
    "longrope short": (LONGROPE, ORIGINAL),
    "longrope factor": (LONGROPE | {"factor": 2.0}, ORIGINAL),
    "longrope attention_factor": (LONGROPE | {"attention_factor": 1.2}, ORIGINAL),
}


def reference_config(rope: dict[str, object]) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8, hidden_size=4 * HEAD, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=LENGTH, eos_token_id=None, rope_parameters=dict(rope),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", [4, 5])
def test_rope_tables_equal_those_of_transformers(tmp_path: Path, case: str, layout: int) -> None:
    rope, positions = CASES[case]
    theirs = reference_config(rope)
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    saved = json.loads(file.read_text())
    if layout == 4:
        scaling = saved.pop("rope_parameters")
        saved["rope_theta"] = scaling.pop("rope_theta")
        saved["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
        file.write_text(json.dumps(saved))
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.rope.type == rope["rope_type"]
    cos, sin = rope_tables(config.rope, config.head_dim, positions)
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (positions, HEAD)
    expected = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(positions)[None])
    for made, wanted in zip((cos, sin), expected, strict=True):
        torch.testing.assert_close(made, wanted[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        (RopeConfig("dynamic", factor=2.0, max_position_embeddings=LENGTH), LENGTH),
        (RopeConfig("longrope", max_position_embeddings=LENGTH, original_max_position_embeddings=ORIGINAL), ORIGINAL),
    ],
    ids=lambda value: getattr(value, "type", ""),
)
def test_length_dependent_frequencies_are_rejected(config: RopeConfig, longest: int) -> None:
    words = (
        f"{config.type!r}.* and a compiled decoder has one table of frequencies; load .*n_positions={longest} or less"
    )
    with pytest.raises(ConfigurationError, match=words) as caught:
        rope_tables(config, HEAD, longest + 1)
    assert f"got {longest + 1}" in str(caught.value)


def test_longrope_beyond_the_original_length_is_rejected_before_weights_are_read(tmp_path: Path) -> None:
    reference_config(LONGROPE).save_pretrained(tmp_path)
    with pytest.raises(ConfigurationError, match=f"n_positions={ORIGINAL} or less"):
        AutoDecoder.from_pretrained(tmp_path, backend="eager")
    with pytest.raises(CheckpointError, match="weights"):
        AutoDecoder.from_pretrained(tmp_path, backend="eager", n_positions=ORIGINAL)
    head = default_config(ModelConfig.from_pretrained(tmp_path), version=1, layers=(), draft_vocab_size=8)
    assert head.max_position_embeddings == ORIGINAL


@pytest.mark.parametrize(("head_dim", "positions"), [(16, 0), (15, 4), (0, 4)])
def test_impossible_sizes_are_rejected(head_dim: int, positions: int) -> None:
    with pytest.raises(ConfigurationError, match=f"got {positions} and head_dim={head_dim}"):
        rope_tables(RopeConfig(), head_dim, positions)


def test_unknown_types_and_wrong_factor_counts_are_rejected() -> None:
    with pytest.raises(UnknownArchitectureError, match="proportional, got 'su'"):
        rope_tables(RopeConfig("su"), HEAD, 4)
    with pytest.raises(UnknownArchitectureError, match=r"short_factor: expected 8 entries .*, got 1"):
        rope_tables(RopeConfig("longrope", short_factor=(1.0,)), HEAD, 4)


def test_tables_ignore_the_default_device() -> None:
    with torch.device("meta"):
        cos, sin = rope_tables(RopeConfig(), HEAD, 4)
    assert cos.device.type == sin.device.type == "cpu"


def test_bfloat16_is_rounded_once() -> None:
    x = torch.randn(7, 4, HEAD, generator=torch.Generator().manual_seed(1)).bfloat16()
    cos, sin = (table[33, None] for table in rope_tables(RopeConfig(), HEAD, LENGTH))
    assert torch.equal(apply_rope(x, cos, sin), apply_rope(x.float(), cos, sin).bfloat16())
