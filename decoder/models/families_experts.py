"""Families with experts in some of their layers, shared experts, or latent attention (DeepSeek's way).

Defaults are those of transformers' configuration classes, except that sizes have no default.
"""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import EXPERT_NAMES, Blueprint, Experts, Latent
from paceline.decoder.models.families import MIXTRAL
from paceline.decoder.models.family import ACTIVATION, BIASES, Family, Key, flag, share_turned, windows

# ---- experts chosen by a sigmoid and a bias, in later layers alone (DeepSeek V3's way)

_SHARED = {f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_DENSE = {f"dense_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_ROUTED_NAMES = EXPERT_NAMES.but(router_bias="mlp.gate.e_score_correction_bias", **_SHARED, **_DENSE)


def _routed(normalise: bool, first: int, shared: int = 1) -> Key:
    """Return the experts of a family that chooses them as DeepSeek V3 does; the defaults of absent keys."""

    def value(config: Fields) -> Experts:
        width = config.integer("moe_intermediate_size")
        dense = config.integer("first_k_dense_replace", first, minimum=0)
        return Experts(
            config.integer("n_routed_experts"),
            config.integer("num_experts_per_tok"),
            config.flag("norm_topk_prob", normalise),
            shared=width * config.integer("n_shared_experts", shared),
            shared_weighted=False,
            width=width,
            scores="sigmoid",
            corrected="vector",
            groups=config.integer("n_group", 1),
            chosen_groups=config.integer("topk_group", 1),
            scale=config.number("routed_scaling_factor", 1.0),
            dense=tuple(layer < dense for layer in range(config.integer("num_hidden_layers"))),
        )

    names = (
        "moe_intermediate_size", "first_k_dense_replace", "num_experts_per_tok", "norm_topk_prob", "n_shared_experts",
        "n_group", "topk_group", "routed_scaling_factor", "n_routed_experts",
    )  # fmt: skip
    return Key(names, value)


_MTP_LAYERS = r"model\.layers\.(?P<layer>\d+)\..+"

_GLM4_MOE = Family(
    "glm4_moe",
    "GLM 4.5 to 4.7, mixture of experts",
    names=_ROUTED_NAMES,
    reads={
        **ACTIVATION,
        "turned": share_turned(0.5),
        "qkv_bias": flag("attention_bias"),
        "head_norms": Key(("use_qk_norm",), lambda config: "head" if config.flag("use_qk_norm", False) else ""),
        "experts": _routed(True, 1),
    },
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "bos_token_id": None,
        "eos_token_id": None,
    },
    renamed={"num_local_experts": "n_routed_experts"},
    ignored=_MTP_LAYERS,
)


class _LatentFamily(Family):
    def translated(self, config: Fields) -> Fields:
        """Return the file with the head width of queries and keys, and with as many key heads as query heads."""
        fields = super().translated(config)
        width = fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")
        heads = fields.integer("num_attention_heads")
        said = {"head_dim": (fields.integer("qk_rope_head_dim"), width), "num_key_value_heads": (heads,)}
        for key, values in said.items():
            if fields.values.get(key, values[0]) not in (*values, None):
                raise UnknownArchitectureError(
                    f"{fields.where}: {key}: expected {values[0]}, got {fields.values[key]!r}, which is not supported; "
                    "use another model"
                )
        return Fields({**fields.values, "head_dim": width, "num_key_value_heads": heads}, fields.where)


def _whole_head(config: Fields) -> int:
    return config.integer("head_dim")


def _latent(config: Fields) -> Latent:
    query = config.values.get("q_lora_rank")
    if config.integer("v_head_dim") > config.integer("head_dim"):
        raise UnknownArchitectureError(
            f"{config.where}: v_head_dim: expected at most qk_nope_head_dim + qk_rope_head_dim = "
            f"{config.integer('head_dim')}, got {config.integer('v_head_dim')}, which is not supported; use another "
            "model"
        )
    return Latent(
        query=0 if query is None else config.integer("q_lora_rank"),
        rank=config.integer("kv_lora_rank"),
        own=config.integer("qk_nope_head_dim"),
        turned=config.integer("qk_rope_head_dim"),
        value=config.integer("v_head_dim"),
    )


def _latent_scale(config: Fields) -> float:
    """Return the factor of scores, which yarn makes larger."""
    rope = config.child("rope_scaling") or config.child("rope_parameters") or Fields({}, config.where)
    scale = 1.0
    if rope.text("rope_type", rope.text("type", "default")) != "default":
        most = rope.optional_number("mscale_all_dim") or 0.0
        factor = rope.number("factor", 1.0)
        scale = (0.1 * most * math.log(factor) + 1.0) ** 2 if most and factor > 1.0 else 1.0
    return float(scale * config.integer("head_dim") ** -0.5)


def _in_groups(config: Fields) -> bool:
    """Return whether DeepSeek V2 chooses experts from the best groups."""
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnknownArchitectureError(
            f"{config.where}: topk_method: expected greedy or group_limited_greedy, got {method!r}, which is not "
            "supported; use another model"
        )
    return method == "group_limited_greedy"


_LATENT_NAMES = _ROUTED_NAMES.but(
    q_short="self_attn.q_a_proj",
    q_short_norm="self_attn.q_a_layernorm",
    q_long="self_attn.q_b_proj",
    kv_short="self_attn.kv_a_proj_with_mqa",
    kv_short_norm="self_attn.kv_a_layernorm",
    kv_long="self_attn.kv_b_proj",
)
_DEEPSEEK_DEFAULTS = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_DEEPSEEK_V3 = _LatentFamily(
    "deepseek_v3",
    "DeepSeek V3, R1, Moonlight, Kimi K2",
    names=_LATENT_NAMES,
    reads={
        **ACTIVATION,
        "latent": Key(
            ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            _latent,
        ),
        "turned": Key((), lambda config: config.integer("qk_rope_head_dim") / config.integer("head_dim")),
        "neighbours": flag("rope_interleave", True),
        "query_scale": Key((), _latent_scale),
        "experts": _routed(True, 3),
    },
    defaults={
        **_DEEPSEEK_DEFAULTS,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "max_position_embeddings": 4096,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    },
    renamed={"num_local_experts": "n_routed_experts"},
    neutral={"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "qk_head_dim": _whole_head},
    ignored=_MTP_LAYERS,
)
_DEEPSEEK_V2 = replace(
    _DEEPSEEK_V3,
    name="deepseek_v2",
    summary="DeepSeek V2",
    reads={
        **_DEEPSEEK_V3.reads,
        "neighbours": Key((), lambda _: True),
        "experts": Key(
            (*_routed(False, 0).names, "topk_method"),
            lambda config: replace(
                _routed(False, 0, shared=2).value(config),
                scores="softmax",
                corrected="",
                of_group=1,
                **({} if _in_groups(config) else {"groups": 1}),
            ),
        ),
    },
    defaults={**_DEEPSEEK_DEFAULTS, "bos_token_id": 1, "eos_token_id": 2, "n_routed_experts": 64},
    neutral={"moe_layer_freq": 1, "scoring_func": "softmax", "norm_topk_prob": False, "qk_head_dim": _whole_head},
    ignored="",
)
_DOTS1 = Family(
    "dots1",
    "dots.llm1",
    names=_ROUTED_NAMES,
    plan=Blueprint(head_norms="head"),
    reads={
        **ACTIVATION,
        **BIASES,
        "windows": windows(
            lambda config, layer: layer >= config.integer("max_window_layers", 62, minimum=0),
            names=("max_window_layers",),
        ),
        "experts": _routed(False, 0),
    },
    defaults={"sliding_window": 4096, "bos_token_id": None, "eos_token_id": None},
    renamed={"num_local_experts": "n_routed_experts"},
)
_ERNIE_MOE = Family(
    "ernie4_5_moe",
    "Ernie 4.5, mixture of experts",
    names=_ROUTED_NAMES.but(router_bias="mlp.moe_statics.e_score_correction_bias"),
    plan=Blueprint(neighbours=True),
    reads={
        **ACTIVATION,
        **{bias: flag("use_bias") for bias in ("qkv_bias", "out_bias", "mlp_bias")},
        "experts": Key(
            (
                "moe_intermediate_size", "moe_k", "moe_num_experts", "moe_num_shared_experts",
                "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval",
            ),
            lambda config: _experts_of_ernie(config),
        ),
    },
    defaults={
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    renamed={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
)  # fmt: skip


def _experts_of_ernie(config: Fields) -> Experts:
    count, width = config.integer("num_hidden_layers"), config.integer("moe_intermediate_size", 1536)
    first, every = config.integer("moe_layer_start_index", 1, minimum=0), config.integer("moe_layer_interval", 1)
    last = config.values.get("moe_layer_end_index", -1)
    end = count - 1 if last in (-1, None) else config.integer("moe_layer_end_index", minimum=0)
    return Experts(
        config.integer("moe_num_experts", 64),
        config.integer("moe_k", 6),
        normalise=True,
        shared=width * config.integer("moe_num_shared_experts", 2, minimum=0),
        shared_weighted=False,
        width=width,
        corrected="row",
        dense=tuple((layer + 1) % every != 0 or not first <= layer <= end for layer in range(count)),
    )


_MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMax M2",
    names=MIXTRAL.names.but(router_bias="block_sparse_moe.e_score_correction_bias"),
    plan=Blueprint(head_norms="whole"),
    reads={
        **ACTIVATION,
        "turned": Key(
            ("rotary_dim",),
            lambda config: (
                config.integer("rotary_dim") / config.integer("head_dim")
                if "rotary_dim" in config.values
                else share_turned().value(config)
            ),
        ),
        "experts": Key(
            ("num_local_experts", "num_experts_per_tok"),
            lambda config: Experts(
                config.integer("num_local_experts", 256),
                config.integer("num_experts_per_tok", 8),
                normalise=True,
                scores="sigmoid",
                corrected="vector",
            ),
        ),
    },
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 196608,
        "rope_theta": 5e6,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
    },
    renamed={"num_experts": "num_local_experts"},
    neutral={"use_qk_norm": True, "scoring_func": "sigmoid", "use_routing_bias": True, "qk_norm_type": "per_layer"},
)

FAMILIES = (_DEEPSEEK_V2, _DEEPSEEK_V3, _GLM4_MOE, _DOTS1, _ERNIE_MOE, _MINIMAX_M2)
