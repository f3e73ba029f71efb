"""Counter-based Gumbel noise: randomness as a function of (seed, position, token id), not a state.

The same three numbers give the same noise bit for bit on every backend and in a tensor of any shape, because
everything up to the last conversion is 32-bit integer arithmetic: no product of floats is ever added to another
float, so a compiler that contracts multiply-add cannot change a bit.

Not a general random generator: quality was weighed for picking tokens, not for cryptography.

Sources: the mixing function is "lowbias32" (C. Wellons, hash-prospector); that argmax(log p + Gumbel noise) is a draw
from p is the Gumbel-max trick (Gumbel 1954; Maddison et al. 2014). Logarithms are read from a table with linear
interpolation in units of 2**-24, error below 6e-8.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
"""Streams: independent noise for the same seed and position. Coupled drafting reads the TARGET stream."""

_CELLS = 2048  # cells of each table; the low bits that are left over interpolate inside a cell
_SCALE = 1 << 24
_LN2 = round(math.log(2) * _SCALE)
_GOLDEN = -1640531527  # 0x9E3779B9 as a signed word
_STREAM = 0x6C8E9CF5
_ROW = 0x2545F491


@lru_cache(maxsize=1)
def log_table() -> tuple[int, ...]:
    """Two tables of `_CELLS` + 1 integers in units of 2**-24, one behind the other.

    The first holds ln(1 + i / _CELLS). The second holds r(w) = ln(-ln(1 - w) / w) for w = i / (2 * _CELLS), the
    smooth part of the Gumbel quantile in the lower half of the unit interval.
    """
    logs = [round(math.log1p(i / _CELLS) * _SCALE) for i in range(_CELLS + 1)]
    halves = [i / (2 * _CELLS) for i in range(_CELLS + 1)]
    rest = [0] + [round(math.log(-math.log1p(-w) / w) * _SCALE) for w in halves[1:]]
    return tuple(logs + rest)


def row_keys(keys: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Mix seed, position and stream. keys [B, 2] int32, positions [B, T] int32 -> [B, T, 2] int32."""
    low, high = keys[:, :1], keys[:, 1:]
    first = _mix(_mix(low ^ _ROW) + positions * _GOLDEN)
    first = _mix((first ^ high) + stream * _STREAM)
    return torch.stack((first, _mix(first ^ _GOLDEN)), dim=-1)


def bits(rows: Tensor, ids: Tensor) -> Tensor:
    """32 random bits for every row and id. rows [B, T, 2] int32, ids [V] int32 -> [B, T, V] int32."""
    return _mix(_mix(ids * _GOLDEN + rows[..., :1]) ^ rows[..., 1:])


def gumbel(keys: Tensor, positions: Tensor, ids: int | Tensor, *, stream: int = TARGET) -> Tensor:
    """Standard Gumbel noise for token ids [V] int32; a number V means 0 to V - 1.

    -> [B, T, V] float32, between -3.2 and 22.9
    """
    if isinstance(ids, int):
        ids = torch.arange(ids, dtype=torch.int32, device=keys.device)
    return gumbel_of_bits(bits(row_keys(keys, positions, stream), ids))


def uniform(keys: Tensor, positions: Tensor, stream: int) -> Tensor:
    """One uniform number in [0, 1) for every position. -> [B, T] float32, a multiple of 2**-24."""
    zero = torch.zeros(1, dtype=torch.int32, device=keys.device)
    word = bits(row_keys(keys, positions, stream), zero)[..., 0]
    return _shift(word, 8).to(torch.float32) * 2.0**-24


def gumbel_of_bits(word: Tensor) -> Tensor:
    """The Gumbel quantile -ln(-ln(1 - w)) of w = (word + 0.5) / 2**32, with ``word`` read as unsigned.

    In the lower half it is -ln(w) - r(w); in the upper half the inner logarithm is read from the table directly.
    """
    table = torch.tensor(log_table(), dtype=torch.int32, device=word.device)
    upper = word < 0  # the top bit, as the sign
    folded = torch.where(upper, ~word, word)  # w or 1 - w, whichever is the smaller
    high, low = _shift(folded, 16), folded & 0xFFFF
    # Both products are exact, so the sum is rounded once whether or not it is contracted.
    small = high.to(torch.float32) * 2.0**-16 + (low.to(torch.float32) + 0.5) * 2.0**-32
    first = _log_fixed(small, table)
    rest_cell, rest_part = _shift(folded, 20), _shift(folded, 8) & 0xFFF
    rest = _interpolate(table, rest_cell + (_CELLS + 1), rest_part)
    inner = _log_fixed(first.to(torch.float32) * -(2.0**-24), table)
    return torch.where(upper, -inner, -first - rest).to(torch.float32) * 2.0**-24


def _log_fixed(x: Tensor, table: Tensor) -> Tensor:
    """Natural logarithm of positive float32 numbers, as int32 in units of 2**-24."""
    word = x.view(torch.int32)
    exponent = (word >> 23) - 127
    return exponent * _LN2 + _interpolate(table, (word >> 12) & (_CELLS - 1), word & 0xFFF)


def _interpolate(table: Tensor, cell: Tensor, part: Tensor) -> Tensor:
    """Linear interpolation inside a cell; ``part`` counts 4096ths of it."""
    left = table[cell]
    return left + (((table[cell + 1] - left) * part) >> 12)


def _mix(x: Tensor) -> Tensor:
    """lowbias32 on signed words; products wrap around."""
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * -2073254261  # 0x846CA68B
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Logical right shift of signed words."""
    return (x >> by) & ((1 << (32 - by)) - 1)
