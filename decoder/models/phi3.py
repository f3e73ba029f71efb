"""The Phi-3 family (and Phi-4's text models): Llama whose query, key and value, and gate and up, are stored as one."""

from __future__ import annotations

from dataclasses import replace

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, AssembledConfig, Blueprint
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.reading import activation, assembled, everywhere, share_turned, translated

_APART = ("q", "k", "v", "gate", "up")


class Phi3Family(AssembledFamily):
    """See `Family`."""

    bare_prefix = "model."

    names = replace(
        LLAMA_NAMES,
        inner={
            **{part: name for part, name in LLAMA_NAMES.inner.items() if part not in _APART},
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
