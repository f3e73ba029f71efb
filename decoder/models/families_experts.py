"""Families with experts in some of their layers, shared experts, or latent attention (DeepSeek's way).

Defaults are those of transformers' configuration classes, except that sizes have no default.
"""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import EXPERT_NAMES, Blueprint, Experts, Latent
from paceline.decoder.models.families import GRANITE, MIXTRAL
from paceline.decoder.models.family import (
    ACTIVATION,
    BIASES,
    Family,
    Fused,
    Key,
    experts,
    flag,
    gate_up,
    only_activation,
    rows_of,
    share_rotated,
    unturned_layers,
    windows,
)

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
        "rotated_share": share_rotated(0.5),
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
    mtp=True,
    ignored=_MTP_LAYERS,
)


class _LatentFamily(Family):
    def translated(self, config: Fields) -> Fields:
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
        nope=config.integer("qk_nope_head_dim"),
        rope=config.integer("qk_rope_head_dim"),
        value=config.integer("v_head_dim"),
    )


def _latent_scale(config: Fields) -> float:
    rope = config.child("rope_scaling") or config.child("rope_parameters") or Fields({}, config.where)
    scale = 1.0
    if rope.text("rope_type", rope.text("type", "default")) != "default":
        most = rope.optional_number("mscale_all_dim") or 0.0
        factor = rope.number("factor", 1.0)
        scale = (0.1 * most * math.log(factor) + 1.0) ** 2 if most and factor > 1.0 else 1.0
    return float(scale * config.integer("head_dim") ** -0.5)


def _in_groups(config: Fields) -> bool:
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise UnknownArchitectureError(
            f"{config.where}: topk_method: expected greedy or group_limited_greedy, got {method!r}, which is not "
            "supported; use another model"
        )
    return method == "group_limited_greedy"


