"""GGUF architectures as rows of data: which family each one is, and what its keys mean in config.json's words.

Most values are of keys that all architectures share, and names of tensors follow from the family's own
(`paceline.decoder.gguf.layout`); a row holds the rest. Keys without effect on the computation are ignored; unknown
keys, and keys that ask for a computation that is not implemented, are rejected with an error that names the key.
Meanings follow llama.cpp's converter and its graphs: https://github.com/ggml-org/llama.cpp
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.gguf.header import GgufHeader
from paceline.decoder.gguf.keys import FACTORS, Keys
from paceline.decoder.models import registry
from paceline.decoder.models.family import Family


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of llama.cpp.

    family      the ``model_type`` that computes the same
    epsilon     the key of the norms' epsilon
    reads       further keys that ``more`` reads
    present     keys of config.json that are true if layer 0 has a tensor: of its name without the layer
    said        keys of config.json with one value in all files
    more        other keys of config.json, made of the metadata
    neutral     further keys with the value that changes nothing
    neighbours  llama.cpp rotates dimensions 2i and 2i + 1 of a head; where the family rotates i and i + half, the
                converter has ordered the rows of queries and keys for it
    stems       parts whose names in a file are others than usual
    others      other architectures by the same name, each after a test of the files that it is for
    also        other families whose files are of it, and compute the same
    truncate    yarn's first and last dimensions are whole numbers
    row_bias    a checkpoint has the bias that experts are chosen by as a row
    """

    family: str
    epsilon: str = "attention.layer_norm_rms_epsilon"
    reads: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=dict)
    said: Mapping[str, object] = field(default_factory=dict)
    more: Callable[[Keys], Mapping[str, object]] = lambda _: {}
    neutral: Mapping[str, object] = field(default_factory=dict)
    neighbours: bool = False
    stems: Mapping[str, str] = field(default_factory=dict)
    others: tuple[tuple[Callable[[Keys], object], Architecture], ...] = ()
    also: tuple[str, ...] = ()
    truncate: bool = True
    row_bias: bool = False

    def family_row(self) -> Family:
        return registry.family(self.family)

    @property
    def families(self) -> tuple[str, ...]:
        """The families of its files."""
        return (self.family, *self.also, *(name for _, row in self.others for name in row.families))


# ---- rows

_LAYER_NORM = "attention.layer_norm_epsilon"
_BIAS = {"attention_bias": "attn_q.bias"}
_BIASES = {**_BIAS, "mlp_bias": "ffn_up.bias"}
_EXPERTS = ("expert_count", "expert_used_count")
_WINDOW = ("attention.sliding_window", "attention.sliding_window_pattern")


def _mixture(name: str, **said: object) -> Callable[[Keys], Mapping[str, object]]:
    def more(keys: Keys) -> Mapping[str, object]:
        return {name: keys.integer("expert_count"), "num_experts_per_tok": keys.integer("expert_used_count"), **said}

    return more


