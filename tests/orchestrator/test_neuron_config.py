"""Configurations of NxD Inference and transformers-neuronx: what is read, and what is rejected by name."""

from __future__ import annotations

import json
import logging
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from paceline import NeuronConfig
from paceline.core.errors import ConfigurationError
from paceline.neuron_config import NUMBER, key_tables

TABLES = key_tables()
WITHOUT_EFFECT, REFUSED, CHOICES = TABLES.without_effect, TABLES.refused, TABLES.choices

FUSED: dict[str, Any] = {
    "batch_size": 2, "ctx_batch_size": 1, "tkg_batch_size": 2, "padding_side": "right", "seq_len": 2048,
    "max_context_length": 1024, "torch_dtype": "bfloat16", "tp_degree": 32, "enable_bucketing": True,
    "is_continuous_batching": True, "fused_qkv": True, "async_mode": True, "logical_nc_config": 2,
    "speculation_length": 5, "enable_fused_speculation": True, "attn_kernel_enabled": None, "kv_cache_quant": False,
    "on_device_sampling_config": {
        "do_sample": True, "top_k": 40, "top_p": 0.9, "temperature": 0.7, "dynamic": True, "deterministic": False,
        "global_topk": 256, "on_device_sampling_config": True,
    },
}  # fmt: skip


def read(**fields: Any) -> NeuronConfig:
    return NeuronConfig.from_neuron_config(fields)


def test_an_nxd_application_file_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "neuron_config.json"
    file.write_text(
        json.dumps(
            {
                "neuron_config": FUSED,
                "fused_spec_config": {"draft_model_path": "some/draft", "worker_cls": {"__name__": "X"}},
                "hidden_size": 64,
                "_name_or_path": "some/target",
            }
        )
    )
    with caplog.at_level(logging.INFO, "paceline"):
        config = NeuronConfig.from_neuron_config(tmp_path)
    assert config == NeuronConfig.from_neuron_config(file) == NeuronConfig.from_neuron_config(file.read_text())
    assert (config.batch_size, config.n_positions, config.tp_degree, config.amp) == (2, 2048, 32, "bf16")
    assert config.context_length_estimate == (128, 256, 512, 1024)
    assert (config.k, config.fused, config.draft_model_path) == (4, True, "some/draft")
    params = config.sampling_params
    assert (params.do_sample, params.top_k, params.top_p, params.temperature) == (True, 40, 0.9, 0.7)
    named = {"fused_qkv", "async_mode", "attn_kernel_enabled", "logical_nc_config", "is_continuous_batching"}
    assert named <= config.without_effect.keys()
    assert all(f"{name} has no effect in Paceline" in caplog.text for name in named)
    assert NeuronConfig.from_json(config.to_json()) == config


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"n_positions": None, "context_length_estimate": None, "amp": "bf16", "k": None, "quantization": None}),
    ({"n_positions": [256, 128]}, {"n_positions": (128, 256)}),
    ({"context_length_estimate": 64}, {"context_length_estimate": 64}),
    ({"n_positions": 512, "amp": "f32"}, {"n_positions": 512, "amp": "f32"}),
    ({"seq_len": 512, "enable_bucketing": False}, {"n_positions": (512,), "context_length_estimate": 512}),
    ({"seq_len": 512, "token_generation_buckets": [64, 256]}, {"n_positions": (64, 256, 512)}),
    ({"seq_len": 512, "buckets": [512]}, {"n_positions": 512}),
    ({"seq_len": 512, "context_encoding_buckets": [32, 128]}, {"context_length_estimate": (32, 128)}),
    ({"torch_dtype": "torch.float16"}, {"amp": "f16"}),
    ({"quantized": True, "quantization_type": "per_channel_symmetric"}, {"quantization": "int8"}),
    ({"quantized": True, "quantization_type": "per_tensor_symmetric"}, {"quantization": "int8"}),
    ({"kv_cache_quant": True}, {"kv_cache_dtype": "fp8_e4m3"}),
    ({"kv_cache_quant": {"quant_dtype": "s8"}}, {"kv_cache_dtype": "int8"}),
    ({"kv_cache_quant": True, "kv_quant_config": {"direct_cast": True}}, {"kv_cache_dtype": "fp8_e4m3"}),
    ({"kv_quant_config": {"quant_dtype": "float8_e5m2", "k_quant_method": {}}}, {"kv_cache_dtype": "fp8_e4m3"}),
    ({"kv_quant_config": None, "kv_cache_quant": False}, {"kv_cache_dtype": None}),
    ({"quantized": True}, {"quantization": "int8"}),  # NxD's own default
    ({"quantized": True, "quantization_dtype": "f8e5m2"}, {"quantization": "fp8_e4m3"}),
    ({"quantized": False, "quantization_type": "per_tensor_symmetric"}, {"quantization": None}),
    (
        {"quantized": True, "quantization_dtype": "f8e4m3", "quantization_type": "per_channel_symmetric"},
        {"quantization": "fp8_e4m3"},
    ),
    (
        {"quantized": True, "modules_to_not_convert": ["lm_head"]},
        {"quantization": "int8", "modules_to_not_convert": ("lm_head",)},
    ),
    ({"quantized": False, "modules_to_not_convert": ["lm_head"]}, {"modules_to_not_convert": ()}),
    ({"quant": {"quant_dtype": "f8e4m3fn", "quantize_attn": True}}, {"quantization": "fp8_e4m3"}),
    ({"enable_fused_speculation": False}, {"fused": None}),  # of a file without speculation
    ({"enable_fused_speculation": False, "speculation_length": 4}, {"fused": False, "k": 3}),
    ({"enable_fused_speculation": True, "speculation_length": 4}, {"fused": True, "k": 3}),
    ({"router_config": {"act_fn": "softmax", "dtype": "float32"}}, {"without_effect": {}}),
    ({"quant": {"quant_dtype": "s8", "dequant_dtype": "bf16"}, "padding_side": "left"}, {"quantization": "int8"}),
    ({"is_prefix_caching": True, "prefix_buckets": [64, 128]}, {"prefix_caching": True}),
    ({"is_prefix_caching": False}, {"prefix_caching": False}),
    ({"speculation_length": 1}, {"k": None}),  # the root alone
    ({"speculation_length": 2}, {"k": 1}),
    ({"group_query_attention": "shard-over-heads"}, {"group_query_attention": "shard-over-heads"}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), CASES, ids=[str(given) for given, _ in CASES])
