"""Rows of a KV cache in 8 bits: numbers of one head at one position, followed by their common scale.

A row of D numbers is D + 4 elements of int8 or of an 8-bit float; the last four are the bytes of a float32. So a row is
one piece of memory: moving or copying rows (an accepted path, a shared prefix) moves the scales too. A row depends only
on its key or value, so it is the same however a sequence was prefilled. The C++ version (decoder/native/cache_rows.h)
writes the same bytes.

Graphs write rows with `store`. How much memory a cache takes: `paceline.decoder.memory`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.core.errors import ConfigurationError
from paceline.decoder.weights.formats import CACHE_FORMATS, SCALE_BYTES
from paceline.decoder.weights.quantize import rounded

CACHE_DTYPES = {form.value: form.dtype for form in CACHE_FORMATS}
"""Cache types by the names of `DecoderOptions.kv_cache_dtype`."""

NARROW_CACHES = frozenset(CACHE_DTYPES.values())


def row_elements(numbers: int, dtype: torch.dtype) -> int:
    """Return the number of elements of a row of ``numbers`` numbers in a cache of that type."""
    return numbers + SCALE_BYTES if dtype in NARROW_CACHES else numbers


def row_numbers(cache: Tensor) -> int:
    """Return the number of numbers in a row of a cache [..., row]: the width of a head."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype in NARROW_CACHES else 0)


def pack(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert rows [..., D] float32 to a cache's format."""
    if dtype not in NARROW_CACHES:
        return numbers.to(dtype)
    largest = numbers.abs().amax(-1, keepdim=True)
    most = 127.0 if dtype is torch.int8 else torch.finfo(dtype).max
    scale = torch.where(largest > 0, largest / most, torch.ones_like(largest))
    data = rounded(numbers / scale, dtype).view(torch.uint8)
    return torch.cat((data, scale.contiguous().view(torch.uint8)), -1).view(dtype)


def unpack(rows: Tensor) -> Tensor:
    """Convert rows of a cache to float32 [..., D]."""
    if rows.dtype not in NARROW_CACHES:
        return rows.float()
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.uint8).view(torch.float32)
    return rows[..., :-SCALE_BYTES].float() * scale


MAX_EXACT = 1 << 24
"""Integers below this are exact in a compiler that computes them in float32."""


def flat(cache: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Number rows [b, T] of slots [b] in a cache viewed as one long table of rows. -> [b * G * T] int32"""
    total, groups, room, _ = cache.shape
    if total * groups * room > MAX_EXACT:
        raise ConfigurationError(
            f"batch_size: expected at most {MAX_EXACT} cache rows, got {total} slots x {groups} heads x {room} "
            "rows; use fewer slots or positions"
        )
    heads = torch.arange(groups, dtype=torch.int32, device=cache.device)
    first = (slots.unsqueeze(1) * groups + heads) * room  # [b, G]
    return (first.unsqueeze(-1) + rows.unsqueeze(1)).reshape(-1)


def store(cache: Tensor, new: Tensor, *, slots: Tensor, rows: Tensor) -> None:
    """Write new [b, G, T, D] to rows [b, T] of slots [b] of a cache in place: one scatter of rows of D numbers."""
    total, groups, room, width = cache.shape
    wide = cache.view(total * groups * room, width)
    wide.index_put_((flat(cache, slots, rows),), new.reshape(-1, width))
