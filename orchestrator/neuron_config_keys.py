"""The keys of NxD Inference's `NeuronConfig` and of transformers-neuronx' that have no counterpart here, and why.

Names are those of `neuronx_distributed_inference/models/config.py` and `transformers_neuronx/config.py`. Also what they
may have as values where they change nothing here: a file with another value is not one that those projects read, so
that nobody knows what it asks for. Not here: the keys that are read (`paceline.neuron_config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from paceline.core.errors import ConfigurationError

_KERNEL = "kernels are the backend's choice"
_LAYOUT = "the layout of weights and caches is the backend's"
_COMPILER = "compiler and runtime flags are the Neuron backend's, which sets its own"
_ALWAYS = "always so here"
_RANKS = "ranks follow from tp_degree"

WITHOUT_EFFECT: dict[str, str] = {
    # Batches and buckets.
    "ctx_batch_size": "prompts are read one slot at a time",
    "spec_batch_size": "speculation has the decoder's batch",
    "kv_cache_batch_size": "the cache has the decoder's batch",
    "kv_cache_padding_size": "idle slots are left alone",
    "n_active_tokens": "widths of windows follow from k",
    "bucket_n_active_tokens": "widths of windows follow from k",
    "prompt_batch_size": "a prompt that several rows share is read once, and the others one slot at a time",
    "prefix_buckets": "what is left of a prompt is read in chunks of context_length_estimate",
    "windowed_context_encoding_size": "long prompts are read in chunks of context_length_estimate",
    "is_continuous_batching": _ALWAYS,
    "continuous_batching": _ALWAYS,
    "apply_seq_ids_mask": "idle slots are left alone",
    "padding_side": "prompts are lists of unequal lengths, or padded on either side with an attention mask",
    "use_2d_cache_ids": "positions are those of every row",
    "lhs_aligned": "prompts are lists of unequal lengths, or padded on either side with an attention mask",
    "moe_mask_padded_tokens": "padding is not computed",
    "trace_tokengen_model": "graphs are built at first use, or by compile()",
    "skip_warmup": "graphs are built at first use, or by compile()",
    "is_prefill_stage": "a state of NxD's, not an option",
    # What rounds do by themselves.
    "async_mode": "several rounds run in one call where the backend can",
    "on_device_sampling": "sampling is part of the graphs, per request",
    "output_logits": "ask with output_scores or logprobs",
    "output_all_logits": "ask with output_scores or logprobs",
    "log_softmax_scores": "ask with output_scores or logprobs",
    "max_new_tokens": "give it to sample()",
    # Weights.
    "fused_qkv": _ALWAYS,
    "fuse_qkv": _ALWAYS,
    "fuse_mlp": _ALWAYS,
    "qkv_tiling": _LAYOUT,
    "weight_tiling": _LAYOUT,
    "attention_layout": _LAYOUT,
    "collectives_layout": _LAYOUT,
    "cache_layout": _LAYOUT,
    "attn_output_transposed": _LAYOUT,
    "mlp_in_weight_tiling_permute_order": _LAYOUT,
    "mlp_out_weight_tiling_permute_order": _LAYOUT,
    "mlp_out_weight_transpose": _LAYOUT,
    "transpose_shared_experts_weights": _LAYOUT,
    "duplicate_q_weight_sos": _LAYOUT,
    "k_cache_transposed": _LAYOUT,
    "disable_kv_cache_tiling": _LAYOUT,
    "kv_cache_tiling": _LAYOUT,
    "kv_cache_update_with_kernel": _KERNEL,
    "is_block_kv_layout": _LAYOUT,
    "pa_num_blocks": _LAYOUT,
    "pa_block_size": _LAYOUT,
    "weights_to_skip_layout_optimization": _LAYOUT,
    "padded_hidden_size": _LAYOUT,
    "padded_intermediate_size": _LAYOUT,
    "lm_head_pad": _LAYOUT,
    "lm_head_pad_alignment_size": _LAYOUT,
    "vocab_parallel": "the vocabulary is divided wherever the model is",
    "on_device_embedding": _ALWAYS,
    "save_sharded_checkpoint": "a checkpoint stays whole; ranks read their parts of it",
    "skip_sharding": "a checkpoint stays whole; ranks read their parts of it",
    "quantized_checkpoints_path": "weights are quantised while they are loaded; or give that folder as the checkpoint",
    "draft_model_modules_to_not_convert": "a draft is loaded with its own options; what it drafts changes no token",
    "quantization_scale_dtype": "scales are float32",
    # Numbers.
    "overrides_torch_dtype": "amp says it",
    "cast_type": "amp is the format of weights and cache; activations are float32 between products",
    "attention_dtype": "activations are float32",
    "rpl_reduce_dtype": "activations are float32",
    "all_reduce_dtype": "activations are float32",
    "cast_logits_dtype": "logits are float32",
    "bf16_rms_norm": "activations are float32",
    "has_pre_attention_norm": "an EAGLE head's checkpoint says it",
    "skip_vision": "texts alone are read",
    "enable_ve_data_parallel": "texts alone are read",
    # Ranks.
    "world_size": _RANKS,
    "start_rank_id": _RANKS,
    "local_ranks_size": _RANKS,
    "local_world_size": _RANKS,
    "rank_id": _RANKS,
    "local_tp": _RANKS,
    "layer_partition": _RANKS,
    "moe_tp_degree": _RANKS,
    "hybrid_sharding_config": _RANKS,
    "ep_dispatch_cc_option": _RANKS,
    "dist": "a state of transformers-neuronx', not an option",
    "is_sequence_parallel": "rows of prompts are not divided over ranks",
    "shared_experts_sequence_parallel_enabled": "rows of prompts are not divided over ranks",
    "sequence_parallel_enabled": "rows of prompts are not divided over ranks",
    "sequence_parallel_norm": "rows of prompts are not divided over ranks",
    "sequence_parallel_norm_threshold": "rows of prompts are not divided over ranks",
    "shard_over_sequence": "the cache is divided by heads",
    "flash_decoding_enabled": "the cache is divided by heads",
    "weight_gather_seq_len_threshold": "rows of prompts are not divided over ranks",
    "mlp_cp_degree": "rows of prompts are not divided over ranks",
    # Speculation: what a checkpoint says here.
    "is_eagle_draft": "which drafter a folder is for is found out from it",
    "is_eagle_target": "which drafter a folder is for is found out from it",
    "is_eagle3": "which drafter a folder is for is found out from it",
    "enable_eagle_speculation": "which drafter a folder is for is found out from it",
    "enable_eagle_draft_input_norm": "an EAGLE head's checkpoint says it",
    "is_medusa": "which drafter a folder is for is found out from it",
    "num_medusa_heads": "a Medusa folder says it",
    "medusa_speculation_length": "the tree of the heads says it",
    "medusa_tree": "give it with the heads: draft={'path': ..., 'draft_tree': ...}",
    "token_tree_config": "give it with the heads: draft={'path': ..., 'draft_tree': ...}",
    "enable_token_tree": "give it with the heads: draft={'path': ..., 'draft_tree': ...}",
    # Kernels.
    **dict.fromkeys(
        (
            "attn_cls", "attn_kernel_enabled", "strided_context_parallel_kernel_enabled", "qkv_kernel_enabled",
            "qkv_nki_kernel_enabled", "qkv_cte_nki_kernel_fuse_rope", "qkv_kernel_nbsd_layout", "mlp_kernel_enabled",
            "mlp_tkg_nki_kernel_enabled", "fused_rmsnorm_skip_gamma", "mlp_kernel_fuse_residual_add",
            "qkv_kernel_fuse_residual_add", "out_proj_kernel_enabled",
            "attn_tkg_nki_kernel_enabled", "attn_tkg_builtin_kernel_enabled", "attn_block_tkg_nki_kernel_enabled",
            "attn_block_cte_nki_kernel_enabled", "attn_block_tkg_nki_kernel_cache_update",
            "attn_block_tkg_nki_kernel_cascaded_attention", "attn_block_tkg_nki_kernel_use_online_softmax",
            "moe_fused_nki_kernel_enabled",
            "router_topk_nki_kernel_enabled", "expert_mlp_nki_kernel_enabled", "shared_mlp_nki_kernel_enabled",
            "fused_rmsnorm_qkv", "fused_rmsnorm_mlp", "disable_argmax_kernel", "blockwise_matmul_config",
            "attn_block_tkg_nki_kernel_disable_gpsimd_sb2sb", "eagle_rolling_buffer_kernel_enabled",
            "fused_shared_experts", "use_index_calc_kernel",
        ),
        _KERNEL,
    ),
    # Compiler and runtime.
    **dict.fromkeys(
        (
            "on_cpu", "enable_cte_modular_flow", "layer_boundary_markers", "record_layer_outputs", "logical_nc_config",
            "logical_neuron_cores", "cc_pipeline_tiling_factor", "seq_len_threshold_for_cc_tiling", "tile_cc", "target",
            "enable_spill_reload_dge", "enable_long_context_mode", "scratchpad_page_size",
            "enable_output_completion_notifications", "disable_numeric_cc_token", "switch_cc",
            "compilation_worker_count", "optimized_paged_attention", "dma_order_config", "unroll", "context_unroll",
        ),
        _COMPILER,
    ),
}  # fmt: skip
"""Keys that change nothing here, and why."""

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "pp_degree": ((1,), "layers are not divided over stages; use tp_degree"),
    "ep_degree": ((1,), "experts are not divided by themselves; use tp_degree"),
    "cp_degree": ((1,), "prompts are not divided over ranks; use tp_degree"),
    "attention_dp_degree": ((1,), "batches are not divided over ranks; load one decoder for each part"),
    "moe_ep_degree": ((1,), "experts are not divided by themselves; use tp_degree"),
    "pp_stages": ((1,), "layers are not divided over stages; use tp_degree"),
    "early_expert_affinity_modulation": ((False,), "experts compute what the checkpoint's family says"),
    "glu_mlp": ((True, None), "experts compute what the checkpoint's family says"),
    "glu_type": (("glu",), "experts compute what the checkpoint's family says"),
    "hidden_act_bias": ((0, 0.0), "experts compute what the checkpoint's family says"),
    "hidden_act_scaling_factor": ((1, 1.0), "experts compute what the checkpoint's family says"),
    "gate_clamp_lower_limit": ((None,), "experts compute what the checkpoint's family says"),
    "gate_clamp_upper_limit": ((None,), "experts compute what the checkpoint's family says"),
    "up_clamp_lower_limit": ((None,), "experts compute what the checkpoint's family says"),
    "up_clamp_upper_limit": ((None,), "experts compute what the checkpoint's family says"),
    "return_expert_index": ((False,), "which experts a token is routed to is not given out"),
    "return_router_logits": ((False,), "which experts a token is routed to is not given out"),
    "prefixed_length": ((0,), "put the prefix into the prompt"),
    "activation_quantization_type": ((None,), "activations are float32"),
    "rmsnorm_quantize_kernel_enabled": ((False, None), "activations are float32"),
    "quantized_mlp_kernel_enabled": ((False, None), "activations are float32"),
    "quantize_clamp_bound": ((None, inf), "numbers are not clamped before they are rounded"),
    "qk_layernorm": ((False, None), "the model's configuration says which norms there are"),
    "pre_rope_rmsnorm": ((False, None), "the model's configuration says which norms there are"),
    "normalize_top_k_affinities": ((True, None), "the model's configuration says it (norm_topk_prob)"),
    "disable_normalize_top_k_affinities": ((False, None), "the model's configuration says it (norm_topk_prob)"),
    "router_config": (
        (None, {}, *({"act_fn": "softmax", "dtype": name} for name in ("float32", "torch.float32"))),
        "experts are chosen by a softmax in float32",
    ),
    "quantization_block_size": ((None,), "blocks have 32 numbers; use quantization='q8_0' when loading"),
    "quantization_block_axis": ((None,), "blocks have 32 numbers; use quantization='q8_0' when loading"),
    "is_mxfp4_compute": ((False,), "there are no products in that format"),
    "is_hidden_dim_shuffled": ((False,), "there are no products in that format"),
    "is_intermediate_dim_shuffled": ((False,), "there are no products in that format"),
    "is_full_model_shuffled": ((False,), "there are no products in that format"),
    "is_chunked_prefill": ((False, True), "long prompts are always read in chunks"),
    "chunked_prefill_config": ((None,), "chunks are those of context_length_estimate"),
    "allow_input_truncation": ((False,), "a prompt that does not fit is refused; shorten it before"),
    "lora_config": ((None,), "adapters of weights are not loaded; merge them into the checkpoint"),
    "tensor_replacement_config": ((None,), "tensors cannot be replaced"),
    "tensor_capture_config": ((None,), "tensors cannot be captured"),
    "sparse_attn": ((None,), "attention is that of the checkpoint"),
    "capacity_factor": ((None,), "experts take every token that is routed to them, whatever else is in a call"),
}
"""Keys that would change what is computed: the values that go, and what to do instead."""

SAMPLING_WITHOUT_EFFECT: dict[str, str] = {
    "dynamic": "sampling is per request, always",
    "deterministic": "the same seed gives the same tokens, always",
    "global_topk": "top_k may be any number",
    "global_top_k": "top_k may be any number",
    "top_p_min_tokens": "at least one token is left, always",
    "top_k_kernel_enabled": "kernels are the backend's choice",
    "sampling_dp_degree": "sampling is divided as the vocabulary is",
    "on_device_sampling_config": "set in every file of NxD's, and says nothing",
    "per_batch_line": "sampling is per request, always",
    "max_length": "give sequence_length to sample()",
    "config": "the file of the model says it",
}
"""Keys of NxD's sampling that change nothing here, and why."""

