"""Which of transformers' tests of generation run here, and why each other one does not.

Names are without ``test_``, by class. No tests in here.
"""

from __future__ import annotations

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

LEFT_OUT: dict[str, dict[str, str]] = {
    "how transformers drafts, in whose place our engine does": {
        "GenerationTesterMixin": "prompt_lookup_decoding_stops_at_eos",
        "UtilsFunctionsTest": """
            speculative_sampling speculative_sampling_ensemble_fallback_distribution_finite_and_normalized
            speculative_sampling_ensemble_numerical_stability_near_zero_residual
            speculative_sampling_ensemble_weight_increases_acceptance
            speculative_sampling_ensemble_weight_none_equals_standard speculative_sampling_target_distribution
        """,
        "GenerationIntegrationTests": "prompt_lookup_decoding_no_eos_token",
        "TestAssistedCandidateGeneratorDifferentTokenizers": """
            complete_overlap no_intersection no_new_tokens partial_overlap
        """,
        "TestAssistedCandidateGeneratorUpdateStrategy": """
            update_candidate_strategy_no_matches_short_0 update_candidate_strategy_no_matches_short_1
            update_candidate_strategy_with_matches_1_0 update_candidate_strategy_with_matches_1_1
            update_candidate_strategy_with_matches_2_0 update_candidate_strategy_with_matches_2_1
            update_candidate_strategy_with_matches_3_0 update_candidate_strategy_with_matches_3_1
            update_candidate_strategy_with_matches_4_0 update_candidate_strategy_with_matches_4_1
            update_candidate_strategy_with_mix_matches_3_0 update_candidate_strategy_with_mix_matches_3_1
        """,
        "TestAssistantToTargetTranslator": """
            get_assistant_to_target_input_ids get_suppress_input_ids get_target_ids get_target_logits
        """,
        "TestAssistantVocabTranslatorCache": """
            cache_with_weakref_key different_instances_for_different_tokenizers same_instance_for_same_tokenizers
            weakref_cache_cleanup
        """,
        "TestUniversalSpeculativeDecoding": """
            basic_generation device_consistency mismatched_vocabularies speculation_depth usd_vs_vanilla_sampling
        """,
    },
    "no model is in it: it looks at classes of transformers, which the adapter uses as they are": {
        "StoppingCriteriaTestCase": """
            confidence_criteria criteria_per_row criteria_per_row_batched eos_token_criteria list_criteria
            max_length_criteria max_time_criteria single_letter_stop_string stop_string_criteria
            stop_string_criteria_byte_fallback_fragments stop_string_criteria_byte_fragment_compile
            stop_string_criteria_byte_fragments stop_string_criteria_byte_level_ascii
            stop_string_criteria_non_byte_level_tokenizer stop_string_criteria_vocab_size_mismatch
            stop_string_embedding_vecs stop_string_matching_mode_helpers stop_string_matching_positions
            validate_stopping_criteria
        """,
        "LogitsProcessorTest": """
            bias_dist_processor classifier_free_guidance dia_channel_filter dia_classifier_free_guidance
            dia_delay_pattern early_stop_processor early_stop_processor_multi_eos
            encoder_no_repeat_ngram_dist_processor encoder_repetition_penalty_dist_process epsilon_dist_warper
            eta_dist_warper exponential_decay_length_penalty forced_bos_token_logits_processor
            forced_eos_token_logits_processor min_length_dist_processor min_p_dist_warper
            new_min_length_dist_processor_0 new_min_length_dist_processor_1 no_bad_words_dist_processor
            no_repeat_ngram_dist_processor normalization prefix_constrained_logits_processor processor_list
            remove_nan_inf_logits_processor repetition_penalty_dist_process
            repetition_penalty_dist_process_exclusion_no_new_input_ids
            repetition_penalty_dist_process_exclusion_with_new_input_ids synthidtext_watermark_processor_bias_test_0
            synthidtext_watermark_processor_bias_test_1 synthidtext_watermark_processor_bias_test_2
            synthidtext_watermark_processor_bias_uniformity_across_vocab_0
            synthidtext_watermark_processor_bias_uniformity_across_vocab_1
            synthidtext_watermark_processor_distributional_convergence_0
            synthidtext_watermark_processor_distributional_convergence_1
            synthidtext_watermark_processor_distributional_convergence_2
            synthidtext_watermark_processor_distributional_convergence_3
            synthidtext_watermarking_processor_bias_uniformity_0 synthidtext_watermarking_processor_bias_uniformity_1
            temperature_dist_warper top_h_dist_warper top_k_dist_warper top_p_dist_warper typical_dist_warper
            watermarking_processor
        """,
        "GenerationConfigTest": """
            assistant_ensemble_weight_default_and_round_trip from_model_config generation_mode kwarg_init
            refuse_to_save save_load_config_0 save_load_config_1_foo_json static_cache_without_cache_config update
            validate validate_assistant_ensemble_weight validate_sampling_flag_provenance
        """,
        "GenerationConfigSerializationTest": """
            serialize_generation_bad_words_ids serialize_generation_begin_suppress_tokens
            serialize_generation_bos_token_id serialize_generation_encoder_ngram_size
            serialize_generation_encoder_repetition_penalty serialize_generation_eos_token_id
            serialize_generation_epsilon_cutoff serialize_generation_eta_cutoff
            serialize_generation_exponential_decay_length_penalty serialize_generation_guidance_scale
            serialize_generation_guidance_scale_unbatched serialize_generation_min_length_eos_token
            serialize_generation_min_new_tokens serialize_generation_min_p serialize_generation_ngram_size
            serialize_generation_num_beams serialize_generation_repetition_penalty serialize_generation_sequence_bias
            serialize_generation_suppress_tokens serialize_generation_temperature serialize_generation_top_k
            serialize_generation_top_p serialize_generation_typical_p serialize_generation_watermarking_config
        """,
        "ConfigPushToHubTester": """
            push_to_hub push_to_hub_in_organization push_to_hub_in_organization_via_save_pretrained
            push_to_hub_on_pr_revision push_to_hub_via_save_pretrained
        """,
    },
    "generate_batch is refused: a paged cache of transformers": {
        "ContinuousBatchingNoAcceleratorTest": """
            attention_mask_0 attention_mask_1 attention_mask_2 attention_mask_3 attention_mask_4 attention_mask_5
            continuous_batching_config_disables_nccl_graph_mixing continuous_batching_no_accelerators
            continuous_batching_will_allocation_be_successful_0 continuous_batching_will_allocation_be_successful_1
            continuous_batching_will_allocation_be_successful_2 continuous_batching_will_allocation_be_successful_3
            continuous_batching_will_allocation_be_successful_4 continuous_batching_will_allocation_be_successful_5
            continuous_batching_will_allocation_be_successful_6 continuous_batching_will_allocation_be_successful_7
            continuous_batching_will_allocation_be_successful_8 continuous_batching_will_allocation_be_successful_9
            distributed_helper_no_dist distributed_helper_set_tp_seed_no_dist full_attention_get_indices_0
            full_attention_get_indices_1 full_attention_get_indices_2 full_attention_get_indices_3
            full_attention_get_indices_4 full_attention_get_indices_5 full_attention_get_indices_6
            full_attention_get_indices_7 generation_outputs_are_snapshots group_layers_0 group_layers_1
            group_layers_2_f group_layers_3_ffff group_layers_4_sssss group_layers_5_fs group_layers_6_ssfssf
            group_layers_7_ssssf group_layers_8_fffsffs output_router_deliver_to_handler
            output_router_deliver_to_queue sliding_attention_get_indices_0 sliding_attention_get_indices_1
            sliding_attention_get_indices_2 sliding_attention_get_indices_3 sliding_attention_get_indices_4
            sliding_attention_get_indices_5 sliding_attention_get_indices_6 sliding_attention_get_indices_7
            sliding_attention_get_indices_8 streaming_output_after_soft_reset_does_not_shorten_generation
        """,
        "ContinuousBatchingWithAcceleratorTest": """
            block_sharing_with_hybrid_model continuous_batching_async_0_sdpa continuous_batching_async_1_sdpa
            continuous_batching_async_2_flash_attention_2 continuous_batching_async_3_flash_attention_2
            continuous_batching_async_4_flash_attention_2 continuous_batching_async_5_flash_attention_2
            continuous_batching_async_6_flash_attention_3 continuous_batching_async_7_flash_attention_3
            continuous_batching_config_combinations_no_compile_00
            continuous_batching_config_combinations_no_compile_01
            continuous_batching_config_combinations_no_compile_02
            continuous_batching_config_combinations_no_compile_03
            continuous_batching_config_combinations_no_compile_04
            continuous_batching_config_combinations_no_compile_05
            continuous_batching_config_combinations_no_compile_06
            continuous_batching_config_combinations_no_compile_07
            continuous_batching_config_combinations_no_compile_08
            continuous_batching_config_combinations_no_compile_09
            continuous_batching_config_combinations_no_compile_10
            continuous_batching_config_combinations_no_compile_11
            continuous_batching_config_combinations_with_compile_0_eager
            continuous_batching_config_combinations_with_compile_1_sdpa
            continuous_batching_config_combinations_with_compile_2_sdpa
            continuous_batching_config_combinations_with_compile_3_flash_attention_2
            continuous_batching_diverse_models_0_google_gemma_2_2b_it
            continuous_batching_diverse_models_1_google_gemma_2_2b_it
            continuous_batching_diverse_models_2_google_gemma_2_2b_it
            continuous_batching_diverse_models_3_google_gemma_2_2b_it continuous_batching_fast
            continuous_batching_few_blocks continuous_batching_log_probs_0 continuous_batching_log_probs_1
            continuous_batching_log_probs_2 continuous_batching_log_probs_3 continuous_batching_long_generate
            continuous_batching_tuple_cuda_graph_0 continuous_batching_tuple_cuda_graph_1
            cpu_offloading_disabled_when_zero cpu_offloading_parity cpu_offloading_parity_async
            decode_fast_path_wide_batch_parity flash_attn_with_kvcache_parity_0 flash_attn_with_kvcache_parity_1
            flash_attn_with_kvcache_parity_2 flash_attn_with_kvcache_parity_3
            memory_footprint_respects_max_memory_percent non_streaming_request num_return_sequences_0
            num_return_sequences_1 per_request_logits_processors_0 per_request_logits_processors_1
            per_request_logits_processors_2 per_request_logits_processors_3 prefix_sharing register_result_handler
            streaming_and_non_streaming_requests_can_alternate streaming_request
        """,
        "TestMemoryHandlerPrediction": """
            memory_prediction_0 memory_prediction_1 memory_prediction_2 memory_prediction_3 memory_prediction_4
        """,
        "ContinuousBatchingTensorParallelTest": """
            continuous_batching_tp_cancellation continuous_batching_tp_cancellation_realistic
            continuous_batching_tp_fast continuous_batching_tp_greedy continuous_batching_tp_with_cuda_graph
            continuous_batching_tp_with_cuda_graph_and_async continuous_batching_tp_with_sampling
        """,
        "TestBatchGeneration": """
            generate_batch_consistency_0_paged_eager generate_batch_consistency_1_paged_sdpa
            generate_batch_consistency_2_paged_flash_attention_2 generate_batch_consistency_3_paged_flex_attention
            generate_batch_with_sampling_0_paged_eager generate_batch_with_sampling_1_paged_sdpa
            generate_batch_with_sampling_2_paged_flash_attention_2 generate_batch_with_sampling_3_paged_flex_attention
        """,
    },
    "attention kernels of transformers, which no decoder here uses": {
        "GenerationTesterMixin": """
            custom_4d_attention_mask eager_matches_fa2_generate eager_matches_fa3_generate eager_matches_fa4_generate
            eager_matches_sdpa_generate eager_padding_matches_padding_free_with_position_ids
            flash_attention_2_continue_generate_with_position_ids
            flash_attention_2_padding_matches_padding_free_with_position_ids
            flash_attention_2_padding_matches_padding_free_with_position_ids_and_fa_kwargs
            flash_attention_3_padding_matches_padding_free_with_position_ids
            flash_attention_3_padding_matches_padding_free_with_position_ids_and_fa_kwargs
            flash_attention_4_padding_matches_padding_free_with_position_ids
            flash_attention_4_padding_matches_padding_free_with_position_ids_and_fa_kwargs
            sdpa_padding_matches_padding_free_with_position_ids
        """,
        "FlashAttentionParityTest": "flash_attention_parity",
    },
    "an export of a network of transformers, which a decoder is not": {
        "GenerationTesterMixin": """
            executorch_export_dynamic executorch_export_generate_dynamic executorch_export_generate_static
            executorch_export_static onnx_export_dynamic onnx_export_generate_dynamic onnx_export_generate_static
            onnx_export_static torch_export_dynamic torch_export_generate_dynamic torch_export_generate_static
            torch_export_static
        """,
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
        "GenerationTesterMixin": """
            generate_continue_from_inputs_embeds generate_from_inputs_embeds generate_from_inputs_embeds_0_greedy
            generate_from_inputs_embeds_1_beam_search generate_from_inputs_embeds_with_static_cache
            generate_from_random_inputs_embeds
        """,
        "GenerationIntegrationTests": """
            generate_inputs_embeds_one_token inputs_embeds_warn_without_ids_for_token_based_logit_processors
            max_length_if_input_embeds min_length_if_input_embeds
        """,
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
        "GenerationIntegrationTests": """
            custom_generate_bad_requirements custom_generate_callable custom_generate_from_argument_in_generate
            custom_generate_from_model_repo_with_custom_generate_code custom_generate_local_directory
            custom_generate_local_directory_requires_trust_remote_code custom_generate_requires_trust_remote_code
            hub_gen_strategies hub_gen_strategies_0_transformers_community_dola
            hub_gen_strategies_1_transformers_community_contrastive_search
            hub_gen_strategies_2_transformers_community_group_beam_search
            hub_gen_strategies_3_transformers_community_constrained_beam_search
        """,
    },
    "token_healing is refused": {
        "TokenHealingTestCase": """
            prompts_0_url prompts_1_aggressive_healing prompts_2_trailing_whitespace prompts_3_nothing_to_heal
            prompts_4_single_token prompts_5_empty_prompt
        """,
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
"""By reason."""
