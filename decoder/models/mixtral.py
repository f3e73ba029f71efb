"""The Mixtral family: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, AssembledConfig, Blueprint, Experts
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.known_keys import refuse_others
from paceline.decoder.models.reading import activation, assembled, everywhere, translated


class MixtralFamily(AssembledFamily):
    """See `Family`."""

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