QUANT_KEYS: dict[str, tuple[tuple[object, ...] | None, str]] = {
    "quant_dtype": (("s8", "f8e4m3fn"), "weights are s8 or f8e4m3fn"),
    "dequant_dtype": (None, "products are float32"),
    "quantize_method": (("vector_dynamic",), "every row has a scale"),
    "quantize_attn": ((True,), "matrices of layers are quantised all or none"),
    "no_quantize_list": (([], ()), "matrices of layers are quantised all or none"),
}
"""The fields of transformers-neuronx' QuantizationConfig: the values that go (None: any), and why no others do."""

KV_DEFAULT = "float8_e4m3fn"
"""What NxD stores keys and values as, where no type is named."""

KV_CACHES = {
    "s8": "int8", "int8": "int8", "f8e4m3": "fp8_e4m3", "f8e4m3fn": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3",
    "f8e5m2": "fp8_e5m2", "float8_e5m2": "fp8_e5m2",
}  # fmt: skip
"""`kv_cache_dtype` by the names of both projects for the type."""

KV_KEYS = {
    "kv_cache_quant": ("quant_dtype", "dequant_dtype", "quantize_method"),
    "kv_quant_config": ("quant_dtype", "direct_cast", "k_quant_method", "v_quant_method"),
}
"""The fields of what says how keys and values are quantised, of transformers-neuronx and of NxD Inference."""


