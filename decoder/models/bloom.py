"""The BLOOM family: ALiBi in place of positions, a norm behind the embedding, LayerNorm and biases everywhere."""

from __future__ import annotations

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import AssembledConfig, Blueprint, Names
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.known_keys import refuse_others
from paceline.decoder.models.reading import assembled, translated

_RENAMED = {
    "n_embed": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "seq_length": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
}
_DEFAULTS = {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 1}


class BloomFamily(AssembledFamily):
    """See `Family`."""

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
        config = translated(fields, _RENAMED, _DEFAULTS)
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
