"""The noise is a function of (seed, position, id) alone, equal to a reference in plain integers, and is Gumbel's."""

import math
import random

import pytest
import torch
from scipy import stats

from paceline.core import noise
from paceline.core.sampling import seed_row
from paceline.core.types import SamplingTensors

WORD = 0xFFFFFFFF
SCALE = 1 << 24
CELLS = 2048


def mix(x: int) -> int:
    """lowbias32."""
    x ^= x >> 16
    x = x * 0x7FEB352D & WORD
    x ^= x >> 15
    x = x * 0x846CA68B & WORD
    return x ^ x >> 16


def word_of(seed: int, position: int, token: int, *, stream: int) -> int:
    low, high = seed & WORD, seed >> 32 & WORD
    first = mix((mix(low ^ 0x2545F491) + position * 0x9E3779B9) & WORD)
    first = mix(((first ^ high) + stream * 0x6C8E9CF5) & WORD)
    second = mix(first ^ 0x9E3779B9)
    return mix(mix((token * 0x9E3779B9 + first) & WORD) ^ second)


def nearest_float(numerator: int, bits: int) -> tuple[int, int]:
    """mantissa of 24 bits and exponent of numerator / 2**bits as float32, rounded half to even."""
    size = numerator.bit_length()
    if size <= 24:
        return numerator << (24 - size), size - 1 - bits
    drop = size - 24
    kept, rest, half = numerator >> drop, numerator & ((1 << drop) - 1), 1 << (drop - 1)
    kept += rest > half or (rest == half and kept & 1)
    if kept == 1 << 24:
        kept, size = kept >> 1, size + 1
    return kept, size - 1 - bits


def log_fixed(numerator: int, bits: int) -> int:
    table = noise.log_table()
    mantissa, exponent = nearest_float(numerator, bits)
    fraction = mantissa & (SCALE // 2 - 1)
    return exponent * round(math.log(2) * SCALE) + between(table, fraction >> 12, fraction & 0xFFF)


def between(table: tuple[int, ...], cell: int, part: int) -> int:
    return table[cell] + ((table[cell + 1] - table[cell]) * part >> 12)


def gumbel_of(word: int) -> float:
    upper = word >> 31
    folded = word ^ WORD if upper else word
    first = log_fixed(2 * folded + 1, 33)
    if upper:
        units = -log_fixed(-first, 24)
    else:
        units = -first - between(noise.log_table()[CELLS + 1 :], folded >> 20, folded >> 8 & 0xFFF)
    mantissa, exponent = nearest_float(abs(units), 24) if units else (0, 0)
    return math.copysign(mantissa * 2.0 ** (exponent - 23), units)


def keys(*seeds: int) -> torch.Tensor:
    return torch.tensor([seed_row(seed) for seed in seeds], dtype=torch.int32)


def positions(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


SEEDS = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 123456789012345]


@pytest.mark.parametrize("stream", [noise.TARGET, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL])
@pytest.mark.parametrize("seed", SEEDS)
def test_noise_equals_the_reference_in_plain_integers(seed: int, stream: int) -> None:
    places = [0, 1, 77, 4095, 131071]
    got = noise.gumbel(keys(seed), positions(places), 40, stream=stream)[0].tolist()
    for place, row in zip(places, got, strict=True):
        assert row == [gumbel_of(word_of(seed, place, token, stream=stream)) for token in range(40)]
    uniform = noise.uniform(keys(seed), positions(places), stream)[0].tolist()
    assert uniform == [(word_of(seed, place, 0, stream=stream) >> 8) / SCALE for place in places]


def test_every_word_becomes_the_gumbel_quantile() -> None:
    edges = [0, 1, 2, 255, 256, 2**20 - 1, 2**20, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 256, 2**32 - 2, 2**32 - 1]
    words = edges + [random.Random(0).getrandbits(32) for _ in range(3000)]
    signed = torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)
    got = noise.gumbel_of_bits(signed).tolist()
    assert got == [gumbel_of(word) for word in words]
    for word, value in zip(words, got, strict=True):
        tail = (word + 0.5) / 2**32
        exact = -math.log(-math.log1p(-tail))
        assert value == pytest.approx(exact, abs=2e-6)


def test_noise_does_not_depend_on_its_neighbours() -> None:
    whole = noise.gumbel(keys(5, 6, 7), positions([3, 4, 5], [9, 8, 7], [0, 0, 1]), 300)
    alone = noise.gumbel(keys(6), positions([8]), 300)
    assert torch.equal(whole[1, 1], alone[0, 0])
    assert torch.equal(whole[2, 0], whole[2, 1])
    assert torch.equal(noise.gumbel(keys(6), positions([8]), 11)[0, 0], alone[0, 0, :11])
    rows = noise.row_keys(keys(6), positions([8]), noise.TARGET)
    some = torch.tensor([299, 0, 17], dtype=torch.int32)
    assert torch.equal(noise.gumbel_of_bits(noise.bits(rows, some))[0, 0], alone[0, 0, some.long()])
    uniforms = noise.uniform(keys(5, 6), positions([1, 2, 3], [4, 5, 6]), noise.ACCEPT)
    assert torch.equal(uniforms[1, 2], noise.uniform(keys(6), positions([6]), noise.ACCEPT)[0, 0])


@pytest.mark.parametrize("axis", ["ids", "positions", "seeds"])
def test_noise_is_standard_gumbel_along_every_axis(axis: str) -> None:
    count = 1_000_000
    if axis == "ids":
        draws = noise.gumbel(keys(3), positions([0]), count)
    elif axis == "positions":
        draws = noise.gumbel(keys(3), torch.arange(count, dtype=torch.int32).unsqueeze(0), 1)
    else:
        many = torch.stack((torch.arange(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)), 1)
        draws = noise.gumbel(many, torch.zeros(count, 1, dtype=torch.int32), 1)
    values = draws.flatten().double()
    assert float(values.mean()) == pytest.approx(0.5772157, abs=5 * 1.2825 / 1000)
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=5 * 2.98 / 1000)
    assert stats.kstest(values.numpy(), "gumbel_r").pvalue > 1e-3
    neighbours = torch.corrcoef(torch.stack((values[:-1], values[1:])))[0, 1]
    assert abs(float(neighbours)) < 5e-3


def test_streams_are_independent_of_each_other() -> None:
    where = torch.arange(2000, dtype=torch.int32).unsqueeze(0)
    streams = [noise.gumbel(keys(3), where, 100, stream=s).flatten().double() for s in range(4)]
    across = torch.corrcoef(torch.stack(streams))
    assert float((across - torch.eye(4)).abs().max()) < 5 / math.sqrt(200_000)


def test_uniforms_fill_the_unit_interval_without_its_end() -> None:
    draws = noise.uniform(keys(3), torch.arange(1_000_000, dtype=torch.int32).unsqueeze(0), noise.ACCEPT)[0].double()
    assert 0 <= float(draws.min()) < 1e-5
    assert 1 - 1e-5 < float(draws.max()) < 1
    assert torch.equal(draws * SCALE, (draws * SCALE).round())
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3


def test_seeds_are_told_apart_in_all_64_bits() -> None:
    rows = [noise.gumbel(keys(1 << bit), positions([0]), 8)[0, 0] for bit in range(64)]
    assert len({tuple(row.tolist()) for row in rows}) == 64
    assert SamplingTensors(torch.zeros(1, 4), keys(-1)).seeds.tolist() == [[-1, -1]]
