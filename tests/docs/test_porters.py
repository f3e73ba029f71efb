"""Examples of AWS's two guides: each line runs on Paceline, or its names have a row in a page.

Facts of the developer guides of transformers-neuronx (archive of SDK 2.25) and NxD Inference (SDK 2.31): calls, names
and values of options, with a tiny model for theirs.
"""

from __future__ import annotations

import copy
import re
from dataclasses import FrozenInstanceError
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig
from transformers.generation.stopping_criteria import MaxTimeCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import paceline
from paceline import AutoDecoder, DecoderApplication, HuggingFaceGenerationAdapter, NeuronConfig, SpeculativeGenerator
from paceline import neuron_config as readers
from paceline.core.errors import ConfigurationError
from tests.docs.pages import text

TRANSFORMERS_NEURONX = """
    NeuronAutoModelForCausalLM LlamaForSampling from_pretrained to_neuron sample sequence_length top_k start_ids
    cache_ids streamer stopping_criteria_list eos_token_override no_repeat_ngram_size HuggingFaceGenerationModelAdapter
    reset_generation NeuronConfig quant_dtype dequant_dtype GQA group_query_attention on_device_generation
    on_device_embedding save_pretrained_split save load context_length_estimate n_positions batch_size tp_degree amp
    enable_speculative_decoder SpeculativeGenerator DraftProvider TokenAcceptor FusedSpeculativeDecoder
    EagleSpeculativeDecoder enable_token_tree_decoder TreeSpeculativeGenerator continuous_batching top_p_min_tokens
    BloomForSampling GPT2ForSamplingWithContextBroadcasting MistralForSampling QuantizationConfig prompt_batch_size
    GenerationConfig update_generation_config per_batch_line cpu_compile sharded_weights neuron_config Layout
    compilation_worker_count NEURON_RANK_ID NEURON_LOCAL_TP NEURON_PP_STAGES CPU_COMM_ID NEURON_RT_ROOT_COMM_ID
"""
NXD_INFERENCE = """
    compile load load_pretrained_config OnDeviceSamplingConfig FusedSpecNeuronConfig InferenceConfig NeuronConfig
    HuggingFaceGenerationAdapter prepare_sampling_params seq_len max_context_length torch_dtype speculation_length
    enable_fused_speculation enable_eagle_speculation is_compiled is_loaded_to_neuron position_ids seq_ids
    sampling_params enable_bucketing token_generation_buckets context_encoding_buckets quantized quantization_dtype
    quantization_type save_quantized_state_dict quantized_checkpoints_path is_continuous_batching ctx_batch_size
    tkg_batch_size logical_nc_config flash_decoding_enabled async_mode is_prefix_caching token_tree_config
    medusa_speculation_length num_medusa_heads lora_config draft_model_path reset NeuronLlamaForCausalLM
    LlamaInferenceConfig get_config_cls fused_spec_config get_generate_outputs LoraServingConfig
"""


@pytest.mark.parametrize("name", sorted({*TRANSFORMERS_NEURONX.split(), *NXD_INFERENCE.split()}))
def test_a_name_of_a_guide_works_or_has_a_row(name: str) -> None:
    tables = readers.key_tables()
    keys = {*tables.without_effect, *tables.refused, *tables.quant, *tables.choices, *tables.values}
    owners = (paceline, readers, DecoderApplication, SpeculativeGenerator, AutoDecoder)
    pages = "".join(text(f"docs/{page}.md") for page in ("migration", "configuration"))
    assert name in keys or any(hasattr(one, name) for one in owners) or re.search(rf"\b{name}\b", pages)


class GQA(Enum):
    """Members that the guide gives, with their values (transformers_neuronx/constants.py)."""

    SHARD_OVER_HEADS = "shard-over-heads"


class Layout(Enum):
    BSH = "BSH"


