"""Counter-based Gumbel noise: randomness as a function of (seed, position, token id), not a state.

The random value of these three numbers is bitwise identical on every backend and in a tensor of any shape. Accelerators
may compute integers in float32, which is exact below 2**24 only. So a 32-bit value is two 16-bit halves, every product
is one of 16 by 8 bits, and no intermediate reaches 2**24. There are no tables and no gathers.

A row (a seed, a position and a stream) has 64 bits of state: the seed's four 16-bit words go through a permutation in
which the position and the stream are mixed twice, so that no two seeds are windows of one sequence. An id goes through
seven rounds whose keys come from that state. A round multiplies one half by an odd number, keeps the product's low 16
bits as that half, and XORs its upper 16 bits into the other. This is invertible: in one row, no two ids share a value.
Six rounds fail serial tests over adjacent ids for some rows; no failure of seven was found.

Not a general random generator: quality was tested for sampling tokens (docs/decisions/0011), not for cryptography.

Sources: rounds of a product's two halves are those of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2,
3", 2011), with smaller words; that argmax(log p + Gumbel noise) is a sample of p is the Gumbel-max trick (Gumbel 1954;
Maddison et al. 2014); the logarithm's polynomial is that of Cephes' logf; the form of log1p is that of Kahan.
"""

from __future__ import annotations

import torch
from torch import Tensor

TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
"""Streams: independent noise for the same seed and position. Coupled drafting reads the TARGET stream."""

LIMBS = 4
"""Number of 16-bit words of a seed."""

ID_ROUNDS = 7
_LIMB = 0xFFFF
_ROW_ROUNDS = 5  # before and after the position is mixed in for the second time
_MULTIPLIER, _ADDEND, _STEP = 0xB5, 0x9E37, 0x3C6E
_SCALE = -(2.0**-16) * (1 - 2.0**-24)  # so that no uniform number is rounded to 1

# Coefficients of Cephes' logf, from the highest power down.
_POLYNOMIAL = (
    7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
    2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
)  # fmt: skip
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_ROOT_HALF = 0.70710678118654752440


def row_keys(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Return the keys of every row: two 16-bit halves, then the odd 8-bit multipliers of the rounds of its ids.

    seeds [B, 4] int32 16-bit words, positions [B, T] int32 below 2**24 -> [B, T, 2 + 7] int32
    """
    low, high = positions & _LIMB, positions >> 16
    place = torch.stack((low, high ^ (stream << 8)), -1)
    x, y = seeds[:, None, :2] ^ place, seeds[:, None, 2:].expand(-1, positions.shape[1], -1)
    x, y = _permute(x, y, _ROW_ROUNDS)
    x, y = _permute(x ^ place, y, _ROW_ROUNDS)
    more, _ = _permute(x, y, 1)
    halves = torch.cat((y, more), -1)
    multipliers = torch.cat((halves & 0xFF, halves >> 8), -1)[..., :ID_ROUNDS] | 0x81
    return torch.cat((x, multipliers), -1)


def words(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return 32 random bits for every row and id, as the upper and the lower 16.

    rows [B, T, 9] int32, ids [n] or [B, T, n] int32, 0 to 2**24 - 1 -> twice [B, T, n] int32
    """
    high, low = (ids & _LIMB) ^ rows[..., :1], (ids >> 16) ^ rows[..., 1:2]
    for index in range(2, 2 + ID_ROUNDS):
        product = high * rows[..., index : index + 1]
        high, low = low ^ (product >> 8), product & _LIMB
    return high, low


def gumbel(
    seeds: Tensor, positions: Tensor, ids: int | Tensor, *, stream: int = TARGET, traced: bool = False
) -> Tensor:
    """Return standard Gumbel noise for token ids [n] or [B, T, n] int32; a number n means 0 to n - 1.

    ``traced``: use the logarithm of the backend that compiles it, which may differ in the last bits from that of
    another backend. Otherwise use arithmetic only, bitwise identical to the native kernels on every CPU. -> [B, T, n]
    float32, between -2.9 and 22.9
    """
    if isinstance(ids, int):
        ids = torch.arange(ids, dtype=torch.int32, device=seeds.device)
    return gumbel_of_words(*words(row_keys(seeds, positions, stream), ids), traced=traced)


def uniform(seeds: Tensor, positions: Tensor, stream: int) -> Tensor:
    """Return a number in [0, 1) for every position. -> [B, T] float32, a multiple of 2**-24."""
    zero = torch.zeros(1, dtype=torch.int32, device=seeds.device)
    high, low = words(row_keys(seeds, positions, stream), zero)
    return ((high * 256) + (low >> 8)).squeeze(-1).to(torch.float32) * 2.0**-24


def gumbel_of_words(high: Tensor, low: Tensor, *, traced: bool = False) -> Tensor:
    """The Gumbel quantile -ln(-ln(1 - u)) of u = (high * 2**16 + low + 0.5) / 2**32, which is exact to a few ulp.

    Every product that is added is exact, so a compiler that contracts the two operations changes no bit.
    """
    fraction = low.to(torch.float32) * 2.0**-16 + 2.0**-17
    negative = (high.to(torch.float32) + fraction) * _SCALE  # -u
    if traced:
        return -torch.log(-torch.log1p(negative))
    return -_log(_minus_log1p(negative))


def _minus_log1p(negative: Tensor) -> Tensor:
    rest = negative + 1.0
    exponential = _log(rest) / (rest - 1.0) * -negative
    return torch.where(rest == 1.0, -negative, exponential)


def _log(x: Tensor) -> Tensor:
    """ln of positive, normal float32 numbers, to about an ulp. One rounding at a time, as the native kernel does it."""
    mantissa, exponent = torch.frexp(x)
    below = mantissa < _ROOT_HALF
    exponent = (exponent - below.to(torch.int32)).to(torch.float32)
    m = torch.where(below, mantissa + mantissa, mantissa) - 1.0
    square = m * m
    y = torch.full_like(m, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        y = y * m + coefficient
    y = y * m * square
    y = y + exponent * _LN2_LOW
    y = y - square * 0.5
    return (m + y) + exponent * _LN2_HIGH


def _permute(x: Tensor, y: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """Apply rounds of a permutation of four 16-bit words, two and two. [..., 2] int32 each."""
    for index in range(rounds):
        product = x * _MULTIPLIER + (_ADDEND + index * _STEP & _LIMB)
        x, y = y.flip(-1) ^ (product >> 8), product & _LIMB
    return x, y
