"""Estimated bytes of a model on each of its cores: weights, cache and scratch, from its configuration only.

An estimate for planning, on the high side; nothing is measured. Tensor parallelism shards the matmuls' weights and the
cache's heads, as in `paceline.decoder.parallel.sharding`; norms are replicated on every core. The fullest core counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.decoder.models import registry
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.options import LoadOptions
from paceline.decoder.parallel.sharding import Shard, layout
from paceline.decoder.weights.formats import SCALE_BYTES
from paceline.placement.planning.instances import CODE_BYTES

_SLACK_ROWS = 256  # of a cache after its last position, for a window or a padded chunk

NUMBER_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
# Bytes of a number, scales included: 8-bit types have a 4-byte scale per row, blocks of 32 contain it.
# In a GGUF file ("gguf"), types other than the last two become Q8_0, the largest of them.
QUANTIZED_BYTES = {"int8": 1.01, "fp8_e4m3": 1.01, "gguf": 34 / 32, "q8_0": 34 / 32, "q4_0": 18 / 32, "q4_1": 20 / 32}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on each core."""

    weights: int
    cache: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.scratch


def footprint(config: ModelConfig, options: LoadOptions, degree: int) -> Footprint:
    """Return the bytes on each of ``degree`` cores."""
    shards = [Shard(config, layout(config, degree, options.group_query_attention), rank) for rank in range(degree)]
    fullest = max(shards, key=lambda shard: len(shard.key_heads))
    wide = NUMBER_BYTES[options.amp]
    narrow = wide if options.quantization is None else QUANTIZED_BYTES[options.quantization]
    tables = wide if options.modules_to_not_convert else narrow
    specs = registry.family(config.model_type).tensors(config).values()
    numbers = (
        fullest.numbers_of(spec) * (narrow if spec.is_product else tables if spec.is_matrix else wide) for spec in specs
    )
    weights = math.ceil(sum(numbers))
    cache = cache_bytes(config, options, degree)
    positions = options.longest(config.max_position_embeddings)
    chunk = min(options.chunks[-1], positions)
    hidden = 4 * config.hidden_size + _share(3 * config.intermediate_size, degree)
    scores = fullest.heads * positions
    logits = _share(config.vocab_size, degree) * options.slots * 16  # of a verifying window
    return Footprint(weights, cache, CODE_BYTES + 4 * (chunk * (hidden + scores) + logits))


def cache_bytes(config: ModelConfig, options: LoadOptions, degree: int) -> int:
    """Return the bytes of one KV cache on the fullest of ``degree`` cores."""
    placed = layout(config, degree, options.group_query_attention)
    tokens = (options.longest(config.max_position_embeddings) + _SLACK_ROWS) * options.slots
    narrow = options.kv_cache_dtype is not None
    more, size = (SCALE_BYTES, 1) if narrow else (0, NUMBER_BYTES[options.amp])
    return size * max(Shard(config, placed, rank).cache_numbers(tokens, more=more) for rank in range(degree))


def _share(amount: int, degree: int) -> int:
    return -(-amount // degree)
