"""Model families: a row for each, by the ``model_type`` of config.json. A new family is one row.

Defaults are those of transformers' configuration classes, except that the sizes of a network have none.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, Blueprint, Names
from paceline.decoder.models.family import Family, Key, activation, experts, flag, number, share_turned, windows

_BIASES = {"qkv_bias": flag("attention_bias"), "out_bias": flag("attention_bias")}
_ACTIVATION = {"activation": activation()}


def _inner_of_four(config: Fields) -> int:
    return 4 * config.integer("hidden_size")


# ---- as Llama

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
    names=LLAMA_NAMES.but(
        router="mlp.gate",
        gate="mlp.experts.{e}.gate_proj",
        up="mlp.experts.{e}.up_proj",
        down="mlp.experts.{e}.down_proj",
    ),
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

# ---- GPT

_GPT_NAMES = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
_GPT_DEFAULTS = {
    "intermediate_size": _inner_of_four,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50256,
    "bos_token_id": 50256,
}
_GPT_ACTIVATION = {"activation": activation("activation_function", "gelu_new")}

_GPT2 = Family(
    "gpt2",
    "GPT-2",
    names=Names(
        {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"},
        "transformer.h.{i}.",
        {
            "norm": "ln_1",
            "qkv": "attn.c_attn",
            "out": "attn.c_proj",
            "mlp norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
        transposed=True,
    ),
    plan=Blueprint(norm="layer", gated=False, joined="rows", turned=0.0, qkv_bias=True, out_bias=True, mlp_bias=True),
    reads={**_GPT_ACTIVATION, "learned": Key((), lambda config: config.integer("max_position_embeddings"))},
    defaults={**_GPT_DEFAULTS, "tie_word_embeddings": True},
    renamed=_GPT_NAMES,
    bare_prefix="transformer.",
    # Masks, which old versions of transformers saved.
    ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
)
_GPTJ = Family(
    "gptj",
    "GPT-J",
    names=Names(
        {"embedding": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"},
        "transformer.h.{i}.",
        {
            "norm": "ln_1",
            "q": "attn.q_proj",
            "k": "attn.k_proj",
            "v": "attn.v_proj",
            "out": "attn.out_proj",
            "up": "mlp.fc_in",
            "down": "mlp.fc_out",
        },
    ),
    plan=Blueprint(
        norm="layer", gated=False, parallel=True, shared_norm=True, neighbours=True, mlp_bias=True, head_bias=True
    ),
    reads={
        **_GPT_ACTIVATION,
        "turned": Key(
            ("rotary_dim",),
            lambda config: (
                config.integer("rotary_dim", 64) * config.integer("num_attention_heads") / config.integer("hidden_size")
            ),
        ),
    },
    defaults=_GPT_DEFAULTS,
    renamed=_GPT_NAMES,
    bare_prefix="",
    # Masks, which old versions of transformers saved.
    ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",
)
_GPT_NEOX = Family(
    "gpt_neox",
    "GPT-NeoX, Pythia",
    names=Names(
        {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        "gpt_neox.layers.{i}.",
        {
            "norm": "input_layernorm",
            "qkv": "attention.query_key_value",
            "out": "attention.dense",
            "mlp norm": "post_attention_layernorm",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
    ),
    plan=Blueprint(norm="layer", gated=False, joined="heads", mlp_bias=True),
    reads={
        "activation": activation(default="gelu"),
        "parallel": flag("use_parallel_residual", True),
        "turned": share_turned(0.25),
        "qkv_bias": flag("attention_bias", True),
        "out_bias": flag("attention_bias", True),
    },
    defaults={"rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 0},
    renamed={
        "layer_norm_eps": "rms_norm_eps",
        "rotary_pct": "partial_rotary_factor",
        "rotary_emb_base": "rope_theta",
    },
    bare_prefix="",
    # Masks and frequencies, which old versions of transformers saved.
    ignored=r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
)

# ---- OPT and BLOOM

_OPT_FIRST = 2  # rows of the table before position 0, where fairseq kept padding
_OPT = Family(
    "opt",
    "OPT, with norms before",
    names=Names(
        {
            "embedding": "model.decoder.embed_tokens",
            "positions": "model.decoder.embed_positions",
            "norm": "model.decoder.final_layer_norm",
            "head": "lm_head",
        },
        "model.decoder.layers.{i}.",
        {
            "norm": "self_attn_layer_norm",
            "q": "self_attn.q_proj",
            "k": "self_attn.k_proj",
            "v": "self_attn.v_proj",
            "out": "self_attn.out_proj",
            "mlp norm": "final_layer_norm",
            "up": "fc1",
            "down": "fc2",
        },
    ),
    plan=Blueprint(norm="layer", gated=False, turned=0.0, learned_from=_OPT_FIRST),
    reads={
        "activation": activation("activation_function", "relu"),
        "learned": Key((), lambda config: config.integer("max_position_embeddings", 2048) + _OPT_FIRST),
        **{bias: flag("enable_bias", True) for bias in ("qkv_bias", "out_bias", "mlp_bias")},
    },
    defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 2},
    renamed={"ffn_dim": "intermediate_size"},
    neutral={
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "word_embed_proj_dim": lambda config: config.integer("hidden_size"),
    },
)
_BLOOM = Family(
    "bloom",
    "BLOOM, ALiBi",
    names=Names(
        {
            "embedding": "transformer.word_embeddings",
            "embedding norm": "transformer.word_embeddings_layernorm",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
        "transformer.h.{i}.",
        {
            "norm": "input_layernorm",
            "qkv": "self_attention.query_key_value",
            "out": "self_attention.dense",
            "mlp norm": "post_attention_layernorm",
            "up": "mlp.dense_h_to_4h",
            "down": "mlp.dense_4h_to_h",
        },
    ),
    plan=Blueprint(
        norm="layer", activation="gelu tanh", gated=False, joined="heads", turned=0.0, alibi=True, embedding_norm=True,
        qkv_bias=True, out_bias=True, mlp_bias=True,
    ),
    defaults={
        "intermediate_size": _inner_of_four,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "eos_token_id": 2,
        "bos_token_id": 1,
    },
    renamed={
        "n_embed": "hidden_size",
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "seq_length": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    neutral={"apply_residual_connection_post_layernorm": False, "slow_but_exact": False},
    bare_prefix="transformer.",
)  # fmt: skip

MODEL_FAMILIES: dict[str, Family] = {
    row.name: row
    for row in (
        _LLAMA, _QWEN3, _QWEN3_MOE, _QWEN2, _MISTRAL, _MIXTRAL, _PHI3, _GEMMA2, _GEMMA3, _GPT2, _GPTJ, _GPT_NEOX, _OPT,
        _BLOOM,
    )
}  # fmt: skip


def family(model_type: str, where: str = "config.json") -> Family:
    """The row of a family.

    Raises:
        UnknownArchitectureError: there is none for this ``model_type``, which ``where`` names.
    """
    if model_type not in MODEL_FAMILIES:
        raise UnknownArchitectureError(
            f"{where}: model_type {model_type!r} is not supported; supported: {', '.join(MODEL_FAMILIES)}."
        )
    return MODEL_FAMILIES[model_type]
