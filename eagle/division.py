"""An EAGLE head sharded over the ranks of its target: each rank's shard, and whether sharding pays for its collectives.

A head is sharded like a layer of a model (`paceline.decoder.parallel.sharding`): attention and its cache by heads, the
MLP by columns, the output layer of version 3 by the ids that can be drafted, ``fc`` by its outputs, which are gathered.
Tables shared with the target are sharded with it. Formulas are in `paceline.eagle.network`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.parallel import sharding
from paceline.decoder.parallel.sharding import Shard, Split, TensorSpec
from paceline.eagle.config import EagleConfig
from paceline.heads.layouts import SHARED

WORTH_DIVIDING = 16 * 2**20
"""Least number of bytes per drafted token that sharding must save each core. By the figures of a NeuronCore-v2
(`paceline.neuron.chips`) it reads them in the time of the three small collectives that a sharded head adds to a token:
45 us at 0.8 x 410 GB/s.
"""

_SPLITS = {
    "fc.weight": Split.ROWS,
    "lm_head.weight": Split.VOCABULARY,
    "layer.self_attn.q_proj.weight": Split.QUERY_ROWS,
    "layer.self_attn.q_proj.bias": Split.QUERY_ROWS,
    "layer.self_attn.k_proj.weight": Split.KEY_ROWS,
    "layer.self_attn.k_proj.bias": Split.KEY_ROWS,
    "layer.self_attn.v_proj.weight": Split.KEY_ROWS,
    "layer.self_attn.v_proj.bias": Split.KEY_ROWS,
    "layer.self_attn.o_proj.weight": Split.QUERY_COLUMNS,
    "layer.mlp.gate_proj.weight": Split.ROWS,
    "layer.mlp.gate_proj.bias": Split.ROWS,
    "layer.mlp.up_proj.weight": Split.ROWS,
    "layer.mlp.up_proj.bias": Split.ROWS,
    "layer.mlp.down_proj.weight": Split.COLUMNS,
}
"""Tensors not listed are replicated: norms, and biases that are added after a sum over the ranks."""
_LAYER = re.compile(r"^layers\.\d+\.")  # a further layer is sharded as the first


def tensors(config: EagleConfig) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(shape, _SPLITS.get(_LAYER.sub("layer.", name), Split.WHOLE))
        for name, shape in config.shapes().items()
    }


def shard_of(config: EagleConfig, degree: int, rank: int = 0) -> Shard:
    """Return a rank's shard of a head sharded over ``degree`` ranks. Its ``ids`` index the ids that can be drafted."""
    layer = _as_model(config)
    return Shard(layer, sharding.layout(layer, degree), rank)


def part_of(weights: Mapping[str, Tensor], config: EagleConfig, shard: Shard) -> dict[str, Tensor]:
    """Return a rank's shard of the weights of a checkpoint, and their ``part_ids``.

    part_ids  of a head with its own output layer: [n] int64, the target's ids of this rank's rows of it; ids outside
              the target's vocabulary are padding of the last ranks' parts
    """
    specs = tensors(config)
    own = {name: _cut(x, specs[name], shard) if name in specs else x for name, x in weights.items()}
    if config.owns_output:
        every = weights["ids"]
        filled = config.vocab_size + torch.arange(len(shard.ids) * shard.degree - len(every))
        own["part_ids"] = torch.cat([every, filled.to(every.dtype)])[shard.ids.start : shard.ids.stop].clone()
    return own


def embedding_part(embedding: Tensor, degree: int, rank: int) -> Tensor:
    """Return a rank's rows [n, H] of a head's own embedding [V, H], for the same ids as in the target's embedding."""
    rows = -(-embedding.shape[0] // degree)
    own = embedding[rank * rows : (rank + 1) * rows]
    return torch.cat([own, own.new_zeros(rows - len(own), own.shape[1])]).contiguous()


def is_divided(config: EagleConfig, degree: int, divided: object = None) -> bool:
    """Return whether a head is sharded over a target's ranks: ``divided``, or, for None, whether it pays."""
    if divided is None:
        if degree == 1:
            return False
        saved = _read_for_a_token(config, shard_of(config, 1)) - _read_for_a_token(config, shard_of(config, degree))
        return saved >= WORTH_DIVIDING
    if not isinstance(divided, bool):
        raise ConfigurationError(
            f"divided: expected true or false (whether the target's ranks share an EAGLE head), got {divided!r}; "
            "omit it to use the faster one"
        )
    if divided and degree == 1:
        raise ConfigurationError(
            "divided: expected a target with tp_degree=2 or more for divided=True, got one rank; load the target "
            "with a higher tp_degree, or omit divided"
        )
    return divided


def _read_for_a_token(config: EagleConfig, shard: Shard) -> int:
    """Return the bytes of 16-bit matrices read per drafted token. ``fc`` of version 3 reads only a round's real
    features.
    """
    matrices = {name: spec for name, spec in tensors(config).items() if len(spec.shape) == 2}
    if config.version == 3:
        del matrices["fc.weight"]
    return 2 * sum(shard.numbers_of(spec) for spec in matrices.values())


def _cut(x: Tensor, spec: TensorSpec, shard: Shard) -> Tensor:
    part = shard.slice_of(spec)
    if part is None:
        return x
    pieces = []
    for (first, last), size in zip(part.ranges, part.sizes, strict=True):
        shape = list(x.shape)
        shape[part.dim] = size - (last - first)
        pieces += [x.narrow(part.dim, first, last - first), x.new_zeros(shape)]
    return torch.cat(pieces, part.dim)


def _as_model(config: EagleConfig) -> ModelConfig:
    """Return a model of one layer with the sizes of a head; its vocabulary is the ids that can be drafted."""
    sizes = {name: getattr(config, name) for name in SHARED} | {"vocab_size": config.draft_vocab_size}
    return ModelConfig(
        **sizes,
        model_type="llama",
        num_layers=1,
        tie_word_embeddings=False,
        hidden_act="silu",
        eos_token_ids=(),
        pad_token_id=None,
        bos_token_id=None,
    )
