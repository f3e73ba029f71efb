"""What the keys of NxD Inference's and transformers-neuronx' files may have as values, where they change nothing here.

A file with another value than these is not one that those projects read, so that nobody knows what it asks for.
Not here: the reasons why keys change nothing (`paceline.neuron_config_keys`).
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.errors import ConfigurationError

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