_LATENT_NAMES = _ROUTED_NAMES.but(
    q_a="self_attn.q_a_proj",
    q_a_norm="self_attn.q_a_layernorm",
    q_b="self_attn.q_b_proj",
    kv_a="self_attn.kv_a_proj_with_mqa",
    kv_a_norm="self_attn.kv_a_layernorm",
    kv_b="self_attn.kv_b_proj",
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
        "rotated_share": Key((), lambda config: config.integer("qk_rope_head_dim") / config.integer("head_dim")),
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
    mtp=True,
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
    mtp=False,
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
        "rotated_share": Key(
            ("rotary_dim",),
            lambda config: (
                config.integer("rotary_dim") / config.integer("head_dim")
                if "rotary_dim" in config.values
                else share_rotated().value(config)
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

_GPT_OSS = Family(
    "gpt_oss",
    "gpt-oss",
    names=EXPERT_NAMES.but(router="mlp.router", sinks="self_attn.sinks"),
    plan=Blueprint(sinks=True, mlp_bias=True),
    reads={
        "activation": only_activation("silu", "clamped swish"),
        "qkv_bias": flag("attention_bias", True),
        "out_bias": flag("attention_bias", True),
        "windows": windows(lambda _, layer: layer % 2 == 0),
        "experts": Key(
            ("num_local_experts", "num_experts_per_tok"),
            lambda config: Experts(
                config.integer("num_local_experts", 128),
                config.integer("num_experts_per_tok", 4),
                normalise=True,
                router_bias=True,
            ),
        ),
    },
    defaults={
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "sliding_window": 128,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "bos_token_id": None,
        "eos_token_id": None,
    },
    renamed={"num_experts": "num_local_experts"},
    neutral={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    fused=(
        Fused("mlp.experts.gate_up_proj", lambda _: {"gate": 1, "up": 1}, transposed=True),
        Fused("mlp.experts.down_proj", rows_of("down"), transposed=True),
    ),
)

_GRANITE_MOE = replace(
    GRANITE,
    name="granitemoe",
    summary="Granite 3, mixture of experts",
    names=EXPERT_NAMES.but(
        router="block_sparse_moe.router.layer",
        gate="block_sparse_moe.experts.{e}.gate",
        up="block_sparse_moe.experts.{e}.up",
        down="block_sparse_moe.experts.{e}.down",
    ),
    reads={
        **{name: key for name, key in GRANITE.reads.items() if name != "mlp_bias"},
        "experts": experts("num_local_experts", count=8, chosen=2, normalise=True),
    },
    fused=(
        Fused("block_sparse_moe.input_linear", gate_up),
        Fused("block_sparse_moe.output_linear", rows_of("down")),
    ),
)


class _PhiMoe(Family):
    def translated(self, config: Fields) -> Fields:
        fields = super().translated(config)
        for key in ("rope_scaling", "rope_parameters"):
            rope = fields.child(key)
            if rope is not None and "short_mscale" in rope.values:
                other = {name: one for name, one in rope.values.items() if name not in ("short_mscale", "long_mscale")}
                other["attention_factor"] = rope.number("short_mscale")
                fields = Fields({**fields.values, key: other}, fields.where)
        return fields


_PHIMOE = _PhiMoe(
    "phimoe",
    "Phi 3.5, mixture of experts",
    names=MIXTRAL.names,
    plan=Blueprint(norm="layer"),
    reads={
        **ACTIVATION,
        **BIASES,
        "head_bias": flag("lm_head_bias"),
        "windows": windows(),
        "experts": Key(
            ("num_local_experts", "num_experts_per_tok", "router_jitter_noise"),
            lambda config: Experts(
                config.integer("num_local_experts", 16),
                2,
                normalise=False,
                scores="sparse mixer",
                slack=config.number("router_jitter_noise") if config.values.get("router_jitter_noise") else 0.0,
            ),
        ),
    },
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "router_jitter_noise": 0.01,
    },
    renamed={"num_experts": "num_local_experts"},
    neutral={"num_experts_per_tok": 2},
)

# ---- Llama 4


def _chunks(config: Fields) -> tuple[int, ...]:
    """Return the chunk of each layer, 0 for none: ``layer_types`` lists them; else layers that rotate have one."""
    kinds, unrotated = config.values.get("layer_types"), unturned_layers(config)
    if config.values.get("attention_chunk_size") is None:
        return ()
    if kinds is None:
        kinds = ["full_attention" if one else "chunked_attention" for one in unrotated]
    if not isinstance(kinds, list) or len(kinds) != len(unrotated):
        raise CheckpointError(
            f"{config.where}: layer_types: expected a list of {len(unrotated)} layer types, got another value; correct "
            "the file"
        )
    if not set(kinds) <= {"full_attention", "chunked_attention"}:
        raise UnknownArchitectureError(
            f"{config.where}: layer_types: expected full_attention and chunked_attention, got others; use another model"
        )
    size = config.integer("attention_chunk_size")
    return tuple(size if kind == "chunked_attention" else 0 for kind in kinds)


def _experts_of_llama4(config: Fields) -> Experts:
    count, step = config.integer("num_hidden_layers"), config.integer("interleave_moe_layer_step", 1)
    mixed = config.values.get("moe_layers")
    if mixed is not None and not isinstance(mixed, list):
        raise CheckpointError(f"{config.where}: moe_layers: expected a list of layers, got {mixed!r}; correct the file")
    chosen = range(step - 1, count, step) if mixed is None else mixed
    width = config.integer("moe_intermediate_size")
    return Experts(
        config.integer("num_local_experts", 16),
        1,
        normalise=False,
        shared=width,
        shared_weighted=False,
        width=width,
        scores="sigmoid",
        weighs_inputs=True,
        dense=tuple(layer not in chosen for layer in range(count)),
    )


class _Llama4(Family):
    def translated(self, config: Fields) -> Fields:
        fields = super().translated(config)
        sizes = {
            "intermediate_size": fields.integer("intermediate_size_mlp", 16384),
            "moe_intermediate_size": fields.integer("intermediate_size"),
        }
        return Fields({**fields.values, **sizes}, fields.where)


_LLAMA4 = _Llama4(
    "llama4_text",
    "Llama 4, text only",
    names=EXPERT_NAMES.but(
        router="feed_forward.router",
        **{part: f"feed_forward.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")},
        **{f"shared_{part}": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        **{f"dense_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    ),
    plan=Blueprint(neighbours=True, only_unturned_sharper=True),
    reads={
        **ACTIVATION,
        **BIASES,
        "unrotated": Key(("no_rope_layers", "no_rope_layer_interval"), unturned_layers),
        "chunks": Key(("layer_types", "attention_chunk_size"), _chunks),
        "head_norms": Key(("use_qk_norm",), lambda config: "bare" if config.flag("use_qk_norm", True) else ""),
        "sharper": Key(
            ("attn_temperature_tuning", "attn_scale", "floor_scale"),
            lambda config: (
                (config.number("attn_scale", 0.1), 1, config.integer("floor_scale", 8192))
                if config.flag("attn_temperature_tuning", True)
                else None
            ),
        ),
        "experts": Key(
            (
                "num_local_experts", "moe_layers", "interleave_moe_layer_step", "num_experts_per_tok",
                "intermediate_size_mlp",
            ),
            _experts_of_llama4,
        ),
    },
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "attention_chunk_size": 8192,
    },
    renamed={"num_experts": "num_local_experts"},
    neutral={"num_experts_per_tok": 1},
    fused=(
        Fused("feed_forward.experts.gate_up_proj", gate_up, transposed=True),
        Fused("feed_forward.experts.down_proj", rows_of("down"), transposed=True),
    ),
)  # fmt: skip

FAMILIES = (
    _DEEPSEEK_V2,
    _DEEPSEEK_V3,
    _GLM4_MOE,
    _DOTS1,
    _ERNIE_MOE,
    _MINIMAX_M2,
    _GPT_OSS,
    _GRANITE_MOE,
    _PHIMOE,
    _LLAMA4,
)
