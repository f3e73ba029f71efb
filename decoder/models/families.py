"""Llama-like families: RMS norms (except Cohere), rotary embeddings, gated MLPs (except Arcee).

Defaults are those of transformers' configuration classes, except that sizes have no default.
"""

from __future__ import annotations

import math
from dataclasses import replace

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, Blueprint, Experts, Latent
from paceline.decoder.models.family import (
    Family,
    Key,
    activation,
    experts,
    flag,
    kinds_of_layers,
    number,
    share_turned,
    windows,
)

_BIASES = {"qkv_bias": flag("attention_bias"), "out_bias": flag("attention_bias")}
_ACTIVATION = {"activation": activation()}
_EXPERT_NAMES = LLAMA_NAMES.but(
    router="mlp.gate",
    gate="mlp.experts.{e}.gate_proj",
    up="mlp.experts.{e}.up_proj",
    down="mlp.experts.{e}.down_proj",
)


def _of_layers(config: Fields) -> tuple[bool, ...]:
    """Return for each layer whether it has no rotation."""
    count, given = config.integer("num_hidden_layers"), config.values.get("no_rope_layers")
    if given is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval == 0 for layer in range(count))
    if not isinstance(given, list) or len(given) != count or not set(given) <= {0, 1}:
        raise CheckpointError(
            f"{config.where}: no_rope_layers: expected a list of {count} zeros and ones, got another value; correct "
            "the file"
        )
    return tuple(not turns for turns in given)


def _all_but_every(config: Fields, layer: int) -> bool:
    return (layer + 1) % config.integer("sliding_window_pattern", 4) != 0


def _where_all_is_seen(config: Fields) -> tuple[bool, ...]:
    if config.values.get("sliding_window") is None:
        return ()
    return tuple(not slides for slides in kinds_of_layers(config, _all_but_every))


# ---- Llama and equal architectures

_LLAMA = Family(
    "llama",
    "Llama 2 and 3, SmolLM, and the like",
    reads={**_ACTIVATION, **_BIASES, "mlp_bias": flag("mlp_bias")},
    # Rotary frequencies, which old versions of transformers saved although config.json determines them.
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
_MISTRAL = Family(
    "mistral",
    "Mistral, sliding window",
    reads={**_ACTIVATION, "windows": windows()},
    defaults={"max_position_embeddings": 131072, "sliding_window": 4096},
)
_MIXTRAL = Family(
    "mixtral",
    "Mixtral, mixture of experts",
    names=LLAMA_NAMES.but(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{e}.w1",
        up="block_sparse_moe.experts.{e}.w3",
        down="block_sparse_moe.experts.{e}.w2",
    ),
    reads={
        **_ACTIVATION,
        "windows": windows(),
        "experts": experts("num_local_experts", chosen=2, normalise=True),
    },
    defaults={"max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    renamed={"num_experts": "num_local_experts"},
)
_PHI3 = Family(
    "phi3",
    "Phi-3 and Phi-4, text only",
    names=LLAMA_NAMES.but(q="", k="", v="", gate="", up="", qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
    plan=Blueprint(joined="rows"),
    reads={**_ACTIVATION, "windows": windows(), "turned": share_turned()},
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000},
)

_MINISTRAL = replace(_MISTRAL, name="ministral", summary="Ministral 8B")
_CWM = Family(
    "cwm",
    "Code World Model",
    reads={
        **_ACTIVATION,
        "mlp_bias": flag("mlp_bias"),
        "windows": windows(lambda _, layer: layer % 4 != 0),
    },
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1e6,
            "factor": 16.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "sliding_window": 8192,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    },
)
_HELIUM = Family(
    "helium",
    "Helium",
    plan=Blueprint(neighbours=True),
    reads={**_ACTIVATION, "qkv_bias": flag("attention_bias"), "mlp_bias": flag("mlp_bias")},
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8,
        "rope_theta": 1e5,
        "pad_token_id": 3,
    },
)

# ---- Qwen

_QWEN_WINDOWS = {
    "windows": windows(
        lambda config, layer: layer >= config.integer("max_window_layers", 28, minimum=0),
        names=("max_window_layers",),
        when="use_sliding_window",
    )
}
_QWEN_DEFAULTS = {"max_position_embeddings": 32768, "sliding_window": 4096}

