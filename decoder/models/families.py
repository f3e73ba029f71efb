"""Llama-like families: RMS norms (except Cohere), rotary embeddings, gated MLPs (except Arcee).

Defaults are those of transformers' configuration classes, except that sizes have no default.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import EXPERT_NAMES, LLAMA_NAMES, Blueprint
from paceline.decoder.models.family import (
    ACTIVATION,
    BIASES,
    Family,
    Key,
    activation,
    experts,
    flag,
    kinds_of_layers,
    number,
    only_activation,
    share_rotated,
    unturned_layers,
    windows,
)


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
    reads={**ACTIVATION, **BIASES, "mlp_bias": flag("mlp_bias")},
    # Rotary frequencies, which old versions of transformers saved although config.json determines them.
    ignored=r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq",
)
_MISTRAL = Family(
    "mistral",
    "Mistral, sliding window",
    reads={**ACTIVATION, "windows": windows()},
    defaults={"max_position_embeddings": 131072, "sliding_window": 4096},
)
MIXTRAL = Family(
    "mixtral",
    "Mixtral, mixture of experts",
    names=LLAMA_NAMES.but(
        router="block_sparse_moe.gate",
        gate="block_sparse_moe.experts.{e}.w1",
        up="block_sparse_moe.experts.{e}.w3",
        down="block_sparse_moe.experts.{e}.w2",
    ),
    reads={
        **ACTIVATION,
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
    reads={**ACTIVATION, "windows": windows(), "rotated_share": share_rotated()},
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000},
)

_MINISTRAL = replace(_MISTRAL, name="ministral", summary="Ministral 8B")


class _Ministral3(Family):
    def translated(self, config: Fields) -> Fields:
        fields = super().translated(config)
        for key in ("rope_parameters", "rope_scaling"):  # the second one counts
            rope = fields.child(key)
            if rope is not None and "llama_4_scaling_beta" in rope.values:
                own = {name: one for name, one in rope.values.items() if name not in _OF_QUERIES}
                said = {"llama_4_scaling_beta": rope.number("llama_4_scaling_beta"),
                        "llama_4_scaling_length": rope.integer("original_max_position_embeddings")}  # fmt: skip
                fields = Fields({**fields.values, key: own, **said}, fields.where)
        return fields


_OF_QUERIES = ("llama_4_scaling_beta", "max_position_embeddings")
_MINISTRAL3 = _Ministral3(
    "ministral3",
    "Ministral 3, text only",
    reads={
        **ACTIVATION,
        "windows": windows(),
        "sharper": Key(
            (),
            lambda config: (
                (config.number("llama_4_scaling_beta"), 0, config.integer("llama_4_scaling_length"))
                if "llama_4_scaling_beta" in config.values
                else None
            ),
        ),
    },
    defaults={
        "head_dim": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
        "sliding_window": None,
        "pad_token_id": 11,
    },
)
_CWM = Family(
    "cwm",
    "Code World Model",
    reads={
        **ACTIVATION,
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
    reads={**ACTIVATION, "qkv_bias": flag("attention_bias"), "mlp_bias": flag("mlp_bias")},
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
    reads={**ACTIVATION, **_QWEN_WINDOWS},
    defaults=_QWEN_DEFAULTS,
)
_MIMO = Family(
    "mimo",
    "MiMo; its MTP layer drafts",
    plan=_QWEN2.plan,
    reads={**ACTIVATION, "qkv_bias": flag("attention_bias", True), **_QWEN_WINDOWS},
    defaults=_QWEN_DEFAULTS,
    mtp=True,
    ignored=r"model\.mtp_layers\..+",  # `paceline.draft.mtp` reads them
)
_QWEN3 = Family(
    "qwen3",
    "Qwen3, dense",
    plan=Blueprint(head_norms="head"),
    reads={**ACTIVATION, **BIASES, **_QWEN_WINDOWS},
    defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    mtp=True,
)
_QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3, mixture of experts",
    names=EXPERT_NAMES,
    plan=Blueprint(head_norms="head"),
    reads={
        **ACTIVATION,
        **BIASES,
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
    names=EXPERT_NAMES.but(
        shared_router="mlp.shared_expert_gate",
        shared_gate="mlp.shared_expert.gate_proj",
        shared_up="mlp.shared_expert.up_proj",
        shared_down="mlp.shared_expert.down_proj",
    ),
    reads={
        **ACTIVATION,
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

# ---- other variants of Llama

_SMOLLM3 = Family(
    "smollm3",
    "SmolLM3, some layers without rotation",
    reads={
        **ACTIVATION,
        **BIASES,
        "mlp_bias": flag("mlp_bias"),
        "unrotated": Key(("no_rope_layers", "no_rope_layer_interval"), unturned_layers),
        "windows": windows(lambda config, layer: unturned_layers(config)[layer], when="use_sliding_window"),
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
GRANITE = Family(
    "granite",
    "Granite 3, dense",
    reads={
        **ACTIVATION,
        **BIASES,
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
        **ACTIVATION,
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
    reads={**ACTIVATION, **{bias: flag("use_bias") for bias in ("qkv_bias", "out_bias", "mlp_bias")}},
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
    reads={"activation": activation(default="relu2"), **BIASES, "mlp_bias": flag("mlp_bias")},
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001},
)
_APERTUS = Family(
    "apertus",
    "Apertus",
    names=LLAMA_NAMES.but(
        norm="attention_layernorm",
        mlp_norm="feedforward_layernorm",
        gate="",
        alpha_p="mlp.act_fn.alpha_p",
        alpha_n="mlp.act_fn.alpha_n",
    ),
    plan=Blueprint(gated=False, head_norms="head"),
    reads={"activation": only_activation("xielu", "xielu"), **BIASES},
    defaults={
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12e6,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 12e6,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "pad_token_id": 3,
    },
    # Constants of the activation.
    ignored=r"model\.layers\.\d+\.mlp\.act_fn\.(beta|eps)",
)
_NANOCHAT = Family(
    "nanochat",
    "nanochat",
    names=LLAMA_NAMES.but(gate="", up="mlp.fc1", down="mlp.fc2"),
    plan=Blueprint(
        norm_weight=False, head_norms="head", late_head_norms=True, backwards=True, gated=False, embedding_norm=True
    ),
    reads={
        **BIASES,
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
    reads={**ACTIVATION, **BIASES},
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
    reads={**ACTIVATION, **BIASES},
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
    reads={**ACTIVATION, **BIASES, "qkv_clip": number("clip_qkv")},
    defaults=_OLMO_DEFAULTS,
)
_OLMOE = Family(
    "olmoe",
    "OLMoE",
    names=EXPERT_NAMES,
    plan=Blueprint(head_norms="whole"),
    reads={**ACTIVATION, **BIASES, "experts": experts("num_experts", count=64, chosen=8)},
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
        **ACTIVATION,
        "windows": windows(_all_but_every, names=("sliding_window_pattern",)),
        "unrotated": Key((), _where_all_is_seen),
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
    reads={**ACTIVATION, "rotated_share": share_rotated(0.5), "qkv_bias": flag("attention_bias", True)},
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
        **ACTIVATION,
        **BIASES,
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
        "unrotated": Key((), _where_no_window_slides),
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
    _MIMO,
    _MISTRAL,
    MIXTRAL,
    _MINISTRAL,
    _MINISTRAL3,
    _CWM,
    _HELIUM,
    _PHI3,
    _SMOLLM3,
    GRANITE,
    _SEED_OSS,
    _ERNIE,
    _ARCEE,
    _APERTUS,
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
