"""The GPT-NeoX family (Pythia): attention and MLP side by side, each behind a norm; part of a head is rotated."""

from __future__ import annotations

import re

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import AssembledConfig, Blueprint, Names
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.reading import activation, assembled, share_turned, translated

_RENAMED = {
    "layer_norm_eps": "rms_norm_eps",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
}
_DEFAULTS = {"hidden_act": "gelu", "rms_norm_eps": 1e-5, "eos_token_id": 2, "bos_token_id": 0}


class GptNeoxFamily(AssembledFamily):
    """See `Family`."""

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
        config = translated(fields, _RENAMED, _DEFAULTS)
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