OPTIONS = """
NeuronConfig(on_device_embedding=True)
NeuronConfig(compilation_worker_count=1)
NeuronConfig(group_query_attention=GQA.SHARD_OVER_HEADS)
NeuronConfig(quant={"quant_dtype": "s8", "dequant_dtype": "bf16"})
NeuronConfig(on_device_generation={"max_length": 128, "top_k": 10, "top_p": 0.9, "top_p_min_tokens": 1, \
"temperature": 0.9, "do_sample": True})
NeuronConfig(padding_side="right", attention_layout=Layout.BSH, collectives_layout="BSH", on_device_embedding=True)
NeuronConfig(is_eagle_draft=True, has_pre_attention_norm=False, padding_side="right")
NeuronConfig(is_eagle_target=True, padding_side="right")
NeuronConfig(fuse_qkv=True)
NeuronConfig(attention_layout="BSH")
NeuronConfig(shard_over_sequence=True)
NeuronConfig(shard_over_sequence=True, duplicate_q_weight_sos=True)
NeuronConfig()
NeuronConfig(logical_nc_config=2)
NeuronConfig(sequence_parallel_enabled=True)
NeuronConfig(batch_size=2)
NeuronConfig(batch_size=1, tp_degree=8, seq_len=128)
NeuronConfig(on_device_sampling_config=OnDeviceSamplingConfig(global_topk=256))
NeuronConfig(on_device_sampling_config=OnDeviceSamplingConfig(dynamic=True))
NeuronConfig(on_device_sampling_config=OnDeviceSamplingConfig(top_k=5))
NeuronConfig(fused_qkv=True)
NeuronConfig(enable_bucketing=True)
NeuronConfig(enable_bucketing=True, context_encoding_buckets=[1024, 2048, 4096], token_generation_buckets=[8192])
NeuronConfig(quantized=True, quantized_checkpoints_path="path/to/int8", quantization_dtype="int8", \
quantization_type="per_tensor_symmetric")
NeuronConfig(kv_cache_quant=True)
NeuronConfig(speculation_length=5, trace_tokengen_model=False)
NeuronConfig(is_medusa=True, medusa_speculation_length=64, num_medusa_heads=4, medusa_tree=[[0], [0, 0]])
NeuronConfig(batch_size=1, enable_eagle_speculation=True, enable_fused_speculation=True, max_context_length=1024, \
max_length=1024, on_device_sampling_config=OnDeviceSamplingConfig(temperature=0.7, top_k=50, top_p=1.0), \
seq_len=1024, speculation_length=5, tp_degree=32, trace_tokengen_model=False)
NeuronConfig(is_prefix_caching=True, is_block_kv_layout=True, pa_num_blocks=1024, pa_block_size=32)
NeuronConfig(enable_bucketing=True, context_encoding_buckets=[512, 1024, 2048], prefix_buckets=[512, 1024], \
token_generation_buckets=[2048])
copy.deepcopy(NeuronConfig(speculation_length=5))
"""


@pytest.mark.parametrize("line", OPTIONS.strip().splitlines())
def test_a_configuration_of_a_guide_is_read(line: str) -> None:
    names = {"NeuronConfig": NeuronConfig, "GQA": GQA, "Layout": Layout, "copy": copy}
    assert isinstance(eval(line, {**names, "OnDeviceSamplingConfig": readers.OnDeviceSamplingConfig}), NeuronConfig)


class Recorder(BaseStreamer):
    """A streamer of one's own, as the guide writes it."""

    def __init__(self) -> None:
        self.tokens: list[Any] = []

    def put(self, value: Any) -> None:
        self.tokens.append(value)

    def end(self) -> None:
        self.tokens.append(None)


