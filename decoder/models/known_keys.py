"""Keys of config.json: which every family reads, which say nothing about the numbers, and which must have one value.

A key that changes what a model computes, and that its family does not read, would be lost without a word. So every key
is read, or in a table here, or named in a warning: published files have keys that nobody could list. Not here: what
keys mean (`paceline.decoder.models.config`, `paceline.decoder.models.reading` and the families).
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.json_fields import Fields

STANDARD = frozenset(
    {
        "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act",
        "tie_word_embeddings", "eos_token_id", "pad_token_id", "bos_token_id", "rope_theta", "rope_scaling",
        "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings", "quantization_config",
        "per_layer_config",
    }
)  # fmt: skip
"""Read by `paceline.decoder.models.config.standard`, and so of every family."""

HARMLESS: dict[str, str] = {
    **dict.fromkeys(
        (
            "_name_or_path", "name_or_path", "architectures", "auto_map", "transformers_version", "torch_dtype",
            "unsloth_version", "unsloth_fixed", "transformers.js_config", "is_llama_config", "model_max_length",
            "max_sequence_length", "tokenizer_class", "license", "language", "has_no_defaults_at_init", "dtype",
        ),
        "says where the file is from, or how its weights are stored",
    ),
    **dict.fromkeys(
        (
            "attention_dropout", "hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob",
            "classifier_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "activation_dropout",
            "layerdrop", "initializer_range", "init_std", "initializer_factor", "gradient_checkpointing",
            "router_aux_loss_coef", "router_jitter_noise", "output_router_logits", "tf_legacy_loss",
            "embed_requires_grad",
        ),
        "is of training alone",
    ),
    **dict.fromkeys(
        (
            "use_cache", "output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward",
            "torchscript", "use_bfloat16", "is_decoder", "tie_encoder_decoder", "attn_implementation",
            "_attn_implementation", "_attn_implementation_autoset", "_flash_attn_2_enabled", "use_flash_attention",
            "pretraining_tp", "base_model_tp_plan", "base_model_pp_plan", "base_model_ep_plan", "cache_implementation",
            "attention_softmax_in_fp32", "bias_dropout_fusion", "masked_softmax_fusion", "reorder_and_upcast_attn",
            "skip_bias_add", "skip_bias_add_qkv", "offset_alibi", "experts_implementation",
        ),
        "says how transformers runs it; sums may be added up in another order, or in float32, as they are here",
    ),
    **dict.fromkeys(
        (
            "id2label", "label2id", "num_labels", "problem_type", "finetuning_task", "task_specific_params",
            "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels",
            "summary_first_dropout",
        ),
        "is of other tasks than text generation",
    ),
    **dict.fromkeys(
        (
            "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
            "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
            "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
            "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
            "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
            "prefix", "decoder_start_token_id", "sep_token_id", "unk_token_id", "cls_token_id", "mask_token_id",
        ),
        "is a default of a generation, not of the model",
    ),
    "n_ctx": "says what n_positions says",
    "max_window_layers": "says which layers slide in families that read it, and nothing in others",
}  # fmt: skip
"""Keys without effect on what a model computes here, and why."""

NEUTRAL: dict[str, object] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "use_mrope": False,
    "rope_interleaved": False,
    "is_causal": True,
    "use_bidirectional_attention": False,
    "use_sliding_window": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "rotary": True,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_embeddings": False,
    "capacity_factor": None,
    "logit_scale": 1.0,
}
"""Keys that would change the numbers of a family that does not read them, and the value that changes nothing."""


def refuse_others(config: Fields, neutral: Mapping[str, object]) -> None:
    """Raise UnknownArchitectureError where a key has another value than the one that changes nothing."""
    for key, value in neutral.items():
        actual = config.values.get(key)
        if actual is not None and actual != value:
            raise UnknownArchitectureError(
                f"{config.where}: {key} = {actual!r} would change the computation in a way that is not implemented for "
                f"model_type {config.text('model_type')!r}; supported: {value!r}."
            )


def unknown_keys(config: Fields, read: frozenset[str]) -> list[str]:
    """The keys that nobody here knows, in order; one that is null counts as absent.

    read  what the family reads besides `STANDARD`

    Raises:
        UnknownArchitectureError: a key of `NEUTRAL` that the family does not read has another value.
    """
    refuse_others(config, {key: value for key, value in NEUTRAL.items() if key not in read})
    known = STANDARD | read | HARMLESS.keys() | NEUTRAL.keys()
    return sorted(key for key, value in config.values.items() if value is not None and key not in known)