_QWEN2 = Family(
    "qwen2",
    "Qwen 2 and 2.5",
    plan=Blueprint(qkv_bias=True),
    reads={**_ACTIVATION, **_QWEN_WINDOWS},
    defaults=_QWEN_DEFAULTS,
)
_QWEN3 = Family(
    "qwen3",
    "Qwen3, dense",
    plan=Blueprint(head_norms="head"),
    reads={**_ACTIVATION, **_BIASES, **_QWEN_WINDOWS},
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
)
_QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3, mixture of experts",
    names=_EXPERT_NAMES,
    plan=Blueprint(head_norms="head"),
    reads={
        **_ACTIVATION,
        **_BIASES,
        "windows": windows(when="use_sliding_window"),
        "experts": experts("num_local_experts"),
    },
    defaults={"max_position_embeddings": 32768},
    renamed={"moe_intermediate_size": "intermediate_size", "num_experts": "num_local_experts"},
    neutral={"decoder_sparse_step": 1, "mlp_only_layers": []},
)

_QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen 1.5 and 2, mixture of experts with a shared one",
    names=_EXPERT_NAMES.but(
        shared_router="mlp.shared_expert_gate",
        shared_gate="mlp.shared_expert.gate_proj",
        shared_up="mlp.shared_expert.up_proj",
        shared_down="mlp.shared_expert.down_proj",
    ),
    reads={
        **_ACTIVATION,
        "qkv_bias": flag("qkv_bias", True),
        "windows": windows(
            lambda config, layer: layer % 2 == 0 and layer < config.integer("max_window_layers", 28, minimum=0),
            names=("max_window_layers",),
            when="use_sliding_window",
        ),
        "experts": experts("num_experts", count=60, chosen=4, shared="shared_expert_intermediate_size"),
    },
    defaults={**_QWEN_DEFAULTS, "bos_token_id": None, "eos_token_id": None},
    renamed={"moe_intermediate_size": "intermediate_size", "num_local_experts": "num_experts"},
    neutral={"decoder_sparse_step": 1, "mlp_only_layers": []},
)

# ---- experts chosen by a sigmoid and a bias, in later layers alone (DeepSeek V3's way)