DECODING = """
config = AutoConfig.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)
tokenizer.pad_token_id = tokenizer.eos_token_id
tokenizer.padding_side = 'left'
encoded_input = tokenizer(text, return_tensors='pt')
with torch.inference_mode():
    generated_sequence = model.sample(encoded_input.input_ids, sequence_length=32)
    generated_sequence = model.sample(encoded_input.input_ids, sequence_length=32, top_k=10)
    model.sample(encoded_input.input_ids, sequence_length=32, streamer=streamer)
    model.sample(input_ids=encoded_input.input_ids, sequence_length=32, \
stopping_criteria_list=StoppingCriteriaList([MaxTimeCriteria(1e6)]), streamer=streamer)
print([tokenizer.decode(tok) for tok in generated_sequence])
response = fsd.sample(input_ids=encoded_input.input_ids, attention_mask=encoded_input.attention_mask, \
sequence_length=30)
print(tokenizer.decode(response[0]))
model = HuggingFaceGenerationAdapter(model)
encoded_input = tokenizer(text, return_tensors='pt', padding=True)
with torch.inference_mode():
    model.reset_generation()
    generated_sequence = model.generate(input_ids=encoded_input.input_ids, \
attention_mask=encoded_input.attention_mask, do_sample=True, max_length=32, temperature=0.7)
"""

APPLICATION = """
tokenizer = AutoTokenizer.from_pretrained(path, padding_side='left')
tokenizer.pad_token_id = tokenizer.eos_token_id
generation_config = GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))
generation_config.max_length = 64
generation_config.pad_token_id = tokenizer.eos_token_id
inputs = tokenizer(prompts, padding=True, return_tensors='pt')
generation_model = HuggingFaceGenerationAdapter(model)
outputs = generation_model.generate(inputs.input_ids, generation_config=generation_config, \
attention_mask=inputs.attention_mask, max_length=32)
output_tokens = tokenizer.batch_decode(outputs, skip_special_tokens=True, clean_up_tokenization_spaces=False)
sampling_params = torch.tensor([[50, 0.5, 0.75], [5, 1.0, 1.0]])
model.forward(torch.tensor([[3, 4], [5, 6]]), position_ids=torch.tensor([[0, 1], [0, 1]]), \
seq_ids=torch.tensor([0, 1]), sampling_params=sampling_params)
model.reset()
"""


@pytest.fixture
def names(home: Path) -> dict[str, Any]:
    """Names that a guide's example has before its first line."""
    given = {one.__name__: one for one in (AutoConfig, AutoTokenizer, GenerationConfig, HuggingFaceGenerationAdapter)}
    given |= {"StoppingCriteriaList": StoppingCriteriaList, "MaxTimeCriteria": MaxTimeCriteria, "torch": torch}
    return given | {"path": str(home / "target"), "text": "def main(argv", "prompts": ["def main(", "return"]}


def test_the_decoding_examples_of_transformers_neuronx_run(home: Path, names: dict[str, Any]) -> None:
    options: dict[str, Any] = {"batch_size": 1, "n_positions": [32, 64], "context_length_estimate": [16, 32]}
    draft, target = (
        AutoDecoder.from_pretrained(home / role, amp="f32", tp_degree=1, backend="eager", **options)
        for role in ("draft", "target")
    )
    streamer = Recorder()
    names |= {"model": target, "fsd": SpeculativeGenerator(draft, target, k=3), "streamer": streamer}
    exec(DECODING, names)
    assert streamer.tokens.count(None) == 2 and names["generated_sequence"].shape[1] <= 32
    assert names["response"].shape == (1, 30)


def test_the_application_examples_of_nxd_inference_run(home: Path, names: dict[str, Any], tmp_path: Path) -> None:
    config: Any = NeuronConfig
    config = readers.InferenceConfig(config(batch_size=2, seq_len=64, max_context_length=32, torch_dtype="float32"))
    model = DecoderApplication(home / "target", config, backend="eager")
    model.compile(tmp_path)
    model.load(tmp_path)
    assert model.is_compiled and model.is_loaded_to_neuron
    exec(APPLICATION, names | {"model": model})
    with pytest.raises(FrozenInstanceError):  # "assignments" in the page of migration
        config.k = 4
    with pytest.raises(ConfigurationError, match="lora_config"):
        NeuronConfig.from_neuron_config({"lora_config": SimpleNamespace(max_loras=2)})
