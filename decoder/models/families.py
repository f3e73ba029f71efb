"""Model families in the words of their config.json and of their tensors: one class each. Llama is in `llama.py`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from paceline.core.errors import CheckpointError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, AssembledConfig, Blueprint, Experts, Names
from paceline.decoder.models.config import refuse_others
from paceline.decoder.models.family import (
    AssembledFamily,
    activation,
    assembled,
    everywhere,
    share_turned,
    sliding,
    translated,
)


class MistralFamily(AssembledFamily):
    """The Mistral family: Llama with a sliding window in every layer."""

    bare_prefix = "model."
    names = LLAMA_NAMES
    keys = frozenset({"layer_types", "sliding_window"})

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' MistralConfig, except that sizes have none."""
        defaults: dict[str, object] = {"hidden_act": "silu", "max_position_embeddings": 131072}
        if "sliding_window" not in fields.values:  # an explicit null means none
            defaults["sliding_window"] = 4096
        config = translated(fields, {}, defaults)
        return assembled(config, generation, Blueprint(activation=activation(config), windows=everywhere(config)))


class MixtralFamily(AssembledFamily):
    """The Mixtral family: Mistral with a mixture of experts in every layer."""

    bare_prefix = "model."
    names = replace(
        LLAMA_NAMES,
        inner={
            **LLAMA_NAMES.inner,
            "router": "block_sparse_moe.gate",
            "gate": "block_sparse_moe.experts.{e}.w1",
            "up": "block_sparse_moe.experts.{e}.w3",
            "down": "block_sparse_moe.experts.{e}.w2",
        },
    )
    keys = frozenset(
        {"capacity_factor", "layer_types", "num_experts", "num_experts_per_tok", "num_local_experts", "sliding_window"}
    )

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' MixtralConfig, except that sizes have none."""
        defaults = {"hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5}
        config = translated(fields, {"num_experts": "num_local_experts"}, defaults)
        refuse_others(config, {"capacity_factor": None})
        experts = Experts(config.integer("num_local_experts"), config.integer("num_experts_per_tok", 2), normalise=True)
        plan = Blueprint(activation=activation(config), experts=experts, windows=everywhere(config))
        return assembled(config, generation, plan)


class Qwen2Family(AssembledFamily):
    """The Qwen 2 and 2.5 family: Llama with biases on query, key and value, and, on wish, a window in some layers."""

    bare_prefix = "model."
    names = LLAMA_NAMES
    keys = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Qwen2Config, except that sizes have none."""
        config = translated(fields, {}, {"hidden_act": "silu", "max_position_embeddings": 32768})
        return assembled(
            config,
            generation,
            Blueprint(activation=activation(config), windows=_qwen_windows(config), qkv_bias=True),
        )


def _qwen_windows(config: Fields) -> tuple[int, ...]:
    """Of each layer: with ``use_sliding_window``, those from ``max_window_layers`` on slide."""
    count = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window", False):
        return (0,) * count
    first = config.integer("max_window_layers", 28, minimum=0)
    config = Fields({"sliding_window": 4096, **config.values}, config.where)
    return sliding(config, default=tuple(layer >= first for layer in range(count)))


class Qwen3Family(AssembledFamily):
    """The Qwen3 family, dense: Llama with a norm on every query and key head."""

    bare_prefix = "model."
    names = LLAMA_NAMES
    keys = frozenset({"attention_bias", "layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Qwen3Config, except that sizes have none."""
        config = translated(fields, {}, {"head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 32768})
        bias = config.flag("attention_bias", False)
        plan = Blueprint(
            activation=activation(config),
            head_norms=True,
            windows=_qwen_windows(config),
            qkv_bias=bias,
            out_bias=bias,
        )
        return assembled(config, generation, plan)


_QWEN3_MOE_NEUTRAL = {"decoder_sparse_step": 1, "mlp_only_layers": [], "capacity_factor": None}


class Qwen3MoeFamily(AssembledFamily):
    """The Qwen3 family with a mixture of experts in every layer."""

    bare_prefix = "model."
    names = replace(
        LLAMA_NAMES,
        inner={
            **LLAMA_NAMES.inner,
            "router": "mlp.gate",
            "gate": "mlp.experts.{e}.gate_proj",
            "up": "mlp.experts.{e}.up_proj",
            "down": "mlp.experts.{e}.down_proj",
        },
    )
    keys = frozenset(
        {
            "attention_bias",
            "capacity_factor",
            "decoder_sparse_step",
            "layer_types",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "sliding_window",
            "use_sliding_window",
        }
    )

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Qwen3MoeConfig, except that sizes have none."""
        values = {key: value for key, value in fields.values.items() if key != "intermediate_size"}
        renamed = {"moe_intermediate_size": "intermediate_size", "num_local_experts": "num_experts"}
        defaults = {"hidden_act": "silu", "max_position_embeddings": 32768}
        config = translated(Fields(values, fields.where), renamed, defaults)
        refuse_others(config, _QWEN3_MOE_NEUTRAL)
        bias = config.flag("attention_bias", False)
        count = config.integer("num_hidden_layers")
        experts = Experts(
            config.integer("num_experts"), config.integer("num_experts_per_tok"), config.flag("norm_topk_prob", False)
        )
        plan = Blueprint(
            activation=activation(config),
            experts=experts,
            head_norms=True,
            windows=everywhere(config) if config.flag("use_sliding_window", False) else (0,) * count,
            qkv_bias=bias,
            out_bias=bias,
        )
        return assembled(config, generation, plan)


_PHI3_APART = ("q", "k", "v", "gate", "up")


class Phi3Family(AssembledFamily):
    """The Phi-3 family (and Phi-4's text models): Llama whose query, key and value, and gate and up, are one."""

    bare_prefix = "model."
    names = replace(
        LLAMA_NAMES,
        inner={
            **{part: name for part, name in LLAMA_NAMES.inner.items() if part not in _PHI3_APART},
            "qkv": "self_attn.qkv_proj",
            "gate up": "mlp.gate_up_proj",
        },
    )
    keys = frozenset({"layer_types", "sliding_window"})

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Phi3Config, except that sizes have none."""
        defaults = {"hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "eos_token_id": 32000}
        config = translated(fields, {}, defaults)
        plan = Blueprint(activation=activation(config), joined="rows", windows=everywhere(config))
        return assembled(config, generation, plan, share=share_turned(config))


_GEMMA_NAMES = replace(
    LLAMA_NAMES,
    inner={
        **LLAMA_NAMES.inner,
        "post norm": "post_attention_layernorm",
        "mlp norm": "pre_feedforward_layernorm",
        "post mlp norm": "post_feedforward_layernorm",
    },
)
_GEMMA_DEFAULTS: dict[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


_GEMMA_KEYS = frozenset(
    {
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        "layer_types",
        "query_pre_attn_scalar",
        "sliding_window",
        "use_bidirectional_attention",
    }
)


class Gemma2Family(AssembledFamily):
    """The Gemma 2 family: norms before and after, soft caps, scaled embeddings, and every second layer slides."""

    bare_prefix = "model."
    names = _GEMMA_NAMES
    keys = _GEMMA_KEYS

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Gemma2Config, except that sizes have none."""
        caps = {key: cap for key, cap in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
                if key not in fields.values}  # fmt: skip
        config = translated(fields, {}, {**_GEMMA_DEFAULTS, **caps, "max_position_embeddings": 8192})
        plan = _gemma_plan(config, full=lambda layer: layer % 2 == 1)
        return assembled(config, generation, plan)


def _gemma_plan(config: Fields, *, full: Callable[[int], bool]) -> Blueprint:
    """What Gemma 2 and 3 have in common. ``full`` says which layers see all, where the file does not."""
    refuse_others(config, {"use_bidirectional_attention": False})
    bias, count = config.flag("attention_bias", False), config.integer("num_hidden_layers")
    return Blueprint(
        norm="rms plus one",
        activation=activation(config, "hidden_activation"),
        post_norms=True,
        windows=sliding(config, default=tuple(not full(layer) for layer in range(count))),
        score_cap=config.optional_number("attn_logit_softcapping") or 0.0,
        logit_cap=config.optional_number("final_logit_softcapping") or 0.0,
        query_scale=config.number("query_pre_attn_scalar") ** -0.5,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        qkv_bias=bias,
        out_bias=bias,
    )


class Gemma3Family(AssembledFamily):
    """The text models of the Gemma 3 family: Gemma 2 with head norms, and a rotation of its own where layers slide."""

    bare_prefix = "model."
    names = _GEMMA_NAMES
    keys = _GEMMA_KEYS | {"_sliding_window_pattern", "rope_local_base_freq", "sliding_window_pattern"}

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Gemma3TextConfig, except that sizes have none."""
        config = translated(fields, {}, {**_GEMMA_DEFAULTS, "max_position_embeddings": 131072})
        pattern = config.integer("sliding_window_pattern", config.integer("_sliding_window_pattern", 6))
        full, local = _gemma_rotations(config)
        plan = replace(_gemma_plan(config, full=lambda layer: (layer + 1) % pattern == 0), head_norms=True)
        slow = assembled(local, generation, plan).rope
        return assembled(full, generation, replace(plan, local_rope=slow))


def _gemma_rotations(config: Fields) -> tuple[Fields, Fields]:
    """The file as a layer that sees all reads it, and as one that slides: each with one set of rope settings.

    transformers 5 writes both below ``rope_parameters``; 4 wrote ``rope_theta``, ``rope_scaling`` and
    ``rope_local_base_freq``.
    """
    rest = {key: value for key, value in config.values.items() if key not in ("rope_parameters", "rope_scaling")}
    both = config.child("rope_parameters")
    if both is not None and {"full_attention", "sliding_attention"} & set(both.values):
        sides = both.child("full_attention"), both.child("sliding_attention")
        if sides[0] is None or sides[1] is None or len(both.values) > 2:
            raise CheckpointError(f"{both.where}: full_attention and sliding_attention must both be there, alone.")
        full, local = ({**rest, "rope_parameters": side.values} for side in sides if side is not None)
    else:
        base = config.number("rope_theta", 1e6), config.number("rope_local_base_freq", 1e4)
        full = {**config.values, "rope_theta": base[0]}
        local = {**rest, "rope_theta": base[1]}
    return Fields(full, config.where), Fields(local, config.where)


_GPT_RENAMED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
_GPT_DEFAULTS: dict[str, object] = {
    "activation_function": "gelu_new",
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50256,
    "bos_token_id": 50256,
}
_GPT2_NEUTRAL = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


class GPT2Family(AssembledFamily):
    """The GPT-2 family: learned positions, LayerNorm, biases everywhere, and products stored as [in, out]."""

    # Masks, which old versions of transformers saved.
    ignored = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")
    bare_prefix = "transformer."
    names = Names(
        {
            "embedding": "transformer.wte",
            "positions": "transformer.wpe",
            "norm": "transformer.ln_f",
            "head": "lm_head",
        },
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
    )
    keys = frozenset(
        {
            "activation_function",
            "layer_norm_epsilon",
            "n_embd",
            "n_head",
            "n_inner",
            "n_layer",
            "n_positions",
            "scale_attn_by_inverse_layer_idx",
            "scale_attn_weights",
        }
    )

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' GPT2Config, except that sizes have none."""
        config = translated(fields, _GPT_RENAMED, {**_GPT_DEFAULTS, "tie_word_embeddings": True})
        refuse_others(config, _GPT2_NEUTRAL)
        config = translated(config, {}, {"intermediate_size": 4 * config.integer("hidden_size")})
        plan = Blueprint(
            norm="layer",
            activation=activation(config, "activation_function"),
            gated=False,
            joined="rows",
            learned=config.integer("max_position_embeddings"),
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
        )
        return assembled(config, generation, plan, share=0.0)


class GPTJFamily(AssembledFamily):
    """The GPT-J family: attention and MLP side by side behind one norm; rotary pairs are neighbours."""

    # Masks, which old versions of transformers saved.
    ignored = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)")
    names = Names(
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
    )
    keys = frozenset(
        {
            "activation_function",
            "layer_norm_epsilon",
            "n_embd",
            "n_head",
            "n_inner",
            "n_layer",
            "n_positions",
            "rotary_dim",
        }
    )

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' GPTJConfig, except that sizes have none."""
        config = translated(fields, _GPT_RENAMED, _GPT_DEFAULTS)
        config = translated(config, {}, {"intermediate_size": 4 * config.integer("hidden_size")})
        width = max(1, config.integer("hidden_size") // config.integer("num_attention_heads"))
        plan = Blueprint(
            norm="layer",
            activation=activation(config, "activation_function"),
            gated=False,
            parallel=True,
            shared_norm=True,
            neighbours=True,
            mlp_bias=True,
            head_bias=True,
        )
        return assembled(config, generation, plan, share=config.integer("rotary_dim", 64) / width)


_NEOX_RENAMED = {
    "layer_norm_eps": "rms_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}
_NEOX_DEFAULTS = {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 0}


class GPTNeoXFamily(AssembledFamily):
    """The GPT-NeoX family (Pythia): attention and MLP side by side, each behind a norm; part of a head is rotated."""

    # Masks and frequencies, which old versions of transformers saved.
    ignored = re.compile(r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)")
    names = Names(
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
    )
    keys = frozenset({"attention_bias", "layer_norm_eps", "rotary_emb_base", "rotary_pct", "use_parallel_residual"})

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' GPTNeoXConfig, except that sizes have none."""
        config = translated(fields, _NEOX_RENAMED, _NEOX_DEFAULTS)
        bias = config.flag("attention_bias", True)
        plan = Blueprint(
            norm="layer",
            activation=activation(config),
            gated=False,
            parallel=config.flag("use_parallel_residual", True),
            joined="heads",
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=True,
        )
        return assembled(config, generation, plan, share=share_turned(config, 0.25))


_OPT_FIRST = 2  # rows of the table before position 0, where fairseq kept padding
_OPT_DEFAULTS = {"activation_function": "relu", "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 2}
_OPT_NEUTRAL = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}


class OPTFamily(AssembledFamily):
    """The OPT family, with norms before attention and MLP: learned positions from row 2 on, LayerNorm, ReLU."""

    bare_prefix = "model."
    names = Names(
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
    )
    keys = frozenset(
        {
            "_remove_final_layer_norm",
            "activation_function",
            "do_layer_norm_before",
            "enable_bias",
            "ffn_dim",
            "layer_norm_elementwise_affine",
            "word_embed_proj_dim",
        }
    )

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' OPTConfig, except that sizes have none."""
        config = translated(fields, {"ffn_dim": "intermediate_size"}, {**_OPT_DEFAULTS, "rms_norm_eps": 1e-5})
        refuse_others(config, {**_OPT_NEUTRAL, "word_embed_proj_dim": config.integer("hidden_size")})
        bias = config.flag("enable_bias", True)
        plan = Blueprint(
            norm="layer",
            activation=activation(config, "activation_function"),
            gated=False,
            learned=config.integer("max_position_embeddings", 2048) + _OPT_FIRST,
            learned_from=_OPT_FIRST,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )
        return assembled(config, generation, plan, share=0.0)


_BLOOM_RENAMED = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "seq_length": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
}
_BLOOM_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1}


class BloomFamily(AssembledFamily):
    """The BLOOM family: ALiBi in place of positions, a norm behind the embedding, LayerNorm and biases everywhere."""

    bare_prefix = "transformer."
    names = Names(
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
    )
    keys = frozenset(
        {
            "apply_residual_connection_post_layernorm", "layer_norm_epsilon", "n_embed", "n_head", "n_layer",
            "seq_length", "slow_but_exact",
        }
    )  # fmt: skip

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' BloomConfig, except that sizes have none; 2048 positions."""
        config = translated(fields, _BLOOM_RENAMED, _BLOOM_DEFAULTS)
        refuse_others(config, {"apply_residual_connection_post_layernorm": False, "slow_but_exact": False})
        config = translated(config, {}, {"intermediate_size": 4 * config.integer("hidden_size")})
        plan = Blueprint(
            norm="layer",
            activation="gelu tanh",
            gated=False,
            joined="heads",
            alibi=True,
            embedding_norm=True,
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
        )
        return assembled(config, generation, plan, share=0.0)