_SHARED = {f"shared_{part}": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_DENSE = {f"dense_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
_ROUTED_NAMES = _EXPERT_NAMES.but(router_bias="mlp.gate.e_score_correction_bias", **_SHARED, **_DENSE)


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


_GLM4_MOE = Family(
    "glm4_moe",
    "GLM 4.5 to 4.7, mixture of experts",
    names=_ROUTED_NAMES,
    reads={
        **_ACTIVATION,
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
    ignored=r"model\.layers\.(46|92)\..+",
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
        **_ACTIVATION,
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
    ignored=r"model\.layers\.61\..+",
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
                **({} if config.text("topk_method", "greedy") == "group_limited_greedy" else {"groups": 1}),
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
        **_ACTIVATION,
        **_BIASES,
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
        **_ACTIVATION,
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
    names=_MIXTRAL.names.but(router_bias="block_sparse_moe.e_score_correction_bias"),
    plan=Blueprint(head_norms="whole"),
    reads={
        **_ACTIVATION,
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

# ---- Gemma

_GEMMA2 = Family(
    "gemma2",
    "Gemma 2",
    names=LLAMA_NAMES.but(
        post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        post_mlp_norm="post_feedforward_layernorm",
    ),
    plan=Blueprint(norm="rms plus one", norms="both"),
    reads={
        **_BIASES,
        "activation": activation("hidden_activation", "gelu_pytorch_tanh"),
        "windows": windows(lambda _, layer: layer % 2 == 0),
        "score_cap": number("attn_logit_softcapping", 50.0),
        "logit_cap": number("final_logit_softcapping", 30.0),
        "query_scale": number("query_pre_attn_scalar", 256.0, lambda width: width**-0.5),
        "embedding_scale": Key((), lambda config: config.integer("hidden_size") ** 0.5),
    },
    defaults={
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "bos_token_id": 2,
    },
)


def _local(config: Fields, layer: int) -> bool:
    pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
    return (layer + 1) % pattern != 0


_GEMMA3 = replace(
    _GEMMA2,
    name="gemma3_text",
    summary="Gemma 3, text only",
    plan=replace(_GEMMA2.plan, head_norms="head"),
    reads={
        **_GEMMA2.reads,
        "windows": windows(_local, names=("_sliding_window_pattern", "sliding_window_pattern")),
        "score_cap": number("attn_logit_softcapping"),
        "logit_cap": number("final_logit_softcapping"),
        "local_rope": Key(("rope_local_base_freq",), lambda _: True),
    },
    defaults={
        **_GEMMA2.defaults,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    },
)

_VAULTGEMMA = replace(
    _GEMMA2,
    name="vaultgemma",
    summary="VaultGemma",
    names=LLAMA_NAMES.but(mlp_norm="pre_feedforward_layernorm"),
    plan=Blueprint(norm="rms plus one"),
    defaults={**_GEMMA2.defaults, "pad_token_id": 0},
)

# ---- other variants of Llama

_SMOLLM3 = Family(
    "smollm3",
    "SmolLM3, some layers without rotation",
    reads={
        **_ACTIVATION,
        **_BIASES,
        "mlp_bias": flag("mlp_bias"),
        "unturned": Key(("no_rope_layers", "no_rope_layer_interval"), _of_layers),
        "windows": windows(lambda config, layer: _of_layers(config)[layer], when="use_sliding_window"),
    },
    defaults={
        "max_position_embeddings": 32768,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
        "pad_token_id": 128004,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
)
_GRANITE = Family(
    "granite",
    "Granite 3, dense",
    reads={
        **_ACTIVATION,
        **_BIASES,
        "mlp_bias": flag("mlp_bias"),
        "embedding_scale": number("embedding_multiplier", 1.0),
        "residual_scale": number("residual_multiplier", 1.0),
        "query_scale": number("attention_multiplier", 1.0),
        "logit_scale": number("logits_scaling", 1.0, lambda divisor: 1 / divisor),
    },
)
_SEED_OSS = Family(
    "seed_oss",
    "Seed-OSS",
    reads={
        **_ACTIVATION,
        "qkv_bias": flag("attention_bias", True),
        "out_bias": flag("attention_out_bias"),
        "mlp_bias": flag("mlp_bias"),
    },
    defaults={"head_dim": 128, "max_position_embeddings": 524288, "pad_token_id": 1, "bos_token_id": 0},
)
_ERNIE = Family(
    "ernie4_5",
    "Ernie 4.5, dense",
    plan=Blueprint(neighbours=True),
    reads={**_ACTIVATION, **{bias: flag("use_bias") for bias in ("qkv_bias", "out_bias", "mlp_bias")}},
    defaults={
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
)
_ARCEE = Family(
    "arcee",
    "Arcee AFM",
    names=LLAMA_NAMES.but(gate=""),
    plan=Blueprint(gated=False),
    reads={"activation": activation(default="relu2"), **_BIASES, "mlp_bias": flag("mlp_bias")},
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001},
)
_GEMMA = replace(
    _GEMMA2,
    name="gemma",
    summary="Gemma 1",
    names=LLAMA_NAMES,
    plan=Blueprint(norm="rms plus one"),
    reads={
        **_BIASES,
        "activation": activation(default="gelu_pytorch_tanh"),
        "embedding_scale": _GEMMA2.reads["embedding_scale"],
    },
    defaults={key: one for key, one in _GEMMA2.defaults.items() if key != "sliding_window"} | {"pad_token_id": 0},
)

_NANOCHAT = Family(
    "nanochat",
    "nanochat",
    names=LLAMA_NAMES.but(gate="", up="mlp.fc1", down="mlp.fc2"),
    plan=Blueprint(
        norm_weight=False, head_norms="head", late_head_norms=True, backwards=True, gated=False, embedding_norm=True
    ),
    reads={
        **_BIASES,
        "activation": activation(default="relu2"),
        "logit_cap": number("final_logit_softcapping", 15.0),
    },
    defaults={"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
)


class _Hunyuan(Family):
    def translated(self, config: Fields) -> Fields:
        """Return the file with "dynamic" frequencies that have a fixed ``alpha`` as what they are: another base."""
        fields = super().translated(config)
        for key in ("rope_scaling", "rope_parameters"):
            rope = fields.child(key)
            if rope is None or rope.text("rope_type", rope.text("type", "")) != "dynamic" or "alpha" not in rope.values:
                continue
            width = fields.integer("head_dim", fields.integer("hidden_size") // fields.integer("num_attention_heads"))
            base = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
            other = {"rope_type": "default", "rope_theta": base * rope.number("alpha") ** (width / (width - 2))}
            fields = Fields({**fields.values, key: other}, fields.where)
        return fields


_HUNYUAN = _Hunyuan(
    "hunyuan_v1_dense",
    "Hunyuan, dense",
    names=LLAMA_NAMES.but(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    plan=Blueprint(head_norms="head", late_head_norms=True),
    reads={**_ACTIVATION, **_BIASES},
    defaults={"rms_norm_eps": 1e-5, "pad_token_id": 0},
    neutral={"use_qk_norm": True, "use_cla": False},
)

# ---- OLMo, EXAONE, GLM, Cohere: norms in other positions

_OLMO_DEFAULTS = {"rms_norm_eps": 1e-5, "pad_token_id": 1, "bos_token_id": None, "eos_token_id": 50279}
_AFTER = {"post_norm": "post_attention_layernorm", "post_mlp_norm": "post_feedforward_layernorm"}

_OLMO2 = Family(
    "olmo2",
    "OLMo 2",
    names=LLAMA_NAMES.but(norm="", mlp_norm="", **_AFTER),
    plan=Blueprint(norms="after", head_norms="whole"),
    reads={**_ACTIVATION, **_BIASES},
    defaults=_OLMO_DEFAULTS,
)
_OLMO3 = replace(
    _OLMO2,
    name="olmo3",
    summary="OLMo 3",
    plan=replace(_OLMO2.plan, local_rope=True),
    reads={**_OLMO2.reads, "windows": windows(_all_but_every)},
    defaults={**_OLMO_DEFAULTS, "rope_theta": 5e5, "sliding_window": 4096},
)
_OLMO = Family(
    "olmo",
    "OLMo 1",
    plan=Blueprint(norm="layer", norm_weight=False, norm_bias=False),
    reads={**_ACTIVATION, **_BIASES, "qkv_clip": number("clip_qkv")},
    defaults=_OLMO_DEFAULTS,
)
_OLMOE = Family(
    "olmoe",
    "OLMoE",
    names=_EXPERT_NAMES,
    plan=Blueprint(head_norms="whole"),
    reads={**_ACTIVATION, **_BIASES, "experts": experts("num_experts", count=64, chosen=8)},
    defaults={**_OLMO_DEFAULTS, "max_position_embeddings": 4096},
    renamed={"num_local_experts": "num_experts"},
    neutral={"clip_qkv": None},
)
_EXAONE4 = Family(
    "exaone4",
    "EXAONE 4",
    names=LLAMA_NAMES.but(norm="", mlp_norm="", **_AFTER),
    plan=Blueprint(norms="after", head_norms="head"),
    reads={
        **_ACTIVATION,
        "windows": windows(_all_but_every, names=("sliding_window_pattern",)),
        "unturned": Key((), _where_all_is_seen),
    },
    defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 0},
)
_GLM_DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-7,
    "bos_token_id": None,
    "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338],
}
_GLM = Family(
    "glm",
    "GLM 4, first version",
    names=LLAMA_NAMES.but(gate="", up="", gate_up="mlp.gate_up_proj"),
    plan=Blueprint(neighbours=True),
    reads={**_ACTIVATION, "turned": share_turned(0.5), "qkv_bias": flag("attention_bias", True)},
    defaults=_GLM_DEFAULTS,
)
_GLM4 = replace(
    _GLM,
    name="glm4",
    summary="GLM 4",
    names=_GLM.names.but(post_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm"),
    plan=replace(_GLM.plan, norms="both"),
)
_COHERE = Family(
    "cohere",
    "Command R",
    names=LLAMA_NAMES.but(mlp_norm=""),
    plan=Blueprint(norm="layer", norm_bias=False, parallel=True, shared_norm=True, neighbours=True),
    reads={
        **_ACTIVATION,
        **_BIASES,
        "head_norms": Key(("use_qk_norm",), lambda config: "own" if config.flag("use_qk_norm", False) else ""),
        "logit_scale": Key(("logit_scale",), lambda config: config.number("logit_scale", 0.0625)),
    },
    defaults={
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    renamed={"layer_norm_eps": "rms_norm_eps"},
)


def _where_no_window_slides(config: Fields) -> tuple[bool, ...]:
    slides = config.values.get("sliding_window") is not None
    return tuple(not (slides and one) for one in kinds_of_layers(config, _all_but_every))


_COHERE2 = replace(
    _COHERE,
    name="cohere2",
    summary="Command R7B and Command A",
    reads={
        **{name: key for name, key in _COHERE.reads.items() if name != "head_norms"},
        "windows": windows(_all_but_every, names=("sliding_window_pattern",)),
        "unturned": Key((), _where_no_window_slides),
    },
    defaults={**_COHERE.defaults, "rope_theta": 10000.0, "sliding_window": 4096},
    neutral={"use_qk_norm": False, "use_parallel_block": True, "use_gated_activation": True, "rotary_pct": 1.0},
)

FAMILIES = (
    _LLAMA,
    _QWEN3,
    _QWEN3_MOE,
    _QWEN2,
    _QWEN2_MOE,
    _DEEPSEEK_V2,
    _DEEPSEEK_V3,
    _GLM4_MOE,
    _DOTS1,
    _ERNIE_MOE,
    _MINIMAX_M2,
    _MISTRAL,
    _MIXTRAL,
    _MINISTRAL,
    _CWM,
    _HELIUM,
    _PHI3,
    _SMOLLM3,
    _GRANITE,
    _SEED_OSS,
    _ERNIE,
    _ARCEE,
    _GEMMA,
    _GEMMA2,
    _GEMMA3,
    _VAULTGEMMA,
    _NANOCHAT,
    _HUNYUAN,
    _OLMO,
    _OLMO2,
    _OLMO3,
    _OLMOE,
    _EXAONE4,
    _GLM,
    _GLM4,
    _COHERE,
    _COHERE2,
)
