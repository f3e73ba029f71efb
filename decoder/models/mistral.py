"""The Mistral family: Llama with a sliding window in every layer."""

from __future__ import annotations

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, AssembledConfig, Blueprint
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.reading import activation, assembled, everywhere, translated


class MistralFamily(AssembledFamily):
    """See `Family`."""

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