_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "f32", "bf16", "f16", "fp32")
_LAYOUTS = ("HSB", "BSH", "SBH")

CHOICES: dict[str, tuple[str, ...]] = {
    "padding_side": ("left", "right"),
    "cast_type": ("config", "as-declared"),
    "attention_layout": _LAYOUTS,
    "collectives_layout": _LAYOUTS,
    "cache_layout": _LAYOUTS,
    "attention_dtype": _DTYPES,
    "rpl_reduce_dtype": _DTYPES,
    "all_reduce_dtype": _DTYPES,
    "cast_logits_dtype": _DTYPES,
    "quantization_scale_dtype": _DTYPES,
}
"""Keys with one of some words; a number format may begin with "torch."."""

NUMBERS = frozenset(
    {
        "ctx_batch_size", "spec_batch_size", "kv_cache_batch_size", "kv_cache_padding_size", "n_active_tokens",
        "prompt_batch_size", "windowed_context_encoding_size", "max_new_tokens", "pa_num_blocks", "pa_block_size",
        "padded_hidden_size", "padded_intermediate_size", "lm_head_pad_alignment_size", "world_size", "start_rank_id",
        "local_ranks_size", "local_world_size", "rank_id", "local_tp", "moe_tp_degree",
        "sequence_parallel_norm_threshold", "weight_gather_seq_len_threshold", "mlp_cp_degree", "num_medusa_heads",
        "medusa_speculation_length", "cc_pipeline_tiling_factor", "seq_len_threshold_for_cc_tiling",
        "scratchpad_page_size", "compilation_worker_count", "unroll", "context_unroll", "logical_neuron_cores",
        "logical_nc_config",
    }
)  # fmt: skip
"""Keys with a number, 0 or more."""

