"""Memory of a decoder against that of this machine, before anything is loaded and without PyTorch.

A model's own number of positions often exceeds the memory, and the system reports that late, by killing the process.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from math import prod
from pathlib import Path

from paceline.core.errors import ConfigurationError
from paceline.decoder.models import registry
from paceline.decoder.options import DecoderOptions, LoadOptions, decoder_options
from paceline.decoder.parallel.sharding import Shard
from paceline.decoder.weights.formats import SCALE_BYTES

log = logging.getLogger("paceline")

_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GIB = 1 << 30


def cache_bytes(shard: Shard, options: DecoderOptions) -> int:
    """Return the bytes of the keys and values of every layer, on all ranks."""
    rows = shard.degree * options.batch_size * options.rows
    if options.load.kv_cache_dtype is not None:
        return shard.cache_numbers(rows, more=SCALE_BYTES)
    return shard.cache_numbers(rows) * (4 if options.load.amp == "f32" else 2)


def machine_bytes(limit: Path = _LIMIT) -> int:
    """Return the memory of this machine, or of this process's container if that is less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(container)) if container.isdigit() else total


def check_cache(shard: Shard, options: DecoderOptions, room: int) -> None:
    needed = cache_bytes(shard, options)
    if needed > room:
        raise ConfigurationError(
            f"keys and values of {options.batch_size} slots and {options.n_positions} positions take "
            f"{needed / _GIB:.1f} GiB, and this machine has {room / _GIB:.1f}; load fewer positions (n_positions) or "
            "slots (batch_size), or keep them in 8 bits (kv_cache_dtype='int8')"
        )


_SPARE, _TABLES = 8, 16
"""The share of the memory for everything else; bytes of the tables for each dimension of a head."""
_FEWEST = 2048  # positions: with less room than for these, loading fails


def fitting_options(shard: Shard, load: LoadOptions, room: int) -> DecoderOptions:
    """Complete options that name no length: with the model's own, or half of it, and so on, until keys and values and
    the tables of rotations fit into ``room`` bytes next to the weights, with an eighth to spare.
    """
    config = shard.config
    trained = positions = config.max_position_embeddings
    numbers = sum(prod(spec.shape) for spec in registry.family(config.model_type).tensors(config).values())
    room -= room // _SPARE + numbers * (1 if load.quantization else 4 if load.amp == "f32" else 2)
    options = decoder_options(load, trained, shard.layout)
    while cache_bytes(shard, options) + positions * config.head_dim * _TABLES > room and positions // 2 >= _FEWEST:
        positions //= 2
        options = decoder_options(replace(load, n_positions=positions), trained, shard.layout)
    if positions < trained:
        log.warning(
            "all %d positions of the model do not fit into this machine's memory: loaded for %d; "
            "name another length with n_positions",
            trained,
            positions,
        )
    return options
