"""The GPT-2 family: learned positions, LayerNorm, biases everywhere, and products stored as [in, out]."""

from __future__ import annotations

import re

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import AssembledConfig, Blueprint, Names
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.known_keys import refuse_others
from paceline.decoder.models.reading import activation, assembled, translated

RENAMED = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "rms_norm_eps",
}
DEFAULTS: dict[str, object] = {
    "activation_function": "gelu_new",
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50256,
    "bos_token_id": 50256,
}
_NEUTRAL = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}


class Gpt2Family(AssembledFamily):
    """See `Family`."""

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
        config = translated(fields, RENAMED, {**DEFAULTS, "tie_word_embeddings": True})
        refuse_others(config, _NEUTRAL)
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
