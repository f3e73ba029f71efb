"""The Llama family: Llama 2 and 3, and what shares their layout. Its configuration and its tensors."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models import config as configs
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.family import Family
from paceline.decoder.parallel.sharding import Shard, Split, TensorSpec

if TYPE_CHECKING:
    from paceline.decoder.kernels.protocol import Kernels
    from paceline.decoder.models.base import DecoderModel
    from paceline.decoder.models.layers import Weights
    from paceline.decoder.parallel.collectives import Collectives

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


class LlamaFamily(Family):
    """See `Family`."""

    bare_prefix = "model."

    # Rotary frequencies, which old versions of transformers saved although config.json determines them.
    ignored = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

    keys = frozenset({"attention_bias", "mlp_bias"})

    @staticmethod
    def config(fields: Fields, generation: Fields) -> ModelConfig:
        """Defaults are those of transformers' LlamaConfig, except that the sizes of the network have none."""
        activation = fields.text("hidden_act", "silu")
        if activation != "silu":
            raise UnknownArchitectureError(
                f"{fields.where}: hidden_act {activation!r} is not supported; supported: silu. Use a model with a "
                "SwiGLU MLP."
            )
        return configs.standard(fields, generation)

    @classmethod
    def tensors(cls, config: ModelConfig) -> dict[str, TensorSpec]:
        """The names that transformers writes. With tied embeddings there is no head of its own."""
        vocabulary, hidden, inner = config.vocab_size, config.hidden_size, config.intermediate_size
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        tied = config.tie_word_embeddings
        specs = {EMBEDDING: TensorSpec((vocabulary, hidden), Split.VOCABULARY, copies=(HEAD,) if tied else ())}
        attention = {
            "q": TensorSpec((queries, hidden), Split.QUERY_ROWS),
            "k": TensorSpec((keys, hidden), Split.KEY_ROWS),
            "v": TensorSpec((keys, hidden), Split.KEY_ROWS),
            "o": TensorSpec((hidden, queries), Split.QUERY_COLUMNS),
        }
        mlp = {
            "gate": TensorSpec((inner, hidden), Split.ROWS),
            "up": TensorSpec((inner, hidden), Split.ROWS),
            "down": TensorSpec((hidden, inner), Split.COLUMNS),
        }
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            specs[f"{prefix}input_layernorm.weight"] = TensorSpec((hidden,))
            specs |= _products(f"{prefix}self_attn.", attention, bias=config.attention_bias)
            specs[f"{prefix}post_attention_layernorm.weight"] = TensorSpec((hidden,))
            specs |= _products(f"{prefix}mlp.", mlp, bias=config.mlp_bias)
        specs[NORM] = TensorSpec((hidden,))
        if not tied:
            specs[HEAD] = TensorSpec((vocabulary, hidden), Split.VOCABULARY)
        return specs

    @classmethod
    def build(
        cls, shard: Shard, weights: Weights, kernels: Kernels, *, positions: int, group: Collectives
    ) -> DecoderModel:
        from paceline.decoder.models.base import DecoderModel
        from paceline.decoder.models.layers import LlamaLayer

        return DecoderModel(
            shard,
            kernels,
            embedding=weights.pop(EMBEDDING),
            layers=[LlamaLayer(shard, weights, kernels, index=i, group=group) for i in range(shard.config.num_layers)],
            norm=weights.pop(NORM),
            head=weights.pop(HEAD, None),
            positions=positions,
            group=group,
        )


def _products(prefix: str, specs: dict[str, TensorSpec], *, bias: bool) -> dict[str, TensorSpec]:
    """The linear layers of a block. A bias is divided like the rows of its weight, and added once after a sum."""
    named: dict[str, TensorSpec] = {}
    for name, spec in specs.items():
        named[f"{prefix}{name}_proj.weight"] = spec
        if bias:
            split = Split.WHOLE if spec.split.summed else spec.split
            named[f"{prefix}{name}_proj.bias"] = TensorSpec(spec.shape[:1], split)
    return named
