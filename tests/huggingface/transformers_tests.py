"""Tests of generation in transformers that run over Paceline, and why each other one does not.

Names are without ``test_``, by class; a ``*`` stands for any letters. Contains no tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

RUN: dict[str, str] = {
    "GenerationTesterMixin": """
        assisted_decoding_matches_greedy_search_0_random assisted_decoding_matches_greedy_search_1_same
        assisted_decoding_sample beam_sample_generate beam_sample_generate_dict_output beam_search_generate
        beam_search_generate_dict_output beam_search_generate_dict_outputs_use_cache forward_with_logits_to_keep
        generate_continue_from_past_key_values generate_methods_with_logits_to_keep generate_without_input_ids
        greedy_generate greedy_generate_dict_outputs greedy_generate_dict_outputs_use_cache inherits_generation_mixin
        left_padding_compatibility past_key_values_format prepare_inputs_for_generation_kwargs_forwards
        prompt_lookup_decoding_matches_greedy_search sample_generate sample_generate_dict_output
    """,
    "GenerationIntegrationTests": """
        assisted_decoding_num_assistant_tokens_heuristic_transient_schedule compare_unprocessed_logit_scores
        eos_token_id_int_and_list_top_k_top_sampling generate_input_ids_as_kwarg generate_inputs_and_encoder_kwargs
        generated_length_assisted_generation generation_config_defaults generation_config_deprecation
        length_warning_assisted_generation logits_processor_not_inplace return_unprocessed_logit_scores
        special_tokens_fall_back_to_model_default
        speculative_decoding_equals_regular_decoding transition_scores_beam_search_decoder_only
    """,
    "StreamerTester": """
        iterator_streamer_matches_non_streaming iterator_streamer_timeout text_streamer_decode_kwargs
        text_streamer_matches_non_streaming text_streamer_skip_prompt
    """,
    "AsyncStreamerTester": "async_iterator_streamer_matches_non_streaming async_iterator_streamer_timeout",
}

LEFT_OUT: dict[str, dict[str, str | int]] = {
    "how transformers drafts, in whose place our engine does": {
        "GenerationTesterMixin": "prompt_lookup_decoding_stops_at_eos",
        "UtilsFunctionsTest": 6,
        "GenerationIntegrationTests": "prompt_lookup_decoding_no_eos_token",
        "TestAssistedCandidateGeneratorDifferentTokenizers": 4,
        "TestAssistedCandidateGeneratorUpdateStrategy": 12,
        "TestAssistantToTargetTranslator": 4,
        "TestAssistantVocabTranslatorCache": 4,
        "TestUniversalSpeculativeDecoding": 5,
    },
    "no model is in it: it looks at classes of transformers, which the adapter uses as they are": {
        "StoppingCriteriaTestCase": 19,
        "LogitsProcessorTest": 44,
        "GenerationConfigTest": 12,
        "GenerationConfigSerializationTest": 24,
        "ConfigPushToHubTester": 5,
    },
    "generate_batch is refused: a paged cache of transformers": {
        "ContinuousBatchingNoAcceleratorTest": 50,
        "ContinuousBatchingWithAcceleratorTest": 58,
        "TestMemoryHandlerPrediction": 5,
        "ContinuousBatchingTensorParallelTest": 7,
        "TestBatchGeneration": 8,
    },
    "attention kernels of transformers, which no decoder here uses": {
        "GenerationTesterMixin": """
            custom_4d_attention_mask eager_matches_* eager_padding_matches_* flash_attention_* sdpa_padding_matches_*
        """,
        "FlashAttentionParityTest": 1,
    },
    "an export of a network of transformers, which a decoder is not": {
        "GenerationTesterMixin": "executorch_export_* onnx_export_* torch_export_*",
    },
    "PyTorch's compiler behind transformers' own cache": {
        "GenerationTesterMixin": "generate_compilation_all_outputs generate_compile_model_forward_fullgraph",
        "GenerationIntegrationTests": "cpu_offload_doesnt_compile",
    },
    "a cache of transformers (static, quantized, dynamic) is refused: the slots are the cache": {
        "GenerationTesterMixin": "generate_with_quant_cache generate_with_static_cache",
        "GenerationIntegrationTests": """
            generate_with_static_cache_multi_accelerator init_static_cache_multi_accelerator
            prepare_inputs_for_generation_decoder_llm
        """,
    },
    "inputs_embeds is refused: graphs read token ids": {
        "GenerationTesterMixin": "generate_*inputs_embeds*",
        "GenerationIntegrationTests": "generate_inputs_embeds_* inputs_embeds_warn_* m??_length_if_input_embeds",
        "TokenHealingTestCase": "generate_from_inputs_embeds_with_bos_token_id_is_none",
    },
    "position_ids are refused: they follow from attention_mask": {
        "GenerationTesterMixin": "generate_with_and_without_position_ids",
    },
    "parts of a network that a decoder has not: layers that draft, an early exit": {
        "GenerationTesterMixin": "generate_with_mtp",
        "GenerationIntegrationTests": "assisted_generation_early_exit",
    },
    "device maps and several accelerators of transformers": {
        "GenerationTesterMixin": "model_parallel_beam_search",
        "GenerationIntegrationTests": """
            assisted_decoding_in_different_accelerator assisted_decoding_model_in_accelerator_assistant_in_cpu
            cache_device_map_with_vision_layer_device_map generate_multi_accelerator_causal_mask
            generate_with_inputs_on_cpu
        """,
    },
    "custom_generate is refused: a loop of somebody else's": {
        "GenerationIntegrationTests": "custom_generate_* hub_gen_strategies*",
    },
    "token_healing is refused": {
        "TokenHealingTestCase": "prompts_*",
    },
    "classifier-free guidance is refused": {
        "GenerationIntegrationTests": "cfg_mixin",
    },
    "expects what a published model says, and that model is not here": {
        "GenerationIntegrationTests": """
            TopH_example_integration beam_search_advanced_stopping_criteria beam_search_early_stop_heuristic
            eos_token_id_int_and_list_greedy_search model_generation_config_can_override_defaults
            per_row_stopping_criteria synthid_text_watermark_generation_mean_expected_bias
            transition_scores_greedy_search transition_scores_greedy_search_normalized
        """,
    },
    "encoders, images or speech": {
        "GenerationIntegrationTests": """
            batched_decoder_start_id beam_search_example_integration custom_logits_processor custom_stopping_criteria
            custom_stopping_criteria_overload_error decoder_start_id_from_config
            encoder_decoder_generate_attention_mask generate_input_ids_as_encoder_kwarg
            generate_input_values_as_encoder_kwarg generate_non_nlp_input_ids_as_kwarg
            generate_too_many_encoder_kwargs generate_vision2text_conditioning
            load_generation_config_from_text_subconfig model_kwarg_encoder_signature_filtering
            prepare_inputs_for_generation_encoder_decoder_llm stop_sequence_stopping_criteria
            transition_scores_beam_search_encoder_decoder transition_scores_beam_search_encoder_decoder_with_eos
            transition_scores_early_stopping validate_assistant validate_generation_inputs
        """,
    },
    "the schedule of drafts is k='auto', which writes nothing into a configuration": {
        "GenerationIntegrationTests": "assisted_decoding_num_assistant_tokens_heuristic_schedule",
    },
    "needs torchvision: unittest's assertWarns looks at every module of transformers": {
        "GenerationIntegrationTests": "default_max_length_warning",
    },
    "goes on from the cache of a call before the last one, whose slots the last one has": {
        "GenerationIntegrationTests": "generate_can_restart_from_cache_and_new_tokens_only",
    },
    "transformers 5.14 fails it, whatever the model": {
        "GenerationIntegrationTests": "green_red_watermark_generation",
    },
    "token types, which no decoder here has": {
        "GenerationIntegrationTests": "model_kwarg_assisted_decoding_decoder_only",
    },
}
"""By reason; a number: a whole class with so many tests."""


def run_here() -> list[str]:
    """``Class.test_name`` of each."""
    return list(_names(RUN))


def is_left_out(name: str) -> bool:
    """Whether ``Class.test_name`` is of those of `LEFT_OUT`, without whole classes."""
    return any(fnmatchcase(name, pattern) for tests in LEFT_OUT.values() for pattern in _names(tests))


def whole_classes() -> dict[str, int]:
    """Classes of which nothing runs, with the number of their tests."""
    return {kind: words for tests in LEFT_OUT.values() for kind, words in tests.items() if isinstance(words, int)}


def _names(tests: Mapping[str, str | int]) -> Iterator[str]:
    for kind, words in tests.items():
        yield from (f"{kind}.test_{word}" for word in (words.split() if isinstance(words, str) else ()))
