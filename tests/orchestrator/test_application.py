"""The application around a decoder, and decoders whose tables of the vocabulary are not quantised."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import DecoderApplication, HuggingFaceGenerationAdapter, NeuronConfig, SpeculativeGenerator
from paceline.core.errors import ConfigurationError, SamplingError
from paceline.decoder.weights.quantize import PackedMatrix
from paceline.neuron_config import FusedSpecNeuronConfig, InferenceConfig, OnDeviceSamplingConfig
from tests.fakes_models import load, logits_of, network, saved

TEXT = [5, 9, 13, 7]


def read(**fields: Any) -> NeuronConfig:
    return NeuronConfig.from_neuron_config(
        {"seq_len": 64, "torch_dtype": "float32", "max_context_length": 16, **fields}
    )


def check(logits: torch.Tensor, tokens: list[int]) -> None:
    """These are the logits after these tokens of the text."""
    torch.testing.assert_close(logits, logits_of(network(), TEXT)[tokens], atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(network(), tmp_path_factory.mktemp("application") / "target")


def test_an_application_loads_generates_and_resets(folder: Path) -> None:
    application = DecoderApplication(folder, read(batch_size=2, is_prefix_caching=True), backend="eager")
    with pytest.raises(ConfigurationError, match="not loaded"):
        application.forward(torch.tensor([[1]]))
    application.load()
    assert application.decoder.options.chunks == (16,) and application.decoder.batch_size == 2
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    check(application.forward(torch.tensor([[0, *TEXT[:2]], TEXT[:3]]), mask), [1, 2])
    check(application(torch.tensor([[TEXT[2]], [TEXT[3]]])), [2, 3])
    application.reset()
    check(application(torch.tensor([TEXT[:1]])), [0])
    plain = load(folder).sample([TEXT], max_new_tokens=8)
    assert torch.equal(application.generator().sample([TEXT], max_new_tokens=8), plain)
    assert application.generator().config.prefix_caching is True
    ids = torch.tensor([TEXT])
    made = application.adapter().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, pad_token_id=0)
    assert torch.equal(made, plain)
    application.close()


def test_an_application_loads_the_result_of_compile(folder: Path, tmp_path: Path) -> None:
    config = read(enable_bucketing=False)
    first = DecoderApplication(folder, config)
    first.compile(tmp_path / "graphs")
    first.close()
    application = DecoderApplication(folder, config)
    application.load(tmp_path / "graphs")
    plain = load(folder).sample([TEXT], max_new_tokens=8)
    assert torch.equal(application.generator().sample([TEXT], max_new_tokens=8), plain)
    check(application(torch.tensor([TEXT[:3]])), [2])
    check(application(torch.tensor([TEXT[3:]])), [3])
    application.quantize(tmp_path / "int8")
    DecoderApplication(folder, replace(config, quantization="fp8_e4m3"), backend="eager").quantize(tmp_path / "fp8")
    assert '"float-quantized"' in (tmp_path / "fp8" / "config.json").read_text()
    application.close()
    texts = []
    for path, quantization in ((tmp_path / "int8", None), (folder, "int8")):
        quantized = DecoderApplication(path, replace(config, quantization=quantization), backend="eager")
        quantized.load()
        texts.append(quantized.generator().sample([TEXT], max_new_tokens=8))
        quantized.close()
    assert torch.equal(*texts)


def test_an_application_speculates_as_configured(folder: Path) -> None:
    fields = {"neuron_config": {"seq_len": 64, "torch_dtype": "float32", "speculation_length": 4}}
    config = NeuronConfig.from_neuron_config({**fields, "fused_spec_config": {"draft_model_path": str(folder)}})
    application = DecoderApplication(folder, config, backend="eager")
    application.load()
    generator = application.generator()
    assert isinstance(generator, SpeculativeGenerator) and generator.config.k == 3
    assert torch.equal(generator.sample([[5, 9]], max_new_tokens=9), load(folder).sample([[5, 9]], max_new_tokens=9))
    assert generator.statistics.num_accepted_tokens > 0


def test_graphs_of_another_configuration_are_rejected(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "paceline_config.json").write_text(NeuronConfig(batch_size=3).to_json())
    with pytest.raises(ConfigurationError, match="expected graphs of this configuration, got those of"):
        DecoderApplication(folder, NeuronConfig(), backend="eager").load(tmp_path)


def test_a_backend_without_graphs_saves_the_configuration(folder: Path, tmp_path: Path) -> None:
    DecoderApplication(folder, read(), backend="eager").compile(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["paceline_config.json"]
    again = DecoderApplication(folder, read(), backend="eager")
    again.load(tmp_path)
    assert again.generator().sample([[5, 9]], max_new_tokens=3).shape == (1, 5)


def test_modules_to_not_convert_keeps_the_embedding(folder: Path) -> None:
    made = {}
    for names in ([], ["lm_head"], ["model.embed_tokens", "lm_head"]):
        config = read(quantized=True, modules_to_not_convert=names)
        application = DecoderApplication(folder, config, backend="eager")
        application.load()
        model = application.decoder.body.model
        packed = [isinstance(one, PackedMatrix) for one in (model.embedding, model.head)]
        assert packed == ["model.embed_tokens" not in names, "lm_head" not in names]
        made[len(names)] = application(torch.tensor([TEXT]))
        application.close()
    exact = logits_of(network(), TEXT)[-1:]
    errors = [float((made[count] - exact).abs().max()) for count in range(3)]
    assert errors[0] != errors[1] != errors[2] and errors[2] < errors[0]


BAD_MODULES = [
    ({"quantization": "int8", "modules_to_not_convert": ["layers.0"]}, "got 'layers.0'"),
    ({"quantization": "int8", "modules_to_not_convert": ["q_proj"]}, "got 'q_proj'"),
    ({"modules_to_not_convert": ["lm_head"]}, "modules_to_not_convert: expected quantization to be set"),
]


@pytest.mark.parametrize(("options", "words"), BAD_MODULES)
def test_modules_that_cannot_stay_unconverted_are_rejected(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        NeuronConfig(**options, amp="f32", n_positions=64).load(folder, backend="eager")


def test_a_tied_embedding_stays_unconverted_by_either_name(tmp_path: Path) -> None:
    made = network()
    made.lm_head.weight = made.model.embed_tokens.weight
    made.config.tie_word_embeddings = True
    tied = saved(made, tmp_path / "tied")
    texts = []
    for name, degree in (("lm_head", 1), ("embed_tokens", 1), ("lm_head", 2)):
        config = NeuronConfig(
            quantization="int8", modules_to_not_convert=[name], amp="f32", n_positions=64, tp_degree=degree
        )
        decoder = config.load(tied, backend="eager")
        model = decoder.body.model
        assert not isinstance(model.embedding, PackedMatrix) and isinstance(model.layers[0].mlp.down, PackedMatrix)
        texts.append(decoder.sample([TEXT], max_new_tokens=8))
        decoder.close()
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


def test_classes_of_nxd_read_the_same_options(folder: Path) -> None:
    sampling = OnDeviceSamplingConfig(do_sample=True, top_k=5, dynamic=True)
    made: Any = NeuronConfig
    options = made(seq_len=64, batch_size=2, torch_dtype=torch.float32, on_device_sampling_config=sampling)
    assert options.without_effect and options.sampling_params.top_k == 5
    assert (options.batch_size, options.amp, options.sampling_params.do_sample) == (2, "f32", True)
    with pytest.raises(ConfigurationError, match="sek_len: not an option"):
        made(sek_len=64)
    fused = FusedSpecNeuronConfig(object, draft_config=object(), draft_model_path=str(folder))
    assert InferenceConfig(options, fused_spec_config=fused).draft_model_path == str(folder)
    fields = {"seq_len": 64, "batch_size": 2, "torch_dtype": "float32"}
    assert InferenceConfig(fields, fused, load_config=print).draft_model_path == str(folder)

    class TheirGQA(Enum):
        SHARD_OVER_HEADS = "shard-over-heads"

    assert made(seq_len=64, group_query_attention=TheirGQA.SHARD_OVER_HEADS).group_query_attention == "shard-over-heads"


def test_positions_and_slots_of_nxd_are_read(folder: Path) -> None:
    application = DecoderApplication(folder, read(batch_size=2), backend="eager")
    assert not application.is_loaded_to_neuron and not application.is_compiled
    application.load()
    assert application.is_loaded_to_neuron and not application.is_compiled
    slots = torch.tensor([1, 0])
    ids, mask = torch.tensor([TEXT[:3], [0, *TEXT[:2]]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    places, parameters = torch.tensor([[0, 1, 2], [1, 0, 1]]), torch.tensor([[1.0, 1.0, 1.0]] * 2)
    for _ in range(2):  # position 0 begins anew
        check(application.forward(ids, mask, places, slots, parameters), [2, 1])
    check(application(torch.tensor([[TEXT[3]], [TEXT[2]]]), None, torch.tensor([[3], [2]]), slots), [3, 2])
    with pytest.raises(ConfigurationError, match=r"position_ids: expected \[\[3\], \[4\]\] or positions from 0"):
        application(torch.tensor([[1], [1]]), None, torch.tensor([[9], [9]]), slots)
    with pytest.raises(ConfigurationError, match="seq_ids: expected each of the slots 0 to 1, got"):
        application(torch.tensor([[1], [1]]), seq_ids=torch.tensor([3, 3]))
    adapter = HuggingFaceGenerationAdapter(application)
    adapter.reset_generation()
    asked = {"attention_mask": torch.ones(1, 4), "max_new_tokens": 8, "pad_token_id": 0}
    plain = load(folder).sample([TEXT], max_new_tokens=8, top_p_min_tokens=1)
    assert torch.equal(adapter.generate(torch.tensor([TEXT]), **asked), plain)
    with pytest.raises(SamplingError, match="top_p_min_tokens: expected 1"):
        application.decoder.sample([TEXT], max_new_tokens=8, top_p_min_tokens=2)
    assert SpeculativeGenerator("ngram", application.decoder, 3).config.k == 3
    application.close()
