"""GPT-like families: LayerNorm, and mostly MLPs without a gate and with biases (defaults: see `families`)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, Blueprint, Names
from paceline.decoder.models.family import (
    Family,
    Fused,
    Key,
    activation,
    flag,
    parts_of,
    rows_of,
    share_rotated,
    windows,
)

if TYPE_CHECKING:
    from paceline.decoder.models.config import ModelConfig


_MLP_OF_FOUR = {"up": "mlp.dense_h_to_4h", "down": "mlp.dense_4h_to_h"}
_TWO_NORMS = {"norm": "input_layernorm", "mlp norm": "post_attention_layernorm"}


def _inner_of_four(config: Fields) -> int:
    return 4 * config.integer("hidden_size")


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
    plan=Blueprint(
        norm="layer", gated=False, joined="rows", rotated_share=0.0, qkv_bias=True, out_bias=True, mlp_bias=True
    ),
    reads={**_GPT_ACTIVATION, "learned": Key((), lambda config: config.integer("max_position_embeddings"))},
    defaults={**_GPT_DEFAULTS, "tie_word_embeddings": True},
    renamed=_GPT_NAMES,
    bare_prefix="transformer.",
    # Masks, which old versions of transformers saved.
    ignored=r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",
)
_GPT_BIGCODE = replace(
    _GPT2,
    name="gpt_bigcode",
    summary="StarCoder 1, SantaCoder",
    names=replace(_GPT2.names, transposed=False),
    reads={
        **_GPT2.reads,
        "activation": activation("activation_function", "gelu_pytorch_tanh"),
        "joined": Key(("multi_query",), lambda config: "rows" if config.flag("multi_query", True) else "heads"),
    },
    defaults={
        **_GPT2.defaults,
        "max_position_embeddings": 1024,
        "num_key_value_heads": lambda config: (
            1 if config.flag("multi_query", True) else config.integer("num_attention_heads")
        ),
    },
)


def _local(config: Fields) -> tuple[int, ...]:
    """Return the window of each layer: ``attention_types`` lists kinds of layers and how often they come."""
    count, window = config.integer("num_hidden_layers"), config.integer("window_size", 256)
    pattern = config.values.get("attention_types") or [[["global", "local"], (count + 1) // 2]]
    try:
        kinds = [kind for some, times in pattern for _ in range(min(times, count)) for kind in some]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) < count or not set(kinds) <= {"global", "local"}:
        raise CheckpointError(
            f"{config.where}: attention_types: expected global and local for {count} layers, got another value; "
            "correct the file"
        )
    return tuple(window if kind == "local" else 0 for kind in kinds[:count])


_GPT_NEO = Family(
    "gpt_neo",
    "GPT-Neo",
    names=Names(
        _GPT2.names.outer,
        "transformer.h.{i}.",
        {
            "norm": "ln_1",
            **parts_of("attn.attention.{}_proj"),
            "out": "attn.attention.out_proj",
            "mlp norm": "ln_2",
            "up": "mlp.c_fc",
            "down": "mlp.c_proj",
        },
    ),
    plan=Blueprint(norm="layer", gated=False, rotated_share=0.0, query_scale=1.0, out_bias=True, mlp_bias=True),
    reads={**_GPT2.reads, "windows": Key(("attention_types", "window_size"), _local)},
    defaults=_GPT2.defaults,
    renamed={
        "num_heads": "num_attention_heads",
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    bare_prefix="transformer.",
    # Masks, which old versions of transformers saved.
    ignored=r"transformer\.h\.\d+\.attn\.attention\.(bias|masked_bias)",
)
_GPTJ = Family(
    "gptj",
    "GPT-J",
    names=Names(
        {"embedding": "transformer.wte", "norm": "transformer.ln_f", "head": "lm_head"},
        "transformer.h.{i}.",
        {
            "norm": "ln_1",
            **parts_of("attn.{}_proj"),
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
        "rotated_share": Key(
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


def _of_codegen(config: ModelConfig) -> dict[str, int]:
    """Rows of its joined matrix: four blocks of queries, values and keys."""
    return dict.fromkeys(("q", "v", "k"), config.num_heads * config.head_dim // 4)


_CODEGEN = replace(
    _GPTJ,
    name="codegen",
    summary="CodeGen 1",
    reads={**_GPTJ.reads},
    fused=(Fused("attn.qkv_proj", _of_codegen),),
    # Masks, which old versions of transformers saved.
    ignored=r"transformer\.h\.\d+\.attn\.(causal_mask|bias|masked_bias)",
)


def _falcon(fields: Fields) -> dict[str, object]:
    """Key heads, and what is computed in parallel, in either of its two architectures."""
    new = fields.flag("new_decoder_architecture", False)
    heads = fields.integer("num_attention_heads")
    if new:
        heads = fields.integer("num_key_value_heads", heads)
    elif fields.flag("multi_query", True):
        heads = 1
    parallel = new or fields.flag("parallel_attn", True)
    norms = fields.integer("num_ln_in_parallel_attn", 2 if new else 1)
    if parallel and not new and norms != 1:
        raise UnknownArchitectureError(
            f"{fields.where}: num_ln_in_parallel_attn: expected 1 without new_decoder_architecture, got {norms}, "
            "which is not supported; use another model"
        )
    return {"num_key_value_heads": heads, "parallel_attn": parallel, "shares_norm": parallel and norms == 1}


def _of_falcon(config: ModelConfig) -> dict[str, int]:
    """Rows of its joined matrix: of each key head its queries, the key and the value."""
    share, width = config.num_heads // config.num_kv_heads, config.head_dim
    return {"q": share * width, "k": width, "v": width}


_FALCON = Family(
    "falcon",
    "Falcon, with rotary embeddings",
    more=_falcon,
    names=Names(
        {"embedding": "transformer.word_embeddings", "norm": "transformer.ln_f", "head": "lm_head"},
        "transformer.h.{i}.",
        {
            **_TWO_NORMS,
            **_MLP_OF_FOUR,
            "q": "self_attention.query",
            "k": "self_attention.key",
            "v": "self_attention.value",
            "out": "self_attention.dense",
        },
    ),
    plan=Blueprint(norm="layer", gated=False),
    reads={
        "activation": activation("activation", "gelu"),
        "parallel": flag("parallel_attn"),
        "shared_norm": Key(
            ("new_decoder_architecture", "multi_query", "num_ln_in_parallel_attn"),
            lambda config: config.flag("shares_norm", False),
        ),
        **{bias: flag("bias") for bias in ("qkv_bias", "out_bias", "mlp_bias")},
    },
    defaults={
        "intermediate_size": _inner_of_four,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "bos_token_id": 11,
        "eos_token_id": 11,
    },
    renamed={
        "num_kv_heads": "num_key_value_heads",
        "ffn_hidden_size": "intermediate_size",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    neutral={"alibi": False, "apply_residual_connection_post_layernorm": False},
    fused=(
        Fused("self_attention.query_key_value", _of_falcon),
        Fused("ln_attn", rows_of("norm")),
        Fused("ln_mlp", rows_of("mlp norm")),
    ),
    bare_prefix="transformer.",
)
_GPT_NEOX = Family(
    "gpt_neox",
    "GPT-NeoX, Pythia",
    names=Names(
        {"embedding": "gpt_neox.embed_in", "norm": "gpt_neox.final_layer_norm", "head": "embed_out"},
        "gpt_neox.layers.{i}.",
        {
            **_TWO_NORMS,
            **_MLP_OF_FOUR,
            "qkv": "attention.query_key_value",
            "out": "attention.dense",
        },
    ),
    plan=Blueprint(norm="layer", gated=False, joined="heads", mlp_bias=True),
    reads={
        "activation": activation(default="gelu"),
        "parallel": flag("use_parallel_residual", True),
        "rotated_share": share_rotated(0.25),
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

_OPT_FIRST = 2  # rows of the table before position 0, which fairseq used for padding
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
            **parts_of("self_attn.{}_proj"),
            "out": "self_attn.out_proj",
            "mlp norm": "final_layer_norm",
            "up": "fc1",
            "down": "fc2",
        },
    ),
    plan=Blueprint(norm="layer", gated=False, rotated_share=0.0, learned_from=_OPT_FIRST),
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
            **_TWO_NORMS,
            **_MLP_OF_FOUR,
            "qkv": "self_attention.query_key_value",
            "out": "self_attention.dense",
        },
    ),
    plan=Blueprint(
        norm="layer", activation="gelu tanh", gated=False, joined="heads", rotated_share=0.0, alibi="bloom",
        embedding_norm=True,
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

_MPT_NEUTRAL = {
    "alibi": True,
    "alibi_bias_max": 8,
    "attn_type": "multihead_attention",
    "attn_uses_sequence_id": False,
    "prefix_lm": False,
    "qk_ln": False,
}
_MPT = Family(
    "mpt",
    "MPT, ALiBi",
    names=Names(
        {"embedding": "transformer.wte", "norm": "transformer.norm_f", "head": "lm_head"},
        "transformer.blocks.{i}.",
        {
            "norm": "norm_1",
            "qkv": "attn.Wqkv",
            "out": "attn.out_proj",
            "mlp norm": "norm_2",
            "up": "ffn.up_proj",
            "down": "ffn.down_proj",
        },
    ),
    plan=Blueprint(
        norm="layer", norm_bias=False, activation="gelu", gated=False, joined="rows", rotated_share=0.0, alibi="mpt"
    ),
    reads={
        "query_scale": Key(("attn_config",), lambda config: _attention_of_mpt(config, "softmax_scale")),
        "qkv_clip": Key((), lambda config: _attention_of_mpt(config, "clip_qkv")),
    },
    defaults={"intermediate_size": _inner_of_four, "rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    renamed={
        "d_model": "hidden_size",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
        "max_seq_len": "max_position_embeddings",
        "layer_norm_epsilon": "rms_norm_eps",
    },
    neutral={
        "norm_type": "low_precision_layernorm",
        "no_bias": True,
        "expansion_ratio": 4,
        "logit_scale": None,
        "embedding_fraction": 1.0,
    },
    nested={"attn_config": frozenset({*_MPT_NEUTRAL, "softmax_scale", "clip_qkv", "attn_impl"})},
    bare_prefix="transformer.",
)


def _attention_of_mpt(config: Fields, name: str) -> float:
    """Return an option of ``attn_config``, 0 for null; other options must have the values that the network computes."""
    fields = config.child("attn_config") or Fields({}, config.where)
    for key, neutral in _MPT_NEUTRAL.items():
        if fields.values.get(key, neutral) != neutral:
            raise UnknownArchitectureError(
                f"{fields.where}: {key}: expected {neutral!r}, got {fields.values[key]!r}, which is not supported; use "
                "another model"
            )
    return fields.optional_number(name) or 0.0


# ---- with rotary embeddings

_ALL_BIASES = ("qkv_bias", "out_bias", "mlp_bias")

_PHI = Family(
    "phi",
    "Phi 1 and 2",
    names=Names(
        {"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
        "model.layers.{i}.",
        {
            "norm": "input_layernorm",
            **parts_of("self_attn.{}_proj"),
            "out": "self_attn.dense",
            "up": "mlp.fc1",
            "down": "mlp.fc2",
        },
    ),
    plan=Blueprint(
        norm="layer",
        gated=False,
        parallel=True,
        shared_norm=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        head_bias=True,
    ),
    reads={"activation": activation(default="gelu_new"), "rotated_share": share_rotated(0.5)},
    defaults={"rms_norm_eps": 1e-5},
    renamed={"layer_norm_eps": "rms_norm_eps"},
    neutral={"qk_layernorm": False},
)
_STARCODER2 = Family(
    "starcoder2",
    "StarCoder 2",
    names=LLAMA_NAMES.but(gate="", up="mlp.c_fc", down="mlp.c_proj"),
    plan=Blueprint(norm="layer", gated=False),
    reads={
        "activation": activation(default="gelu_pytorch_tanh"),
        "windows": windows(),
        **{bias: flag("use_bias", True) for bias in _ALL_BIASES},
    },
    defaults={
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    },
    renamed={"norm_epsilon": "rms_norm_eps"},
)
_STABLELM = Family(
    "stablelm",
    "StableLM",
    plan=Blueprint(norm="layer"),
    reads={
        "activation": activation(),
        "rotated_share": share_rotated(0.25),
        "qkv_bias": flag("use_qkv_bias"),
        "parallel": flag("use_parallel_residual"),
        "shared_norm": flag("use_parallel_residual"),
    },
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0},
    renamed={"layer_norm_eps": "rms_norm_eps"},
    neutral={"qk_layernorm": False},
)

_NEMOTRON = Family(
    "nemotron",
    "Nemotron 3 and 4, Minitron",
    names=LLAMA_NAMES.but(gate=""),
    plan=Blueprint(norm="layer plus one", gated=False),
    reads={
        "activation": activation(default="relu2"),
        "rotated_share": share_rotated(0.5),
        "qkv_bias": flag("attention_bias"),
        "out_bias": flag("attention_bias"),
        "mlp_bias": flag("mlp_bias"),
    },
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 2, "eos_token_id": 3},
    renamed={"norm_eps": "rms_norm_eps"},
)
_PERSIMMON = Family(
    "persimmon",
    "Persimmon",
    names=Names(
        {"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
        "model.layers.{i}.",
        {
            **_TWO_NORMS,
            **_MLP_OF_FOUR,
            "qkv": "self_attn.query_key_value",
            "q norm": "self_attn.q_layernorm",
            "k norm": "self_attn.k_layernorm",
            "out": "self_attn.dense",
        },
    ),
    plan=Blueprint(norm="layer", gated=False, joined="heads", qkv_bias=True, out_bias=True, mlp_bias=True),
    reads={
        "activation": activation(default="relu2"),
        "rotated_share": share_rotated(0.5),
        "head_norms": Key(("qk_layernorm",), lambda config: "head" if config.flag("qk_layernorm", True) else ""),
    },
    defaults={"max_position_embeddings": 16384, "rms_norm_eps": 1e-5},
    renamed={"layer_norm_eps": "rms_norm_eps"},
)
