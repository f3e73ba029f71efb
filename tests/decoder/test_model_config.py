"""Reading config.json: understood as Hugging Face understands it, or refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.models.blueprint import Blueprint
from paceline.decoder.models.config import ModelConfig, RopeConfig

SIZES: dict[str, object] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def write(folder: Path, config: dict[str, object], generation: dict[str, object] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_defaults_equal_those_of_hugging_face(tmp_path: Path) -> None:
    ours = ModelConfig.from_pretrained(write(tmp_path, SIZES))
    theirs = LlamaConfig(**{key: value for key, value in SIZES.items() if key != "model_type"})
    assert ours.num_kv_heads == theirs.num_key_value_heads == 4
    assert ours.head_dim == theirs.head_dim == 8
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.rope == RopeConfig(theta=theirs.rope_parameters["rope_theta"])
    assert (ours.tie_word_embeddings, ours.attention_bias, ours.mlp_bias) == (False, False, False)
    assert (theirs.tie_word_embeddings, theirs.attention_bias, theirs.mlp_bias) == (False, False, False)
    assert ours.hidden_act == theirs.hidden_act
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert (ours.pad_token_id, ours.bos_token_id) == (theirs.pad_token_id, theirs.bos_token_id)


def test_configurations_saved_by_transformers_are_read(tmp_path: Path) -> None:
    alike: dict[str, Any] = {
        "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "head_dim": 16, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
        "pad_token_id": 0, "bos_token_id": None,
    }  # fmt: skip
    rope = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
    sizes = {"num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    LlamaConfig(**alike, **sizes, rope_parameters=rope, eos_token_id=[7, 9]).save_pretrained(tmp_path)
    assert ModelConfig.from_pretrained(str(tmp_path)) == ModelConfig(
        model_type="llama",
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        rope=RopeConfig("llama3", 5e5, 512, 64, factor=8.0),
        hidden_act="silu",
        eos_token_ids=(7, 9),
        blueprint=Blueprint(qkv_bias=True, out_bias=True, mlp_bias=True),
        **alike,
    )


LLAMA3_ROPE = {"type": "llama3", "theta": 5e5, "original_max_position_embeddings": 64, "factor": 8.0}
LINEAR, DYNAMIC = ({"rope_type": kind, "factor": 2.0} for kind in ("linear", "dynamic"))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}}, LLAMA3_ROPE),
        ({"rope_scaling": None, "rope_parameters": LINEAR}, {"type": "linear"}),
        ({"rope_scaling": {}, "rope_parameters": LINEAR}, {"type": "linear"}),
        ({"rope_scaling": DYNAMIC, "rope_parameters": LINEAR}, {"type": "dynamic"}),  # as in transformers
        (
            {"rope_scaling": {"type": "llama3", **LLAMA3}, "original_max_position_embeddings": 128},
            {"original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_settings_are_read_in_the_old_and_the_new_layout(
    tmp_path: Path, said: dict[str, object], expected: dict[str, object]
) -> None:
    found = ModelConfig.from_pretrained(write(tmp_path, SIZES | said)).rope
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 5}, None, ((5,), None)),
        ({"eos_token_id": 5}, {"eos_token_id": [6, 7, 6], "pad_token_id": 3}, ((6, 7), 3)),
        ({"eos_token_id": 5, "pad_token_id": 4}, {"eos_token_id": None}, ((5,), 4)),
        ({"eos_token_id": None, "pad_token_id": -1}, {}, ((), None)),
        ({}, {}, ((2,), None)),
    ],
)
def test_special_ids_are_read(
    tmp_path: Path, config: dict[str, object], generation: dict[str, object] | None, expected: tuple[object, object]
) -> None:
    read = ModelConfig.from_pretrained(write(tmp_path, SIZES | config, generation))
    assert (read.eos_token_ids, read.pad_token_id) == expected


def test_the_fingerprint_is_stable_and_covers_every_field(tmp_path: Path) -> None:
    base = ModelConfig.from_pretrained(write(tmp_path, SIZES))
    again = ModelConfig.from_pretrained(write(tmp_path, dict(reversed(SIZES.items()))))
    # Written down, so that a change that would orphan every cached graph is made knowingly.
    assert base.fingerprint() == again.fingerprint() == FINGERPRINT
    changed = [
        {"rms_norm_eps": 1e-5}, {"rope_theta": 20000}, {"num_hidden_layers": 3}, {"tie_word_embeddings": True},
        {"eos_token_id": 3},
    ]  # fmt: skip
    prints = {ModelConfig.from_pretrained(write(tmp_path, SIZES | change)).fingerprint() for change in changed}
    assert len(prints | {base.fingerprint()}) == len(changed) + 1
    assert json.loads(json.dumps(base.to_dict()))["rope"]["theta"] == 10000.0


FINGERPRINT = "808064a0f43c36ca598128fc7bbeeaf5787de9c7c36d65d953410def07dfebd0"


BAD, UNKNOWN = CheckpointError, UnknownArchitectureError


def without(key: str) -> dict[str, object]:
    return {name: value for name, value in SIZES.items() if name != key}


def rope(**settings: object) -> dict[str, object]:
    return {**SIZES, "rope_parameters": settings}


@pytest.mark.parametrize(
    ("config", "error", "parts"),
    [
        (without("model_type"), BAD, ["model_type", "missing"]),
        (without("vocab_size"), BAD, ["vocab_size", "missing"]),
        (without("num_hidden_layers"), BAD, ["num_hidden_layers", "missing"]),
        (SIZES | {"model_type": "mamba"}, UNKNOWN, ["'mamba'", "model_type: expected one of llama"]),
        (SIZES | {"hidden_act": "tanh"}, UNKNOWN, ["'tanh'", "hidden_act: expected one of silu"]),
        (SIZES | {"quantization_config": {"bits": 4}}, UNKNOWN, ["quantization_config: expected weights as one of"]),
        (SIZES | {"per_layer_config": {"0": {}}}, UNKNOWN, ["per_layer_config"]),
        (SIZES | {"head_dim": 7}, UNKNOWN, ["head_dim", "got 7", "even"]),
        (SIZES | {"partial_rotary_factor": 0.5}, UNKNOWN, ["partial_rotary_factor"]),
        (SIZES | {"hidden_size": 30}, BAD, ["got 30", "num_attention_heads = 4"]),
        (SIZES | {"num_key_value_heads": 3}, BAD, ["num_key_value_heads = 3"]),
        (SIZES | {"hidden_size": "32"}, BAD, ["hidden_size", "got '32'", "integer"]),
        (SIZES | {"num_hidden_layers": True}, BAD, ["num_hidden_layers", "got True"]),
        (SIZES | {"num_hidden_layers": 20000}, BAD, ["num_hidden_layers: expected at most 10000, got"]),
        (SIZES | {"num_attention_heads": 10**12}, BAD, ["num_attention_heads: expected at most 65536, got"]),
        (
            SIZES | {"model_type": "mixtral", "num_local_experts": 10**12, "num_experts_per_tok": 2}, BAD,
            ["expected at most 65536 experts, got"],
        ),
        (SIZES | {"num_hidden_layers": 0}, BAD, ["num_hidden_layers", "got 0"]),
        (SIZES | {"rms_norm_eps": float("nan")}, BAD, ["rms_norm_eps", "finite"]),
        (SIZES | {"rms_norm_eps": 10**400}, BAD, ["rms_norm_eps", "..."]),
        (SIZES | {"tie_word_embeddings": 1}, BAD, ["tie_word_embeddings", "got 1", "true or false"]),
        (SIZES | {"eos_token_id": 64}, BAD, ["eos_token_id", "got 64", "vocabulary size 64"]),
        (SIZES | {"eos_token_id": "</s>"}, BAD, ["eos_token_id", "token id"]),
        (SIZES | {"rope_scaling": "linear"}, BAD, ["rope_scaling", "object"]),
        (rope(rope_type="su"), UNKNOWN, ["'su'", "longrope"]),
        (rope(rope_type="default", mrope_section=[1]), UNKNOWN, ["'mrope_section'"]),
        (rope(rope_type="linear"), BAD, ["rope_parameters", "'factor'", "missing"]),
        (rope(rope_type="llama3", factor=2.0), BAD, ["'low_freq_factor'", "missing"]),
        (
            rope(rope_type="llama3", **LLAMA3 | {"high_freq_factor": 1}), BAD,
            ["low_freq_factor: expected less than high_freq_factor ="],
        ),
        (rope(rope_type="longrope", short_factor=[1.0] * 4), BAD, ["'long_factor'", "missing"]),
        (rope(rope_type="longrope", short_factor=[1.0] * 3), BAD, ["short_factor", "4 numbers"]),
        (rope(rope_type="longrope", short_factor=[1, 1, 0, 1]), BAD, ["short_factor[2]", "got 0"]),
        (rope(rope_theta=1.0), BAD, ["rope_theta: expected more than 1, got 1.0"]),
    ],
)  # fmt: skip
def test_bad_configurations_are_rejected(
    tmp_path: Path, config: dict[str, object], error: type[CheckpointError], parts: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_pretrained(write(tmp_path, config))
    assert type(caught.value) is error
    for part in [str(tmp_path / "config.json"), *parts]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b'{"model_type": ', ["expected JSON, got"]),
        (b"", ["expected JSON, got"]),
        (b"\xff\xfe", ["expected JSON, got"]),
        (b"[" * 100_000, ["expected JSON, got"]),
        (b"[1]", ["expected a JSON object, got list"]),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_files_are_rejected(tmp_path: Path, name: str, content: bytes, parts: list[str]) -> None:
    write(tmp_path, SIZES)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_pretrained(tmp_path)
    for part in [str(tmp_path / name), "download the file again", *parts]:
        assert part in str(caught.value)


def test_missing_folder_and_file_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: expected a folder; give the local folder"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"None: expected a path; give the local folder"):
        ModelConfig.from_pretrained(None)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"config\.json: the file does not exist; give the folder"):
        ModelConfig.from_pretrained(tmp_path)
