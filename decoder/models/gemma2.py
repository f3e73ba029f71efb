"""The Gemma 2 family: norms before and after, soft caps, scaled embeddings, and every second layer slides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from paceline.decoder.json_fields import Fields
from paceline.decoder.models.blueprint import LLAMA_NAMES, AssembledConfig, Blueprint
from paceline.decoder.models.family import AssembledFamily
from paceline.decoder.models.known_keys import refuse_others
from paceline.decoder.models.reading import activation, assembled, sliding, translated

GEMMA_NAMES = replace(
    LLAMA_NAMES,
    inner={
        **LLAMA_NAMES.inner,
        "post norm": "post_attention_layernorm",
        "mlp norm": "pre_feedforward_layernorm",
        "post mlp norm": "post_feedforward_layernorm",
    },
)
DEFAULTS: dict[str, object] = {
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


GEMMA_KEYS = frozenset(
    {
        "attention_bias",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "hidden_activation",
        "layer_types",
        "query_pre_attn_scalar",
        "sliding_window",
        "use_bidirectional_attention",
    }
)


class Gemma2Family(AssembledFamily):
    """See `Family`."""

    bare_prefix = "model."

    names = GEMMA_NAMES

    keys = GEMMA_KEYS

    @staticmethod
    def config(fields: Fields, generation: Fields) -> AssembledConfig:
        """Defaults are those of transformers' Gemma2Config, except that sizes have none."""
        caps = {key: cap for key, cap in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0))
                if key not in fields.values}  # fmt: skip
        config = translated(fields, {}, {**DEFAULTS, **caps, "max_position_embeddings": 8192})
        plan = gemma_plan(config, full=lambda layer: layer % 2 == 1)
        return assembled(config, generation, plan)


def gemma_plan(config: Fields, *, full: Callable[[int], bool]) -> Blueprint:
    """What Gemma 2 and 3 have in common. ``full`` says which layers see all, where the file does not."""
    refuse_others(config, {"use_bidirectional_attention": False})
    bias, count = config.flag("attention_bias", False), config.integer("num_hidden_layers")
    return Blueprint(
        norm="rms plus one",
        activation=activation(config, "hidden_activation"),
        post_norms=True,
        windows=sliding(config, default=tuple(not full(layer) for layer in range(count))),
        score_cap=config.optional_number("attn_logit_softcapping") or 0.0,
        logit_cap=config.optional_number("final_logit_softcapping") or 0.0,
        query_scale=config.number("query_pre_attn_scalar") ** -0.5,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        qkv_bias=bias,
        out_bias=bias,
    )
