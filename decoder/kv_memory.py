"""Whether the keys and values of a decoder can lie in this machine's memory, asked before anything is loaded.

A model's own number of positions is often far more than a machine has room for, and the system says so late: it hands
out memory that it has not got, and kills whoever uses it. Not here: weights, and what a plan counts
(`paceline.placement.planning.footprint`).
"""

import os
from pathlib import Path

from paceline.core.errors import ConfigurationError
from paceline.decoder.kernels.cache_rows import row_elements
from paceline.decoder.options import DecoderOptions
from paceline.decoder.parallel.sharding import Shard

_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GIB = 1 << 30


def cache_bytes(shard: Shard, options: DecoderOptions) -> int:
    """Of the keys and values of every layer, on all ranks."""
    heads = len(shard.key_heads) * shard.degree
    rows = 2 * shard.config.num_layers * options.batch_size * heads * options.rows
    return rows * row_elements(shard.config.head_dim, options.cache_dtype) * options.cache_dtype.itemsize


def machine_bytes(limit: Path = _LIMIT) -> int:
    """Memory of this machine, or of the container this process is in, if that has less."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(container)) if container.isdigit() else total


def check_cache(shard: Shard, options: DecoderOptions, room: int) -> None:
    """Raise ConfigurationError if keys and values alone take more than ``room`` bytes."""
    needed = cache_bytes(shard, options)
    if needed > room:
        raise ConfigurationError(
            f"keys and values of {options.batch_size} slots and {options.n_positions} positions take "
            f"{needed / _GIB:.1f} GiB, and this machine has {room / _GIB:.1f}; load fewer positions (n_positions) or "
            "slots (batch_size), or keep them in 8 bits (kv_cache_dtype='int8')"
        )
