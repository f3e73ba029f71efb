"""The OPT family, with norms before attention and MLP: learned positions from row 2 on, LayerNorm, ReLU."""

from __future__ import annotations

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import AssembledConfig, Blueprint, Names
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.known_keys import refuse_others
from paceline.decoder.models.reading import activation, assembled, translated

_FIRST = 2  # rows of the table before position 0, where fairseq kept padding
_DEFAULTS = {"activation_function": "relu", "tie_word_embeddings": True, "eos_token_id": 2, "bos_token_id": 2}
_NEUTRAL = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}


class OptFamily(AssembledFamily):
    """See `Family`."""

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
        config = translated(fields, {"ffn_dim": "intermediate_size"}, {**_DEFAULTS, "rms_norm_eps": 1e-5})
        refuse_others(config, {**_NEUTRAL, "word_embed_proj_dim": config.integer("hidden_size")})
        bias = config.flag("enable_bias", True)
        plan = Blueprint(
            norm="layer",
            activation=activation(config, "activation_function"),
            gated=False,
            learned=config.integer("max_position_embeddings", 2048) + _FIRST,
            learned_from=_FIRST,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
        )
        return assembled(config, generation, plan, share=0.0)
