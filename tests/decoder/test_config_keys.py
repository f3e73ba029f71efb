"""Every key of every family's config.json is understood, refused by name, or on a list of those without effect."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from paceline.core.errors import CheckpointError, PacelineError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models import registry
from paceline.decoder.models.config import HARMLESS, NEUTRAL, STANDARD, ModelConfig
from paceline.decoder.models.registry import MODEL_FAMILIES
from tests.decoder.families import FAMILIES

_LLAMA = {"hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SHAPES = {"llama": ("llama", _LLAMA), **FAMILIES, "mimo": ("mimo", FAMILIES["qwen2"][1])}
TWINS = {"mimo": "qwen2"}
"""Families that transformers does not have, and those whose files theirs resemble."""
every_family = pytest.mark.parametrize("kind", MODEL_FAMILIES)


def files_of(kind: str) -> Iterator[dict[str, Any]]:
    """Configurations that transformers writes for a family: unchanged, and with options that others switch off."""
    for family, fields in SHAPES.values():
        if family == kind:
            config = AutoConfig.for_model(
                TWINS.get(kind, kind),
                **{"vocab_size": 96, "num_hidden_layers": 3, **fields, "bos_token_id": 3, "eos_token_id": 4},
            )
            written: dict[str, Any] = {**json.loads(config.to_json_string(use_diff=False)), "model_type": kind}
            yield written
            bare = {key: value for key, value in written.items() if key not in ("layer_types", "no_rope_layers")}
            yield {key: value for key, value in bare.items() if key != "rope_parameters"}
            yield {**bare, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}


def others(value: object) -> list[object]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2, 0]
    if isinstance(value, float):
        return [value * 1.5 + 0.125]
    if isinstance(value, str):
        return ["another"]
    if isinstance(value, list):
        return [[7], value + value, ["another"] * max(1, len(value))]
    if isinstance(value, dict):
        return [{**value, "another": 1}, *({**value, key: one} for key in value for one in others(value[key]))]
    return [1, True, "another", [1], {"another": 1}]


def seen(config: dict[str, Any]) -> str:
    """Values read from a configuration, or "refused"."""
    try:
        return ModelConfig.from_fields(Fields(config, "config.json")).fingerprint()
    except PacelineError:
        return "refused"


@every_family
def test_every_transformers_key_is_read_or_known_to_have_no_effect(kind: str) -> None:
    files = [config for config in files_of(kind) if seen(config) != "refused"]
    keys = {key for config in files for key in config}
    noticed = {
        key
        for config in files
        for key in keys
        if any(seen({**config, key: value}) != seen(config) for value in others(config.get(key)))
    }
    read = registry.family(kind).keys
    assert keys - noticed <= HARMLESS | {"intermediate_size"}, "passed over, and on no list"
    assert ("intermediate_size" in keys - noticed) == (kind in ("qwen2_moe", "qwen3_moe")), (
        "its experts have a size of their own"
    )
    assert noticed <= STANDARD | read | NEUTRAL.keys(), "read, and the family's list of keys says nothing of it"


@every_family
def test_a_family_reads_the_keys_it_declares(kind: str) -> None:
    files = [config for config in files_of(kind) if seen(config) != "refused"]
    values = [1, 2, 3, 4, 8, 36, 64, 0.25, True, False, "relu", "gelu", [1], ["sliding_attention"] * 3, {"a": 1}]
    for key in registry.family(kind).keys:
        bare = [{name: one for name, one in config.items() if name != key} for config in files]
        assert any(len({seen(config), *(seen({**config, key: value}) for value in values)}) > 1 for config in bare), key


def test_a_key_is_on_one_list() -> None:
    assert not HARMLESS & NEUTRAL.keys() and not STANDARD & (HARMLESS | NEUTRAL.keys())
    for kind in MODEL_FAMILIES:
        assert not registry.family(kind).keys & STANDARD


@pytest.mark.parametrize("key", NEUTRAL)
def test_unread_keys_that_change_the_output_are_rejected(key: str) -> None:
    config = next(files_of("mistral"))
    assert key not in registry.family("mistral").keys
    value = NEUTRAL[key]
    assert seen({**config, key: value}) == seen(config)
    wrong = 2 if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)) else not value
    with pytest.raises(UnknownArchitectureError, match=f"{key}: expected .*, which is not supported"):
        ModelConfig.from_fields(Fields({**config, key: wrong or {"0": [1]}}, "config.json"))


PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "SmolLM2": ("llama", {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}),
    "Llama 3.1": ("llama", {"mlp_bias": False, "pretraining_tp": 1, "torch_dtype": "bfloat16"}),
    "Qwen 2.5": ("qwen2", {"use_mrope": False, "max_window_layers": 21, "use_sliding_window": False}),
    "Qwen 3": ("qwen3", {"max_window_layers": 28, "rope_scaling": None, "sliding_window": None}),
    "Qwen 3 MoE": ("qwen3_moe", {"output_router_logits": False, "max_window_layers": 48}),
    "Mixtral": ("mixtral", {"router_jitter_noise": 0.0, "output_router_logits": False, "rope_theta": 1e6}),
    "Phi-4-mini": (
        "phi3",
        {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "auto_map": {}},
    ),
    "Gemma 2": ("gemma2", {"cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh"}),
    "GPT-2": (
        "gpt2",
        {
            "n_ctx": 1024, "summary_activation": None, "summary_first_dropout": 0.1, "summary_type": "cls_index",
            "summary_use_proj": True, "summary_proj_to_labels": True, "task_specific_params": {"text-generation": {}},
        },
    ),
    "GPT-J": (
        "gptj",
        {
            "rotary": True, "scale_attn_weights": True, "tokenizer_class": "GPT2Tokenizer", "n_inner": None,
            "gradient_checkpointing": False, "summary_type": "cls_index",
        },
    ),
    "Pythia": ("gpt_neox", {"rotary_pct": 0.25, "rotary_emb_base": 10000, "classifier_dropout": 0.1}),
    "OPT": ("opt", {"activation_dropout": 0.0, "init_std": 0.02, "layerdrop": 0.0, "prefix": "</s>"}),
    "BLOOM": (
        "bloom",
        {
            "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "masked_softmax_fusion": True,
            "offset_alibi": 100, "skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0,
            "slow_but_exact": False, "gradient_checkpointing": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("deepseek_v3", {"n_group": 4}, "6 experts in equal groups of 2 or more, .*, got 4 groups, of which 2"),
        ("deepseek_v3", {"n_group": 6}, "got 6 groups"),
        ("deepseek_v3", {"topk_group": 4}, "got 3 groups, of which 4"),
        ("deepseek_v3", {"num_experts_per_tok": 5}, "at most 4 active experts per token, got 5"),
        ("mixtral", {"num_experts_per_tok": 5}, "at most 4 active experts per token, got 5"),
    ],
)
def test_impossible_expert_counts_are_rejected(kind: str, changes: dict[str, int], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        ModelConfig.from_fields(Fields({**next(files_of(kind)), **changes}, "config.json"))


def test_kimi_k2_is_a_deepseek_v3() -> None:
    """By the name in its files: every key, and every tensor, is DeepSeek V3's."""
    config = next(files_of("deepseek_v3"))
    assert seen({**config, "model_type": "kimi_k2"}) == seen(config) != "refused"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_load_without_a_warning(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind, more = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps({**next(files_of(kind)), **more}))
    with caplog.at_level(logging.WARNING, "paceline"):
        ModelConfig.from_pretrained(tmp_path)
    assert not caplog.text


def test_unknown_keys_inside_of_objects_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    known = next(files_of("mpt"))
    inside = {"attn_config": {"alibi": True, "attn_pdrop": 0.1, "rope": True, "softcap": 3.0, "window": None}}
    (tmp_path / "config.json").write_text(json.dumps({**known, **inside}))
    with caplog.at_level(logging.WARNING, "paceline"):
        ModelConfig.from_pretrained(tmp_path)
    (record,) = caplog.records
    assert "unknown keys are ignored: attn_config.rope, attn_config.softcap;" in record.getMessage()


def test_unknown_keys_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({**next(files_of("llama")), "attention_sinks": 4, "attn_logit_softcapping": 30.0, "x": None})
    )
    with caplog.at_level(logging.WARNING, "paceline"):
        ModelConfig.from_pretrained(tmp_path)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{file}: unknown keys are ignored: attention_sinks, attn_logit_softcapping;")