LISTS = frozenset(
    {
        "prefix_buckets", "weights_to_skip_layout_optimization",
        "mlp_in_weight_tiling_permute_order", "mlp_out_weight_tiling_permute_order",
        "draft_model_modules_to_not_convert",
    }
)  # fmt: skip
"""Keys with a list."""

TEXTS = frozenset({"quantized_checkpoints_path", "target", "ep_dispatch_cc_option"})
"""Keys with a text."""

OBJECTS = frozenset(
    {
        "continuous_batching", "layer_partition", "hybrid_sharding_config", "dist", "attn_cls",
        "blockwise_matmul_config", "dma_order_config", "medusa_tree", "token_tree_config", "on_device_sampling",
    }
)  # fmt: skip
"""Keys with an object, or with what such a one is made of."""


def why_not_value(name: str, value: object) -> str:
    """What a key must have as its value, where it has none of that; else the empty text. None goes everywhere."""
    if value is None or name in OBJECTS:
        return ""
    if name in CHOICES:
        choices = CHOICES[name]
        known = isinstance(value, str) and value.removeprefix("torch.") in choices
        return "" if known else f"one of {', '.join(choices)}"
    if name in NUMBERS:
        return "" if is_count(value) else "a number, 0 or more"
    if name in LISTS:
        return "" if isinstance(value, (list, tuple)) else "a list"
    if name in TEXTS:
        return "" if isinstance(value, str) else "a text"
    return "" if isinstance(value, bool) else "true or false"


def is_count(value: object) -> bool:
    """Whether it is a whole number, 0 or more; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def flag(name: str, value: object) -> bool:
    """A value that must be true or false; None is false.

    Raises:
        ConfigurationError: it is neither.
    """
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} must be true or false")
    return bool(value)


def count(name: str, value: object) -> int | None:
    """A value that must be a number, or None.

    Raises:
        ConfigurationError: it is something else.
    """
    if value is not None and not is_count(value):
        raise ConfigurationError(f"{name}={value!r} must be a number, 0 or more")
    assert value is None or isinstance(value, int)
    return value


def counts(name: str, value: object) -> list[int] | None:
    """A value that must be a list of numbers, or None.

    Raises:
        ConfigurationError: it is something else.
    """
    if value is None:
        return None
    if not isinstance(value, (list, tuple)) or not value or not all(is_count(one) for one in value):
        raise ConfigurationError(f"{name}={value!r} must be a list of numbers")
    return list(value)


def named(name: str, value: object) -> Mapping[str, object]:
    """A value that must be an object of fields.

    Raises:
        ConfigurationError: it is something else.
    """
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{name} is a {type(value).__name__}; it must be an object")
    return value