def _qwen_experts(keys: Keys) -> Mapping[str, object]:
    width = keys.integer("feed_forward_length", 1)
    used = keys.integer("expert_used_count")
    return {"moe_intermediate_size": keys.integer("expert_feed_forward_length", max(1, width // used))}


def _slides(keys: Keys, pattern: int, window: int = 0) -> Mapping[str, object]:
    """The window, 0 for none, and the layers that have it: all but every ``pattern``-th, or as the file says."""
    said, count = keys.get("attention.sliding_window_pattern"), keys.integer("block_count")
    window = window if keys.get("attention.sliding_window") is None else keys.whole("attention.sliding_window")
    if isinstance(said, list):
        slides = [bool(one) for one in said]
    else:
        every = keys.integer("attention.sliding_window_pattern", pattern)
        slides = [layer % every < every - 1 for layer in range(count)]
    kinds = ["sliding_attention" if one and window else "full_attention" for one in slides]
    return {"sliding_window": window or None, "layer_types": kinds}


def _gemma_scale(keys: Keys, large: int) -> int:
    """Scores are divided by the root of this: the width of a head, but in the one model with ``large`` layers."""
    whole = keys.integer("block_count") == large
    return keys.integer("embedding_length") // keys.heads if whole else keys.head_dim


def _gemma2(keys: Keys) -> Mapping[str, object]:
    return {
        **_slides(keys, 2, 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _gemma_scale(keys, 46),
    }


def _gemma3(keys: Keys) -> Mapping[str, object]:
    return {
        **_slides(keys, 6),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": keys.unless_zero("final_logit_softcapping", None),
        "query_pre_attn_scalar": _gemma_scale(keys, 62),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
    }


def _granite(keys: Keys) -> Mapping[str, object]:
    return {
        "attention_multiplier": keys.unless_zero("attention.scale", keys.head_dim**-0.5),
        "embedding_multiplier": keys.unless_zero("embedding_scale", 1.0),
        "residual_multiplier": keys.unless_zero("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale"),
    }


_LLAMA = Architecture(
    "llama",
    present=_BIASES,
    said={"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"},
    neighbours=True,
    others=(
        (
            lambda keys: keys.get("expert_count"),
            Architecture("mixtral", reads=_EXPERTS, more=_mixture("num_local_experts"), neighbours=True),
        ),
    ),
    also=("mistral",),
)
_QWEN3_MOE = Architecture(
    "qwen3_moe",
    reads=(*_EXPERTS, "expert_feed_forward_length"),
    present=_BIAS,
    more=lambda keys: {**_mixture("num_experts", norm_topk_prob=True)(keys), **_qwen_experts(keys)},
)
_QWEN2_MOE = Architecture(
    "qwen2_moe",
    reads=(*_EXPERTS, "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    present={"qkv_bias": "attn_q.bias"},
    more=lambda keys: {
        **_mixture("num_experts", norm_topk_prob=False)(keys),
        **_qwen_experts(keys),
        "shared_expert_intermediate_size": keys.integer(
            "expert_shared_feed_forward_length", keys.integer("feed_forward_length", 1)
        ),
    },
)
_COHERE = Architecture(
    "cohere",
    epsilon=_LAYER_NORM,
    reads=("logit_scale",),
    present={**_BIAS, "use_qk_norm": "attn_q_norm.weight"},
    more=lambda keys: {"logit_scale": keys.unless_zero("logit_scale", 1.0)},
    neighbours=True,
)
_STABLELM = Architecture(
    "stablelm",
    epsilon=_LAYER_NORM,
    reads=("use_parallel_residual",),
    present={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
    more=lambda keys: {"use_parallel_residual": not keys.holds("blk.0.ffn_norm.weight")},
)
_GPT_NEOX = Architecture(
    "gpt_neox",
    epsilon=_LAYER_NORM,
    reads=("use_parallel_residual",),
    present={"attention_bias": "attn_qkv.bias"},
    more=lambda keys: {"use_parallel_residual": keys.flag("use_parallel_residual", True)},
)

_COHERE2 = Architecture(
    "cohere2",
    epsilon=_LAYER_NORM,
    reads=("logit_scale", *_WINDOW),
    more=lambda keys: {"logit_scale": keys.unless_zero("logit_scale", 1.0), **_slides(keys, 4)},
    neighbours=True,
)
_MPT = Architecture(
    "mpt",
    epsilon=_LAYER_NORM,
    reads=("attention.clamp_kqv", "attention.max_alibi_bias"),
    more=lambda keys: {
        "attn_config": {
            "clip_qkv": keys.unless_zero("attention.clamp_kqv", None),
            "alibi": keys.number("attention.max_alibi_bias", 0.0) != 0.0,
            "alibi_bias_max": keys.number("attention.max_alibi_bias", 8.0),
        }
    },
)


def _routed(keys: Keys) -> Mapping[str, object]:
    return {
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count", 1),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


_ROUTED = (
    *_EXPERTS, "expert_feed_forward_length", "expert_shared_count", "leading_dense_block_count",
    "expert_weights_scale", "expert_weights_norm",
)  # fmt: skip

_DOTS1 = Architecture(
    "dots1",
    reads=_ROUTED,
    present=_BIAS,
    more=_routed,
    neutral={"expert_gating_func": 2},
)


def _without_drafts(keys: Keys) -> Mapping[str, object]:
    return {"num_hidden_layers": keys.integer("block_count") - keys.whole("nextn_predict_layers")}


_GLM4_MOE = Architecture(
    "glm4_moe",
    reads=(*_ROUTED, "nextn_predict_layers"),
    present={**_BIAS, "use_qk_norm": "attn_q_norm.weight"},
    more=lambda keys: {**_routed(keys), **_without_drafts(keys)},
    neutral={"expert_gating_func": 2},
    stems={"mlp norm": "post_attention_norm"},
)
_GPT_OSS = Architecture(
    "gpt_oss",
    reads=(*_EXPERTS, *_WINDOW, "expert_feed_forward_length"),
    present=_BIAS,
    more=lambda keys: {
        **_mixture("num_local_experts")(keys),
        **_slides(keys, 2),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
    },
    stems={"mlp norm": "post_attention_norm"},
    truncate=False,
)
_GRANITE_MOE = Architecture(
    "granitemoe",
    reads=(*_EXPERTS, "attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    present=_BIAS,
    more=lambda keys: {**_granite(keys), **_mixture("num_local_experts")(keys)},
    neutral={"rope.scaling.finetuned": True},
    neighbours=True,
)
_ERNIE_MOE = Architecture(
    "ernie4_5_moe",
    reads=(
        *_EXPERTS, "expert_feed_forward_length", "expert_shared_count", "leading_dense_block_count",
        "interleave_moe_layer_step", "expert_shared_feed_forward_length",
    ),
    present={"use_bias": "attn_q.bias"},
    more=lambda keys: {
        "moe_num_experts": keys.integer("expert_count"),
        "moe_k": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": keys.whole("expert_shared_count"),
        "moe_layer_start_index": keys.whole("leading_dense_block_count"),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
    },
    neighbours=True,
    row_bias=True,
)  # fmt: skip
_OLMO3 = Architecture(
    "olmo3",
    reads=(*_WINDOW, "rope.freq_base_swa"),
    present=_BIAS,
    more=lambda keys: {
        **_slides(keys, 4),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", keys.number("rope.freq_base", 10000.0)),
    },
)
_MINIMAX_M2 = Architecture(
    "minimax_m2",
    reads=(*_EXPERTS, "expert_feed_forward_length"),
    more=lambda keys: {
        **_mixture("num_local_experts")(keys),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
    },
    neutral={"expert_gating_func": 2},
)


def _latent(keys: Keys) -> Mapping[str, object]:
    """Latent attention. A file has one head for all keys, unless it is old; then heads are as they are computed."""
    rotated = keys.integer("rope.dimension_count")
    return {
        **_routed(keys),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
        "kv_lora_rank": keys.integer("attention.kv_lora_rank"),
        "q_lora_rank": keys.whole("attention.q_lora_rank") or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": keys.integer("attention.key_length_mla", keys.head_dim) - rotated,
        "v_head_dim": keys.integer("attention.value_length_mla", keys.integer("attention.value_length", keys.head_dim)),
        "head_dim": rotated,
        "num_key_value_heads": keys.heads,
    }


_DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    reads=(
        *_ROUTED, "expert_group_count", "expert_group_used_count", "attention.kv_lora_rank", "attention.q_lora_rank",
        "attention.key_length_mla", "attention.value_length_mla", "rope.scaling.yarn_log_multiplier",
    ),
    more=_latent,
    neutral={"expert_gating_func": 2},
)  # fmt: skip
_DEEPSEEK_V2 = replace(
    _DEEPSEEK_V3,
    family="deepseek_v2",
    more=lambda keys: {
        **_latent(keys),
        "topk_method": "greedy" if keys.integer("expert_group_count", 1) == 1 else "group_limited_greedy",
    },
    neutral={},
    others=((lambda keys: keys.get("expert_gating_func") == 2, _DEEPSEEK_V3),),
)


def _llama4(keys: Keys) -> Mapping[str, object]:
    """Llama 4's settings, some of which no file has; one that says that there are no windows rotates in all layers."""
    whole, count = keys.get("attention.sliding_window") == 0, keys.integer("block_count")
    return {
        **_mixture("num_local_experts")(keys),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "intermediate_size_mlp": keys.integer("feed_forward_length"),
        "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
        "no_rope_layers": [1 if whole else int((layer + 1) % 4 > 0) for layer in range(count)],
        "attention_chunk_size": None if whole else 8192,
        "use_qk_norm": keys.integer("expert_count") != 128,
    }


def _falcon(keys: Keys) -> Mapping[str, object]:
    several = keys.key_heads > 1
    return {
        "new_decoder_architecture": several,
        "multi_query": not several,
        "num_ln_in_parallel_attn": 2 if keys.holds("blk.0.attn_norm_2.weight") else 1,
    }


def _apertus(keys: Keys) -> Mapping[str, object]:
    """Nothing, after a check of the activation's constants, which llama.cpp takes from the file."""
    for name, one in (("beta", 0.5), ("eps", -1e-6)):
        said: Any = keys.header.metadata.get(f"xielu.{name}", one)
        if any(abs(value - one) > 1e-3 * abs(one) for value in (said if isinstance(said, list) else [said])):
            raise UnknownArchitectureError(
                f"{keys.header.path}: xielu.{name}: expected {one} in every layer, got another value, which is not "
                "supported; use another model"
            )
    return {}


def _of_layers(keys: Keys) -> Mapping[str, object]:
    table = keys.header.tensors.get("per_layer_token_embd.weight")
    return {
        "num_kv_shared_layers": keys.whole("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input"),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
        "final_logit_softcapping": keys.unless_zero("final_logit_softcapping", 30.0),
    }


def _gemma3n(keys: Keys) -> Mapping[str, object]:
    """A layer's sparsity is a number of deviations in a file, and a share of gates in config.json."""
    said, low = keys.get("activation_sparsity_scale"), keys.header.tensors.get("blk.0.laurel_l.weight")
    scales = said if isinstance(said, list) else []
    return {
        **_slides(keys, 5),
        **_of_layers(keys),
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "altup_num_inputs": keys.integer("altup.num_inputs"),
        "altup_active_idx": keys.whole("altup.active_idx"),
        "laurel_rank": 1 if low is None else low.shape[0],
        "activation_sparsity_pattern": [0.0 if one < -9 else round(NormalDist().cdf(one), 6) for one in scales],
    }


def _gemma4(keys: Keys) -> Mapping[str, object]:
    """Layers with and without a window differ in heads and rotations; a share of those without one's is rotated."""
    slides, narrow = _slides(keys, 6), keys.integer("attention.key_length_swa")
    kinds: object = slides["layer_types"]
    layers = [kind == "sliding_attention" for kind in kinds] if isinstance(kinds, list) else []
    heads, widths = (keys.each(name) for name in ("attention.head_count_kv", "feed_forward_length"))
    factors = keys.factors.get(FACTORS[0], (1.0,))
    mixture = {
        "num_experts": keys.integer("expert_count"),
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
    } if keys.holds("blk.0.ffn_gate_inp.weight") else {}  # fmt: skip
    return {
        **slides,
        **_of_layers(keys),
        **mixture,
        "enable_moe_block": bool(mixture),
        "head_dim": narrow,
        "global_head_dim": keys.head_dim,
        "num_key_value_heads": next((one for one, slide in zip(heads, layers, strict=False) if slide), heads[-1]),
        "num_global_key_value_heads": heads[-1],
        "attention_k_eq_v": not keys.holds(f"blk.{layers.index(False)}.attn_v.weight") if False in layers else False,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": factors.count(1.0) / len(factors),
                "rope_theta": keys.number("rope.freq_base", 10000.0),
            },
            "sliding_attention": {
                "rope_type": "default",
                "partial_rotary_factor": keys.integer("rope.dimension_count_swa", narrow) / narrow,
                "rope_theta": keys.number("rope.freq_base_swa", 10000.0),
            },
        },
    }


_LAYERED = (
    *_WINDOW, "attention.shared_kv_layers", "embedding_length_per_layer_input", "final_logit_softcapping",
    "rope.freq_base_swa",
)  # fmt: skip
_GEMMA4 = Architecture(
    "gemma4_text",
    reads=(
        *_LAYERED, *_EXPERTS, "attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa",
        "expert_feed_forward_length",
    ),
    more=_gemma4,
)  # fmt: skip
_FALCON = Architecture("falcon", epsilon=_LAYER_NORM, more=_falcon)
_FALCON_GROUPS = replace(_FALCON, stems={"norm": "attn_norm_2", "mlp norm": "attn_norm"})

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "qwen2": Architecture("qwen2"),
    "qwen2moe": _QWEN2_MOE,
    "qwen3": Architecture("qwen3", present=_BIAS),
    "qwen3moe": _QWEN3_MOE,
    "phi2": Architecture("phi", epsilon=_LAYER_NORM),
    "phi3": Architecture(
        "phi3",
        reads=("attention.sliding_window",),
        more=lambda keys: {"sliding_window": keys.whole("attention.sliding_window") or None},
    ),
    "gemma": Architecture("gemma", present=_BIAS),
    "gemma2": Architecture(
        "gemma2",
        reads=(*_WINDOW, "attn_logit_softcapping", "final_logit_softcapping"),
        present=_BIAS,
        more=_gemma2,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        reads=(*_WINDOW, "final_logit_softcapping", "rope.freq_base_swa"),
        present=_BIAS,
        more=_gemma3,
    ),
    "smollm3": Architecture("smollm3", present=_BIASES, neighbours=True),
    "granite": Architecture(
        "granite",
        reads=("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        present=_BIASES,
        more=_granite,
        neutral={"rope.scaling.finetuned": True},
        neighbours=True,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        present={**_BIASES, "attention_out_bias": "attn_output.bias"},
        stems={"mlp norm": "post_attention_norm"},
    ),
    "ernie4_5": Architecture("ernie4_5", present={"use_bias": "attn_q.bias"}, neighbours=True),
    "arcee": Architecture("arcee", present=_BIASES, neighbours=True),
    "olmo": Architecture(
        "olmo",
        epsilon=_LAYER_NORM,
        reads=("attention.clamp_kqv",),
        present=_BIAS,
        more=lambda keys: {"clip_qkv": keys.unless_zero("attention.clamp_kqv", None)},
        neighbours=True,
    ),
    "olmo2": Architecture(
        "olmo2",
        present=_BIAS,
        others=((lambda keys: keys.get("attention.sliding_window"), _OLMO3),),
    ),
    "gpt-oss": _GPT_OSS,
    "glm4moe": _GLM4_MOE,
    "granitemoe": _GRANITE_MOE,
    "phimoe": Architecture(
        "phimoe",
        reads=(*_EXPERTS, "attention.sliding_window"),
        present=_BIAS,
        more=lambda keys: {
            **_mixture("num_local_experts")(keys),
            "sliding_window": keys.whole("attention.sliding_window") or None,
            "lm_head_bias": keys.holds("output.bias"),
        },
    ),
    "ernie4_5-moe": _ERNIE_MOE,
    "nemotron": Architecture(
        "nemotron",
        epsilon=_LAYER_NORM,
        reads=("attention.layer_norm_rms_epsilon",),  # the same number once more
        present=_BIASES,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", present=_BIAS),
    "dots1": _DOTS1,
    "minimax-m2": _MINIMAX_M2,
    "olmoe": Architecture("olmoe", reads=_EXPERTS, present=_BIAS, more=_mixture("num_experts", norm_topk_prob=False)),
    "exaone4": Architecture("exaone4", reads=_WINDOW, more=lambda keys: _slides(keys, 4)),
    "chatglm": Architecture("glm", present=_BIAS, neighbours=True),
    "glm4": Architecture("glm4", present=_BIAS, neighbours=True),
    "command-r": _COHERE,
    "cohere2": _COHERE2,
    "starcoder": Architecture("gpt_bigcode", epsilon=_LAYER_NORM),
    "mpt": _MPT,
    "gpt2": Architecture("gpt2", epsilon=_LAYER_NORM),
    "gptneox": _GPT_NEOX,
    "bloom": Architecture("bloom", epsilon=_LAYER_NORM, neutral={"attention.max_alibi_bias": 8.0}),
    "starcoder2": Architecture("starcoder2", epsilon=_LAYER_NORM, present={"use_bias": "attn_q.bias"}),
    "stablelm": _STABLELM,
    "deepseek2": _DEEPSEEK_V2,
    "llama4": Architecture(
        "llama4_text",
        reads=(*_EXPERTS, "expert_feed_forward_length", "interleave_moe_layer_step", "attention.sliding_window"),
        present=_BIAS,
        more=_llama4,
    ),
    "mistral3": Architecture(
        "ministral3",
        reads=("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
        neighbours=True,
    ),
    "apertus": Architecture("apertus", present=_BIAS, said={"hidden_act": "xielu"}, more=_apertus),
    "falcon": replace(_FALCON, others=((lambda keys: keys.holds("blk.0.attn_norm_2.weight"), _FALCON_GROUPS),)),
    "gemma3n": Architecture(
        "gemma3n_text",
        reads=(*_LAYERED, "altup.active_idx", "altup.num_inputs", "activation_sparsity_scale"),
        more=_gemma3n,
    ),
    "gemma4": _GEMMA4,
}
"""By the value of `general.architecture`."""


def architecture(header: GgufHeader) -> Architecture:
    name = header.fields.text("general.architecture")
    if name not in ARCHITECTURES:
        raise UnknownArchitectureError(
            f"{header.path}: general.architecture: expected one of {', '.join(ARCHITECTURES)}, got {name!r}; use a "
            "file of one of them"
        )
    row = ARCHITECTURES[name]
    return next((other for wanted, other in row.others if wanted(Keys(header, name))), row)
