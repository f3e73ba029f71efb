"""The GPT-J family: attention and MLP side by side behind one norm; rotary pairs are neighbours."""

from __future__ import annotations

import re

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import AssembledConfig, Blueprint, Names
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.gpt2 import DEFAULTS, RENAMED
from paceline.decoder.models.reading import activation, assembled, translated


class GptjFamily(AssembledFamily):
    """See `Family`."""

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
        config = translated(fields, RENAMED, DEFAULTS)
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
