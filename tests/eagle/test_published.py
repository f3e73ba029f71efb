"""Configurations of published heads: each is read right, or refused with the reason. See published/README.md.

The files in ``published`` hold the config.json as it was found, where, and the sizes of the target. Weights are not
needed to read them: the tensors are a list of names, those that EAGLE's issue 265 prints and those that speculators
writes.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import CheckpointError, PacelineError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig
from paceline.eagle import formats
from paceline.eagle.config import EagleConfig, is_eagle_config

UNKNOWN = UnknownArchitectureError
FOLDER = Path(__file__).parent / "published"
_PARTS = [
    *(f"self_attn.{side}_proj.weight" for side in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
]
_THREE = ["d2t", "t2d", "fc.weight", "lm_head.weight", "norm.weight"]
_NORMS = ["hidden_norm.weight", "input_layernorm.weight"]
TENSORS = {
    "eagle1": ["embed_tokens.weight", "fc.weight", *(f"layers.0.{name}" for name in _PARTS)],
    "eagle3": [*_THREE, *(f"midlayer.{name}" for name in (*_PARTS, *_NORMS))],
    "speculators3": ["embed_tokens.weight", *_THREE, *(f"layers.0.{name}" for name in (*_PARTS, *_NORMS))],
}
TENSORS |= {
    "eagle1, fc.bias": [*TENSORS["eagle1"], "fc.bias"],
    "eagle3, fc_norm": [*TENSORS["eagle3"], *(f"fc_norm.{i}.weight" for i in range(3))],
    "eagle3, input_norm": [*TENSORS["eagle3"], "input_norm.weight"],
    "speculators3, input_norm": [*TENSORS["speculators3"], "input_norm.weight"],
    "peagle of 4 layers": [
        *TENSORS["speculators3"],
        "mask_hidden",
        *(f"layers.{i}.{name}" for i in (1, 2, 3) for name in (*_PARTS, "input_layernorm.weight")),
    ],
}


def entry(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def target_of(sizes: dict[str, Any], model_type: str = "llama") -> ModelConfig:
    """A target of these sizes; what else it is made of does not matter to a head."""
    named = {"num_hidden_layers": sizes["num_layers"], "num_attention_heads": 2, "intermediate_size": 8}
    fields = {"model_type": "llama", **named, "hidden_size": sizes["hidden_size"], "vocab_size": sizes["vocab_size"]}
    return replace(ModelConfig.from_fields(Fields(fields, "target")), model_type=model_type)


def read(name: str, *, model_type: str = "llama", **changes: object) -> EagleConfig:
    """The configuration as a folder with such a head is read, but for the weights."""
    found = entry(name)
    fields = Fields({**found["config"], **changes}, f"{name}/config.json")
    target, tensors = target_of(found["target"], model_type), TENSORS[found["tensors"]]
    layout, version = formats.layout_of(fields, tensors)
    names = [formats.own_name(tensor, layout, version) for tensor in tensors]
    made = formats.parse(fields, layout, version, target=target, names=[n for n in names if n is not None])
    made.check_target(target)
    return made


def draft(made: EagleConfig) -> tuple[object, ...]:
    """Version, streams, drafted ids, heads, their width, theta and longest text."""
    heads = (made.num_heads, made.num_kv_heads, made.head_dim)
    return (made.version, made.layers, made.draft_vocab_size, heads, made.rope.theta, made.max_position_embeddings)


READ: dict[str, tuple[object, ...]] = {
    "eagle-llama3-8b": (1, (), 128256, (32, 8, 128), 500000.0, 2048),
    "eagle-vicuna-7b": (1, (), 32000, (32, 32, 128), 10000.0, 2048),
    "eagle-vicuna-33b": (1, (), 32000, (52, 13, 128), 10000.0, 2048),
    "eagle3-llama3.1-8b": (3, (2, 16, 29), 32000, (32, 8, 128), 10000.0, 2048),
    "specforge-llama3-8b": (3, (2, 16, 29), 32000, (32, 8, 128), 10000.0, 2048),
    "specforge-qwen3-235b": (3, (2, 47, 91), 32000, (64, 4, 128), 1e6, 40960),
    "specforge-gpt-oss-120b": (3, (2, 18, 34), 32000, (64, 8, 64), 10000.0, 4096),
    "nvidia-qwen3-235b": (3, (2, 47, 91), 151936, (64, 4, 128), 5e6, 2048),
    "nebius-gpt-oss-20b": (3, (2, 12, 21), 64000, (64, 8, 64), 150000.0, 2048),
    "angelslim-qwen3-4b": (3, (2, 18, 33), 32000, (32, 8, 128), 1e6, 40960),
    "angelslim-qwen2.5-7b": (3, (2, 14, 25), 32000, (28, 4, 128), 1e6, 131072),
    "tensorrt-llm-llama3.1-8b": (3, (2, 16, 29), 32000, (32, 8, 128), 500000.0, 131072),
    "speculators-gemma4-31b": (3, (2, 30, 57), 32000, (32, 16, 256), 10000.0, 262144),
    "speculators-qwen3-8b": (3, (2, 18, 33), 32000, (32, 8, 128), 1e6, 40960),
    "speculators-gpt-oss-20b": (3, (2, 12, 21), 64000, (64, 8, 64), 10000.0, 2048),
    "speculators-mistral-123b-eagle3.1": (3, (2, 44, 85), 32000, (96, 8, 128), 1e6, 32768),
    "specforge-qwen3-30b-eagle3.1": (3, (2, 24, 45), 32000, (32, 4, 128), 1e6, 2048),
    "speculators-qwen3-32b": (3, (2, 32, 61), 32000, (64, 8, 128), 1e6, 2048),
}
REFUSED = {
    "eagle-mixtral-8x7b": "model_type: expected llama or qwen3 in a head, got 'mixtral'",
    "speculators-qwen3-moe-eagle3.1": "use_sliding_window: expected false, got true",
    "angelslim-qwen3-vl-4b": "'image_token_id' is not a known setting of an EAGLE head",
    "nvidia-gpt-oss-120b-v2": "use_aux_hidden_state: expected true, got false, .*: an EAGLE-3 layer reads the target",
    "nvidia-gpt-oss-120b-v3": "layer_types: expected full attention only, got .'sliding_attention'.",
    "specforge-qwen3-8b-peagle": "the id that stands for unknown tokens .* as one of mask_token_id, .* got none",
}
NEWER: dict[str, dict[str, object]] = {
    "speculators-gpt-oss-20b": {"norm_before_fc": True},
    "speculators-mistral-123b-eagle3.1": {"norm_before_fc": True, "norm_output": True},
    "specforge-qwen3-30b-eagle3.1": {"fc_norm": True, "norm_output": True},
}
"""What heads of ``READ`` have that EAGLE-3 as first published does not."""


def test_every_published_head_has_a_verdict() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted([*READ, *REFUSED])
    # The oldest files say nothing that a Llama of one layer would not.
    newer = {*READ, *REFUSED} - {"eagle-vicuna-7b", "eagle-vicuna-33b", "eagle-mixtral-8x7b"}
    assert all(is_eagle_config(entry(name)["config"]) for name in newer)


@pytest.mark.parametrize("name", READ)
def test_a_published_eagle_head_is_read(name: str) -> None:
    made = read(name)
    assert draft(made) == READ[name]
    assert made.norm_before_residual == name.startswith("speculators")
    assert made.fc_bias == name.startswith("eagle-vicuna") and not made.input_norm
    yarn = dict.fromkeys(("nebius-gpt-oss-20b", "speculators-mistral-123b-eagle3.1"), "yarn")
    assert made.rope.type == {"tensorrt-llm-llama3.1-8b": "llama3", **yarn}.get(name, "default")
    assert {setting: getattr(made, setting) for setting in made.of_version_3()} == NEWER.get(name, {})


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_eagle_heads_are_rejected_with_the_reason(name: str) -> None:
    with pytest.raises(CheckpointError, match=REFUSED[name]):
        read(name)


@pytest.mark.parametrize(
    ("name", "changes", "error", "said"),
    [
        ("specforge-qwen3-30b-eagle3.1", {"norm_before_fc": True}, CheckpointError, "or norm_before_fc but not"),
        ("eagle-llama3-8b", {"norm_output": True}, CheckpointError, "norm_output: expected its default for an EAGLE-1"),
        ("eagle3-llama3.1-8b", {"norm_output": 1}, CheckpointError, "norm_output: expected"),
        ("specforge-qwen3-8b-peagle", {"ptd_token_id": 151936}, CheckpointError, "mask_token: expected an id below"),
        ("specforge-qwen3-8b-peagle", {"ptd_token_id": 5, "pard_token": 6}, CheckpointError, r"got \[5, 6\]"),
        ("speculators-qwen3-8b", {"norm_before_residual": None}, CheckpointError, "expected the key norm_before"),
        ("speculators-qwen3-8b", {"speculators_model_type": "dflash"}, UNKNOWN, "eagle3 or peagle, got 'dflash'"),
        ("speculators-qwen3-8b", {"speculators_model_type": "peagle"}, CheckpointError, "mask_token_id, .* got none"),
        ("speculators-qwen3-8b", {"layernorm": True}, UNKNOWN, "'layernorm' is not a known setting"),
        ("eagle3-llama3.1-8b", {"norm_bias": True}, UNKNOWN, "norm_bias: expected false, got true, .*: norms"),
        ("eagle3-llama3.1-8b", {"qkv_bias": True}, UNKNOWN, "qkv_bias: expected false, got true"),
        ("eagle3-llama3.1-8b", {"hidden_act": "gelu"}, UNKNOWN, "hidden_act: expected silu in a head, got 'gelu'"),
        ("eagle3-llama3.1-8b", {"logit_scale": 0.5}, UNKNOWN, "logit_scale: expected 1, got 0.5"),
        ("eagle3-llama3.1-8b", {"sliding_window": 128}, UNKNOWN, "not supported, got 128"),
        ("eagle3-llama3.1-8b", {"layer_types": ["x"]}, UNKNOWN, "use a head with full attention"),
        ("angelslim-qwen2.5-7b", {"use_sliding_window": True}, UNKNOWN, "use_sliding_window: expected false, got t"),
        ("eagle3-llama3.1-8b", {"rope_scaling": {"mrope_section": [1]}}, UNKNOWN, "'mrope_section'"),
        ("eagle3-llama3.1-8b", {"target_layer_ids": [1]}, UNKNOWN, "'target_layer_ids' is not"),
        ("eagle3-llama3.1-8b", {"num_aux_hidden_states": 4}, CheckpointError, "got 4"),
        ("nebius-gpt-oss-20b", {"truncated_vocab_size": 9}, CheckpointError, "got truncated_vocab_size=9 and draft"),
        ("specforge-qwen3-235b", {"eagle_aux_hidden_state_layer_ids": [2, 47, 91]}, CheckpointError, "keep the one"),
        (
            "eagle3-llama3.1-8b", {"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}, CheckpointError,
            "the same norm_before_fc at the top level and in eagle_config",
        ),
        ("eagle3-llama3.1-8b", {"eagle_config": {"parallel_draft_step": 4}}, UNKNOWN, "in one pass"),
        ("eagle3-llama3.1-8b", {"eagle_config": {"target_hidden_size": 8}}, UNKNOWN, "'target_hidden"),
    ],
)  # fmt: skip
def test_eagle_keys_that_change_the_output_are_rejected_by_name(
    name: str, changes: dict[str, object], error: type[PacelineError], said: str
) -> None:
    with pytest.raises(error, match=said):
        read(name, **changes)


def test_the_mirror_case_is_accepted() -> None:
    """Values that change nothing, and remarks of transformers, are passed over."""
    plain = read("eagle3-llama3.1-8b")
    assert read("eagle3-llama3.1-8b", use_sliding_window=False, sliding_window=4096, is_causal=True) == plain
    assert read("eagle3-llama3.1-8b", layer_types=["full_attention"], dtype="bfloat16", auto_map={}) == plain
    assert read("eagle3-llama3.1-8b", num_hidden_layers=40) == plain, "EAGLE3-Vicuna1.3-13B says so, and has one layer"


def test_the_state_fed_back_is_logged_where_trainers_differ(caplog: pytest.LogCaptureFixture) -> None:
    """In flat files; before its pull request 879, SpecForge trained with another meaning than readers have."""
    read("speculators-mistral-123b-eagle3.1")
    assert "norm_output" not in caplog.text
    read("specforge-qwen3-30b-eagle3.1")
    assert "norm_output: drafts read the state after the last norm, as in vLLM and SGLang" in caplog.text
    assert "reads residual streams [2, 24, 45] of the target, which is a guess" in caplog.text


@pytest.mark.parametrize("key", ["mask_token_id", "ptd_token_id", "pard_token"])
def test_a_p_eagle_head_is_read_with_its_mask_id(key: str) -> None:
    made = read("specforge-qwen3-8b-peagle", **{key: 151669, "parallel_drafting": True})
    assert draft(made) == (3, (2, 18, 33), 32000, (32, 8, 128), 1e6, 40960)
    assert (made.mask_token, made.num_layers, made.qk_norm) == (151669, 4, False)


def test_a_layer_of_qwen3_has_norms_of_queries_and_keys() -> None:
    inner = {**entry("speculators-qwen3-8b")["config"]["transformer_layer_config"], "model_type": "qwen3"}
    made = read("speculators-qwen3-8b", transformer_layer_config=inner)
    assert made.qk_norm and made.shapes()["layer.self_attn.k_norm.weight"] == (128,)


def test_ids_that_begin_with_1_are_outputs_of_layers(caplog: pytest.LogCaptureFixture) -> None:
    """SGLang's rule: [1, 17, 33] are the streams 2, 18 and 34, but of gpt-oss the streams 1, 17 and 33 themselves."""
    caplog.set_level(logging.INFO, "paceline")
    assert read("specforge-gpt-oss-120b").layers == (2, 18, 34)
    assert "begin with 1 and are taken as layers whose outputs are read" in caplog.text
    assert "reads residual streams [2, 18, 34] of the target; if that is wrong, set aux_layers=1,17,33" in caplog.text
    caplog.clear()
    assert read("specforge-gpt-oss-120b", model_type="gpt_oss").layers == (1, 17, 33)
    assert "reads residual streams [1, 17, 33]" in caplog.text and "begin with 1" not in caplog.text
    assert read("speculators-gemma4-31b").layers == (2, 30, 57)
    assert "reads residual streams [2, 30, 57]" in caplog.text
    assert read("eagle3-llama3.1-8b").layers == (2, 16, 29)
    assert "no layers are configured: the head reads residual streams [2, 16, 29]" in caplog.text
