"""Configurations of NxD Inference and transformers-neuronx, and the application around a decoder."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import DecoderApplication, NeuronConfig, SpeculativeGenerator
from paceline.core.errors import ConfigurationError, PacelineError
from paceline.neuron_config_keys import REFUSED, WITHOUT_EFFECT
from tests.fakes_models import load, logits_of, network, saved

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


def test_the_file_of_an_application_of_nxd(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
    assert config.context_length_estimate == [128, 256, 512, 1024]
    assert (config.k, config.fused, config.draft_model_path) == (4, True, "some/draft")
    params = config.sampling_params
    assert (params.do_sample, params.top_k, params.top_p, params.temperature) == (True, 40, 0.9, 0.7)
    named = {"fused_qkv", "async_mode", "attn_kernel_enabled", "logical_nc_config", "is_continuous_batching"}
    assert named <= config.without_effect.keys()
    assert all(f"{name} has no effect here" in caplog.text for name in named)
    assert NeuronConfig.from_json(config.to_json()) == config


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"n_positions": None, "context_length_estimate": None, "amp": "bf16", "k": None, "quantization": None}),
    ({"n_positions": [256, 128]}, {"n_positions": [128, 256]}),
    ({"context_length_estimate": 64}, {"context_length_estimate": 64}),
    ({"n_positions": 512, "amp": "f32"}, {"n_positions": 512, "amp": "f32"}),
    ({"seq_len": 512, "enable_bucketing": False}, {"n_positions": [512], "context_length_estimate": 512}),
    ({"seq_len": 512, "token_generation_buckets": [64, 256]}, {"n_positions": [64, 256, 512]}),
    ({"seq_len": 512, "buckets": [512]}, {"n_positions": 512}),
    ({"seq_len": 512, "context_encoding_buckets": [32, 128]}, {"context_length_estimate": [32, 128]}),
    ({"torch_dtype": "torch.float16"}, {"amp": "f16"}),
    ({"quantized": True, "quantization_type": "per_channel_symmetric"}, {"quantization": "int8"}),
    ({"quantized": True, "quantization_type": "per_tensor_symmetric"}, {"quantization": "int8_per_tensor"}),
    ({"kv_cache_quant": True}, {"kv_cache_dtype": "fp8_e4m3"}),
    ({"kv_cache_quant": {"quant_dtype": "s8"}}, {"kv_cache_dtype": "int8"}),
    ({"kv_cache_quant": True, "kv_quant_config": {"direct_cast": True}}, {"kv_cache_dtype": "fp8_e4m3"}),
    ({"kv_quant_config": {"quant_dtype": "float8_e5m2", "k_quant_method": {}}}, {"kv_cache_dtype": "fp8_e5m2"}),
    ({"kv_quant_config": None, "kv_cache_quant": False}, {"kv_cache_dtype": None}),
    ({"quantized": True, "quantization_dtype": "f8e4m3"}, {"quantization": "fp8_e4m3"}),
    ({"quant": {"quant_dtype": "s8", "dequant_dtype": "bf16"}, "padding_side": "left"}, {"quantization": "int8"}),
    ({"is_prefix_caching": True, "prefix_buckets": [64, 128]}, {"prefix_caching": True}),
    ({"is_prefix_caching": False}, {"prefix_caching": False}),
    ({"speculation_length": 1}, {"k": None}),  # the root alone
    ({"speculation_length": 2}, {"k": 1}),
    ({"group_query_attention": "shard-over-heads"}, {"group_query_attention": "shard-over-heads"}),
]  # fmt: skip


@pytest.mark.parametrize(("given", "expected"), CASES, ids=[str(given) for given, _ in CASES])
def test_names_of_both(given: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read(**given)
    assert {name: getattr(config, name) for name in expected} == expected
    assert NeuronConfig.from_json(config.to_json()) == config


BAD: list[tuple[dict[str, Any], str]] = [
    ({"batch_sise": 2}, "no option batch_sise"),
    ({"pp_degree": 2}, "pp_degree=2 cannot be followed"),
    ({"kv_cache_quant": {"quant_dtype": "s4"}}, "quant_dtype='s4' cannot be followed"),
    ({"kv_quant_config": {"quant_dtype": "bfloat16"}}, "kv_quant_config: quant_dtype='bfloat16' cannot be followed"),
    ({"kv_quant_config": {"k_method": 1}}, "kv_quant_config has no option k_method"),
    ({"kv_quant_config": True}, "kv_quant_config is a bool; it must be an object"),
    ({"quantized": True, "quantization_dtype": "f8e3m4"}, "quantization_dtype='f8e3m4'"),
    ({"torch_dtype": "int8"}, "torch_dtype='int8' is unknown"),
    ({"on_device_sampling_config": {"top_q": 1}}, "no option 'top_q'"),
    ({"on_device_sampling_config": {"temperature": 0}}, "temperature"),
    ({"batch_size": 0}, "batch_size"),
    ({"allow_input_truncation": True}, "does not fit is refused"),
    ({"neuron_config": 3}, "must be an object"),
]


@pytest.mark.parametrize(("given", "words"), BAD, ids=[words for _, words in BAD])
def test_what_cannot_be_followed_raises(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(**given)


@pytest.mark.parametrize("source", ["{", "[1]", "no/such/file.json"])
def test_what_is_no_configuration_raises(source: str, tmp_path: Path) -> None:
    if source == "[1]":
        (tmp_path / "list.json").write_text(source)
        source = str(tmp_path / "list.json")
    with pytest.raises(ConfigurationError):
        NeuronConfig.from_neuron_config(source)
    with pytest.raises(ConfigurationError, match="there is no option 'colour'"):
        NeuronConfig.from_json('{"colour": 1}')


def test_every_key_has_one_meaning() -> None:
    assert not WITHOUT_EFFECT.keys() & REFUSED.keys()
    for name in WITHOUT_EFFECT:
        assert read(**{name: None}).without_effect == {name: WITHOUT_EFFECT[name]}
    for name, (values, _) in REFUSED.items():
        assert not read(**{name: values[0]}).without_effect


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(network(), tmp_path_factory.mktemp("application") / "target")


def test_an_application_loads_runs_and_is_reset(folder: Path) -> None:
    config = read(batch_size=2, seq_len=64, max_context_length=16, torch_dtype="float32", is_prefix_caching=True)
    application = DecoderApplication(folder, config, backend="eager")
    with pytest.raises(ConfigurationError, match="not loaded"):
        application.forward(torch.tensor([[1]]))
    application.load()
    assert application.decoder.options.chunks == (16,) and application.decoder.batch_size == 2
    text = [5, 9, 13, 7]
    exact = logits_of(network(), text)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    made = application.forward(torch.tensor([[0, *text[:2]], text[:3]]), mask)
    torch.testing.assert_close(made, exact[1:3], atol=1e-4, rtol=1e-4)
    made = application(torch.tensor([[text[2]], [text[3]]]))
    torch.testing.assert_close(made, exact[2:4], atol=1e-4, rtol=1e-4)
    application.reset()
    torch.testing.assert_close(application(torch.tensor([text[:1]])), exact[:1], atol=1e-4, rtol=1e-4)
    plain = load(folder).sample([text], max_new_tokens=8)
    assert torch.equal(application.generator().sample([text], max_new_tokens=8), plain)
    assert application.generator().config.prefix_caching is True
    ids = torch.tensor([text])
    made = application.adapter().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)
    assert torch.equal(made, plain)
    application.close()


def test_an_application_on_compiled_graphs(folder: Path, tmp_path: Path) -> None:
    config = read(seq_len=64, enable_bucketing=False, max_context_length=16, torch_dtype="float32")
    text = [5, 9, 13, 7]
    exact, plain = logits_of(network(), text), load(folder).sample([text], max_new_tokens=8)
    first = DecoderApplication(folder, config)
    first.compile(tmp_path / "graphs")
    first.close()
    application = DecoderApplication(folder, config)
    application.load(tmp_path / "graphs")
    compiled: list[str] = []
    application.decoder.on_graph = lambda event: compiled.append(event.message)
    assert torch.equal(application.generator().sample([text], max_new_tokens=8), plain)
    assert compiled and not any(compiled), "every graph was there"
    torch.testing.assert_close(application(torch.tensor([text[:3]])), exact[2:3], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(application(torch.tensor([text[3:]])), exact[3:], atol=1e-4, rtol=1e-4)
    application.reset()
    torch.testing.assert_close(application(torch.tensor([text[:1]])), exact[:1], atol=1e-4, rtol=1e-4)
    application.quantize(tmp_path / "int8")
    application.close()
    texts = []
    for path, quantization in ((tmp_path / "int8", None), (folder, "int8")):
        quantized = DecoderApplication(path, config.model_copy(update={"quantization": quantization}), backend="eager")
        quantized.load()
        texts.append(quantized.generator().sample([text], max_new_tokens=8))
        quantized.close()
    assert torch.equal(*texts)


def test_an_application_speculates_as_its_file_says(folder: Path) -> None:
    fields = {"neuron_config": {"seq_len": 64, "torch_dtype": "float32", "speculation_length": 4}}
    config = NeuronConfig.from_neuron_config({**fields, "fused_spec_config": {"draft_model_path": str(folder)}})
    application = DecoderApplication(folder, config, backend="eager")
    application.load()
    generator = application.generator()
    assert isinstance(generator, SpeculativeGenerator) and generator.config.k == 3
    assert torch.equal(generator.sample([[5, 9]], max_new_tokens=9), load(folder).sample([[5, 9]], max_new_tokens=9))
    assert generator.statistics.num_accepted_tokens > 0


def test_graphs_of_another_configuration_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "paceline_config.json").write_text(NeuronConfig(batch_size=3).to_json())
    with pytest.raises(ConfigurationError, match="compiled for another configuration"):
        DecoderApplication(folder, NeuronConfig(), backend="eager").load(tmp_path)
    with pytest.raises(PacelineError, match="no compiled graphs to save"):
        DecoderApplication(folder, read(seq_len=64), backend="eager").compile(tmp_path)


def test_the_page_has_every_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    assert [name for name in (*WITHOUT_EFFECT, *REFUSED) if f"`{name}`" not in page] == []


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_numbers_is_refused_by_name(name: str) -> None:
    values, reason = REFUSED[name]
    assert all(read(**{name: value}).batch_size == 1 for value in values)
    with pytest.raises(ConfigurationError, match=re.escape(f"{name}=7 cannot be followed: {reason}")):
        read(**{name: 7})


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_what_changes_nothing_is_named_with_the_reason(name: str) -> None:
    assert read(**{name: None}).without_effect == {name: WITHOUT_EFFECT[name]}
