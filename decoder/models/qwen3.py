"""The Qwen3 family, dense: Llama with a norm on every query and key head."""

from __future__ import annotations

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, AssembledConfig, Blueprint
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.qwen2 import windows
from paceline.decoder.models.reading import activation, assembled, translated


class Qwen3Family(AssembledFamily):
    """See `Family`."""

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
            windows=windows(config),
            qkv_bias=bias,
            out_bias=bias,
        )
        return assembled(config, generation, plan)
