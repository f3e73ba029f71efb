"""Names in the examples of AWS's two guides: each works in Paceline, or a page says what takes its place.

Facts of the developer guides of transformers-neuronx (archive of SDK 2.25) and NxD Inference (SDK 2.31), as names.
"""

from __future__ import annotations

import re

import pytest

import paceline
from paceline import neuron_config
from tests.docs.pages import text

TRANSFORMERS_NEURONX = """
    NeuronAutoModelForCausalLM LlamaForSampling from_pretrained to_neuron sample sequence_length top_k start_ids
    cache_ids streamer stopping_criteria_list eos_token_override no_repeat_ngram_size HuggingFaceGenerationModelAdapter
    reset_generation NeuronConfig quant_dtype dequant_dtype GQA group_query_attention on_device_generation
    on_device_embedding save_pretrained_split save load context_length_estimate n_positions batch_size tp_degree amp
    enable_speculative_decoder SpeculativeGenerator DraftProvider TokenAcceptor FusedSpeculativeDecoder
    EagleSpeculativeDecoder enable_token_tree_decoder TreeSpeculativeGenerator continuous_batching top_p_min_tokens
"""
NXD_INFERENCE = """
    compile load load_pretrained_config OnDeviceSamplingConfig FusedSpecNeuronConfig InferenceConfig NeuronConfig
    HuggingFaceGenerationAdapter prepare_sampling_params seq_len max_context_length torch_dtype speculation_length
    enable_fused_speculation enable_eagle_speculation is_compiled is_loaded_to_neuron position_ids seq_ids
    sampling_params enable_bucketing token_generation_buckets context_encoding_buckets quantized quantization_dtype
    quantization_type save_quantized_state_dict quantized_checkpoints_path is_continuous_batching ctx_batch_size
    tkg_batch_size logical_nc_config flash_decoding_enabled async_mode is_prefix_caching token_tree_config
    medusa_speculation_length num_medusa_heads lora_config draft_model_path reset
"""


@pytest.mark.parametrize("name", sorted({*TRANSFORMERS_NEURONX.split(), *NXD_INFERENCE.split()}))
def test_a_name_of_a_guide_works_or_has_a_row(name: str) -> None:
    tables = neuron_config.key_tables()
    keys = {*tables.without_effect, *tables.refused, *tables.quant, *tables.choices, *tables.values}
    owners = (paceline, neuron_config, paceline.DecoderApplication, paceline.SpeculativeGenerator, paceline.AutoDecoder)
    pages = "".join(text(f"docs/{page}.md") for page in ("migration", "configuration"))
    assert name in keys or any(hasattr(one, name) for one in owners) or re.search(rf"\b{name}\b", pages)