def test_both_projects_names_are_read(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read(**given)
    assert {name: getattr(config, name) for name in expected} == expected
    assert NeuronConfig.from_json(config.to_json()) == config


BAD: list[tuple[dict[str, Any], str]] = [
    ({"batch_sise": 2}, "batch_sise: not an option"),
    ({"pp_degree": 2}, "pp_degree: 2 is not supported"),
    ({"kv_cache_quant": {"quant_dtype": "s4"}}, "for keys and values, got 's4'"),
    ({"kv_quant_config": {"quant_dtype": "bfloat16"}}, "kv_quant_config: quant_dtype: expected .*, got 'bfloat16'"),
    ({"kv_quant_config": {"k_method": 1}}, "kv_quant_config: k_method is not an option"),
    ({"kv_quant_config": True}, "kv_quant_config: expected an object, got a bool"),
    ({"quantized": True, "quantization_dtype": "f8e3m4"}, "quantization_dtype: expected .*, got 'f8e3m4'"),
    (
        {"quantized": True, "quantization_type": "blockwise_symmetric"},
        "quantization_type: expected .*, got 'blockwise_symmetric'",
    ),
    ({"quantized": True, "quantization_type": "per_chanel_symmetric"}, "expected per_channel_symmetric or per_tensor"),
    ({"quantization_type": "per_chanel_symmetric"}, "expected per_channel_symmetric or per_tensor"),
    ({"quantized": "yes"}, "quantized: expected true or false, got 'yes'"),
    ({"quantized": True, "quant": {}}, "give one"),
    ({"quant": True}, "quant: expected an object, got a bool"),
    ({"quant": {"quantize_method": "direct_cast"}}, "quantize_method: 'direct_cast' is not supported .every row"),
    ({"quant": {"quantize_attn": False}}, "quantize_attn: False is not supported .matrices of layers"),
    ({"quant": {"no_quantize_list": ["lm_head"]}}, "no_quantize_list: .* is not supported"),
    ({"quant": {"dtype": "s8"}}, "quant: dtype is not an option"),
    ({"modules_to_not_convert": "lm_head"}, "a list of names, got 'lm_head'"),
    ({"router_config": {"act_fn": "sigmoid"}}, "router_config: .* is not supported .experts are chosen by a softmax"),
    ({"normalize_top_k_affinities": False}, "norm_topk_prob"),
    ({"disable_normalize_top_k_affinities": True}, "norm_topk_prob"),
    ({"qk_layernorm": True}, "qk_layernorm: True is not supported"),
    ({"quantize_clamp_bound": 2.5}, "quantize_clamp_bound: 2.5 is not supported"),
    ({"glu_mlp": False}, "glu_mlp: False is not supported"),
    ({"padding_side": "middle"}, "padding_side: expected one of left, right, got 'middle'"),
    ({"enable_fused_speculation": "never"}, "enable_fused_speculation: expected true or false, got 'never'"),
    ({"enable_bucketing": 3}, "enable_bucketing: expected true or false, got 3"),
    ({"is_prefix_caching": "on"}, "is_prefix_caching: expected true or false, got 'on'"),
    ({"kv_cache_quant": "int8"}, "kv_cache_quant: expected true or false, got 'int8'"),
    ({"speculation_length": "5"}, "speculation_length: expected a number.*, got '5'"),
    ({"batch_size": True}, "batch_size: expected a number.*, got True"),
    ({"batch_size": 4, "token_generation_batches": [1, 8]}, "at most 4 slots .*, got 8"),
    ({"token_generation_batches": 4}, "token_generation_batches: expected a list of numbers, got 4"),
    ({"seq_len": 12.5}, "seq_len: expected a number.*, got 12.5"),
    ({"buckets": [128, "256"]}, "buckets: expected a list of numbers"),
    ({"context_length_estimate": "64"}, "context_length_estimate: expected a list of numbers, got '64'"),
    ({"tp_degree": "2"}, "tp_degree: expected a number of ranks of at least 1, got '2'"),
    ({"pp_degree": True}, "pp_degree: True is not supported"),
    ({"group_query_attention": "zzz"}, "group_query_attention: expected one of 'shard-over-heads'"),
    ({"torch_dtype": "int8"}, "got 'int8'"),
    ({"on_device_sampling_config": {"top_q": 1}}, "top_q: not an option"),
    ({"on_device_sampling_config": {"temperature": 0}}, "temperature"),
    ({"batch_size": 0}, "batch_size"),
    ({"allow_input_truncation": True}, "does not fit is refused"),
    ({"neuron_config": 3}, "expected an object"),
]


@pytest.mark.parametrize(
    ("given", "slots"),
    [
        ({"batch_size": 8}, 8),
        ({"tkg_batch_size": 8, "token_generation_batches": [4, 1]}, (1, 4, 8)),
        ({"token_generation_batches": [2, 4]}, (2, 4)),
        ({"batch_size": [1, 8]}, (1, 8)),
    ],
)
def test_batch_sizes_of_graphs_are_read(given: dict[str, Any], slots: int | tuple[int, ...]) -> None:
    assert read(**given).batch_size == slots


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words for _, words in BAD])
def test_unsupported_settings_are_rejected(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(**given)


@pytest.mark.parametrize("source", ["{", "[1]", "no/such/file.json"])
def test_invalid_configurations_are_rejected(source: str, tmp_path: Path) -> None:
    if source == "[1]":
        (tmp_path / "list.json").write_text(source)
        source = str(tmp_path / "list.json")
    with pytest.raises(ConfigurationError):
        NeuronConfig.from_neuron_config(source)
    with pytest.raises(ConfigurationError, match="colour: not an option"):
        NeuronConfig.from_json('{"colour": 1}')


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("amp", "x", "bf16, f16, f32"),
        ("quantization", "nope", "int8, .*q4_1, or gguf"),
        ("kv_cache_dtype", "int4", "int8, fp8_e4m3"),
        ("group_query_attention", "zzz", "'shard-over-heads', .*'all-gather-heads'"),
        ("fused", "maybe", "true or false"),
        ("k", "2", "a number"),
        ("batch_size", "2", "a positive number"),
        ("n_positions", "64", "a positive number"),
        ("modules_to_not_convert", "lm_head", "a list of names"),
    ],
)
def test_every_option_has_a_type(name: str, value: object, choices: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{name}.*{choices}"):
        NeuronConfig(**{name: value})


def test_every_key_has_one_meaning() -> None:
    assert not WITHOUT_EFFECT.keys() & REFUSED.keys()
    assert not CHOICES.keys() & TABLES.values.keys(), "a key has one kind of value"
    assert CHOICES.keys() | TABLES.values.keys() <= WITHOUT_EFFECT.keys()
    text = (files("paceline") / "neuron_config_keys.json").read_text(encoding="utf-8")
    for table in ("without_effect", "values", "refused"):
        listed = [key for keys in json.loads(text)[table].values() for key in keys]
        assert len(listed) == len(set(listed)), "a key is written once"
    for name, (values, _) in REFUSED.items():
        assert not read(**{name: values[0]}).without_effect


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_change_the_output_are_rejected_by_name(name: str) -> None:
    values, reason = REFUSED[name]
    assert all(read(**{name: value}).batch_size == 1 for value in values)
    with pytest.raises(ConfigurationError, match=re.escape(f"{name}: 7 is not supported ({reason}")):
        read(**{name: 7})


def values_of(name: str) -> tuple[list[object], list[object]]:
    """Values that the files of both projects have under a key, and one that none of them has."""
    if name in CHOICES:
        return [*CHOICES[name]], ["middle", 1, True]
    kind = TABLES.values.get(name)
    if kind == NUMBER:
        return [0, 1, 128], [-1, "128", 1.5, True, [1]]
    if kind == "a list":
        return [[], [128, 256], ["layers.0"]], [128, "layers.0", True]
    if kind == "a text":
        return ["some/folder"], [1, True, ["a"]]
    return ([True, False], ["true", 1, {}]) if kind is None else ([{}, {"depth": 2}, True, [[0, 1]]], [])


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_keys_without_effect_are_listed_with_the_reason(name: str) -> None:
    good, bad = values_of(name)
    for value in (None, *good):
        assert read(**{name: value}).without_effect == {name: WITHOUT_EFFECT[name]}
    for value in bad:
        with pytest.raises(ConfigurationError, match=f"^{name}: expected .*, got "):
            read(**{name: value})
