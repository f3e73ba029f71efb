"""The Qwen3 family with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, AssembledConfig, Blueprint, Experts
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.known_keys import refuse_others
from paceline.decoder.models.reading import activation, assembled, everywhere, translated

_NEUTRAL = {"decoder_sparse_step": 1, "mlp_only_layers": [], "capacity_factor": None}


class Qwen3MoeFamily(AssembledFamily):
    """See `Family`."""

    bare_prefix = "model."

    names = replace(
        LLAMA_NAMES,
        inner={
            **LLAMA_NAMES.inner,
            "router": "mlp.gate",
            "gate": "mlp.experts.{e}.gate_proj",
            "up": "mlp.experts.{e}.up_proj",
            "down": "mlp.experts.{e}.down_proj",
        },
    )

    keys = frozenset(
        {
            "attention_bias",
            "capacity_factor",
            "decoder_sparse_step",
            "layer_types",
            "mlp_only_layers",
            "moe_intermediate_size",
            "norm_topk_prob",
            "num_experts",
            "num_experts_per_tok",
            "num_local_experts",
            "sliding_window",
            "use_sliding_window",
        }
    )

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Qwen3MoeConfig, except that sizes have none."""
        values = {key: value for key, value in fields.values.items() if key != "intermediate_size"}
        renamed = {"moe_intermediate_size": "intermediate_size", "num_local_experts": "num_experts"}
        defaults = {"hidden_act": "silu", "max_position_embeddings": 32768}
        config = translated(Fields(values, fields.where), renamed, defaults)
        refuse_others(config, _NEUTRAL)
        bias = config.flag("attention_bias", False)
        count = config.integer("num_hidden_layers")
        experts = Experts(
            config.integer("num_experts"), config.integer("num_experts_per_tok"), config.flag("norm_topk_prob", False)
        )
        plan = Blueprint(
            activation=activation(config),
            experts=experts,
            head_norms=True,
            windows=everywhere(config) if config.flag("use_sliding_window", False) else (0,) * count,
            qkv_bias=bias,
            out_bias=bias,
        )
        return assembled(config, generation, plan)
