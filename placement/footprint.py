"""How many bytes a model takes on each of its cores: weights, cache and scratch, from its configuration alone.

An estimate to plan with, on the high side; nothing is measured. Tensor parallelism cuts the products' weights and the
cache's heads; a key head that cannot be cut is repeated; norms are on every core.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.decoder.model_config import ModelConfig

CODE_BYTES = 96 * (1 << 20)
"""Of loaded programs on every core (Neuron SDK, "Device memory"); they all stay resident."""
_SLACK_ROWS = 256  # a cache's rows behind its last position, for a window or a padded chunk
_CHUNK = 256  # rows of the largest default prefill graph

NUMBER_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
QUANTISED_BYTES = {"int8": 1, "fp8": 1}


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on each core."""

    weights: int
    cache: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.scratch


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model's options its size depends on. ``quantisation``: "none", or a format of the products' weights."""

    amp: str
    quantisation: str
    batch_size: int
    n_positions: int


def footprint(config: ModelConfig, shape: Shape, degree: int, *, caches: int = 1) -> Footprint:
    """Bytes on each of ``degree`` cores. ``caches``: one for each target that shares a draft."""
    wide = NUMBER_BYTES[shape.amp]
    narrow = QUANTISED_BYTES.get(shape.quantisation, wide)
    products, rest = product_weights(config), (2 * config.num_layers + 1) * config.hidden_size
    tables = config.vocab_size * config.hidden_size * (1 if config.tie_word_embeddings else 2)
    weights = _share(products * narrow + tables * wide, degree) + rest * wide
    heads = max(1, -(-config.num_kv_heads // degree))  # of keys; one that is shared by several cores is on each of them
    rows = shape.n_positions + _SLACK_ROWS
    cache = caches * 2 * config.num_layers * heads * config.head_dim * rows * shape.batch_size * wide
    chunk = min(_CHUNK, shape.n_positions)
    hidden = 4 * config.hidden_size + _share(3 * config.intermediate_size, degree)
    scores = _share(config.num_heads, degree) * shape.n_positions
    logits = _share(config.vocab_size, degree) * shape.batch_size * 16  # rows of a verifying window
    return Footprint(weights, cache, CODE_BYTES + 4 * (chunk * (hidden + scores) + logits))


def product_weights(config: ModelConfig) -> int:
    """Numbers in the matrices of all layers."""
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = config.hidden_size * (2 * queries + 2 * keys)
    return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)


def _share(amount: int, degree: int) -> int:
    return -(-amount // degree)
