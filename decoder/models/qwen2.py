"""The Qwen 2 and 2.5 family: Llama with biases on query, key and value, and a sliding window in some layers on wish."""

from __future__ import annotations

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, AssembledConfig, Blueprint
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.reading import activation, assembled, sliding, translated


class Qwen2Family(AssembledFamily):
    """See `Family`."""

    bare_prefix = "model."

    names = LLAMA_NAMES

    keys = frozenset({"layer_types", "max_window_layers", "sliding_window", "use_sliding_window"})

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Qwen2Config, except that sizes have none."""
        config = translated(fields, {}, {"hidden_act": "silu", "max_position_embeddings": 32768})
        return assembled(
            config, generation, Blueprint(activation=activation(config), windows=windows(config), qkv_bias=True)
        )


def windows(config: Fields) -> tuple[int, ...]:
    """Of each layer: with ``use_sliding_window``, those from ``max_window_layers`` on slide."""
    count = config.integer("num_hidden_layers")
    if not config.flag("use_sliding_window", False):
        return (0,) * count
    first = config.integer("max_window_layers", 28, minimum=0)
    config = Fields({"sliding_window": 4096, **config.values}, config.where)
    return sliding(config, default=tuple(layer >= first for layer in range(count)))
