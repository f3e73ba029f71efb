"""The noise is a function of (seed, position, id), equal to a reference in plain integers, and is Gumbel's."""

import math
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import stats

from paceline.core import noise
from paceline.core.sampling import row_seed, seed_row
from tests.float32_integers import IntegersThroughFloat32

LIMB = 0xFFFF
SCALE = 1 << 24


def small(number: int) -> int:
    """An intermediate result, which float32 must hold exactly."""
    assert 0 <= number < SCALE
    return number


def permuted(x: list[int], y: list[int], rounds: int) -> tuple[list[int], list[int]]:
    for index in range(rounds):
        products = [small(small(limb * 0xB5) + (0x9E37 + index * 0x3C6E & LIMB)) for limb in x]
        x = [y[1] ^ products[0] >> 8, y[0] ^ products[1] >> 8]
        y = [product & LIMB for product in products]
    return x, y


def word_of(seed: int, position: int, token: int, *, stream: int) -> tuple[int, int]:
    """The two halves of a random word."""
    limbs = seed_row(seed)
    place = [position & LIMB, position >> 16 ^ stream << 8]
    x, y = permuted([limbs[0] ^ place[0], limbs[1] ^ place[1]], limbs[2:], 5)
    x, y = permuted([x[0] ^ place[0], x[1] ^ place[1]], y, 5)
    halves = y + permuted(x, y, 1)[0]
    multipliers = [half & 0xFF | 0x81 for half in halves] + [half >> 8 | 0x81 for half in halves]
    high, low = token & LIMB ^ x[0], token >> 16 ^ x[1]
    for multiplier in multipliers[:7]:
        product = small(high * multiplier)
        high, low = low ^ product >> 8, product & LIMB
    return high, low


def keys(*seeds: int) -> torch.Tensor:
    return torch.tensor([seed_row(seed) for seed in seeds], dtype=torch.int32)


def positions(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


SEEDS = [0, 1, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, 123456789012345]


@pytest.mark.parametrize("stream", [noise.TARGET, noise.DRAFT, noise.ACCEPT, noise.RESIDUAL])
@pytest.mark.parametrize("seed", SEEDS)
def test_words_equal_the_reference_in_plain_integers(seed: int, stream: int) -> None:
    places, ids = [0, 1, 77, 4095, 131071, SCALE - 1], [0, 1, 2, 255, 65535, 65536, 128255, SCALE - 1]
    rows = noise.row_keys(keys(seed), positions(places), stream)
    high, low = (limb[0].tolist() for limb in noise.words(rows, torch.tensor(ids, dtype=torch.int32)))
    for place, *got in zip(places, high, low, strict=True):
        assert list(zip(*got, strict=True)) == [word_of(seed, place, token, stream=stream) for token in ids]
    uniform = noise.uniform(keys(seed), positions(places), stream)[0].tolist()
    words = [word_of(seed, place, 0, stream=stream) for place in places]
    assert uniform == [((high << 16 | low) >> 8) / SCALE for high, low in words]


@pytest.mark.parametrize("traced", [False, True])
def test_every_word_becomes_the_gumbel_quantile(traced: bool) -> None:
    """The difference is at most two units in the last place; of numbers below 1, of those at 1."""
    edges = [0, 1, 2, 255, 256, 2**20 - 1, 2**20, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 256, 2**32 - 2, 2**32 - 1]
    words = edges + [random.Random(0).getrandbits(32) for _ in range(300_000)]
    high, low = (torch.tensor([word >> shift & LIMB for word in words], dtype=torch.int32) for shift in (16, 0))
    got = noise.gumbel_of_words(high, low, traced=traced).double()
    fraction = low.float() * 2.0**-16 + 2.0**-17
    uniform = ((high.float() + fraction) * (2.0**-16 * (1 - 2.0**-24))).double()  # as far as float32 can say it
    assert float((uniform - (high.double() * 2**16 + low.double() + 0.5) * 2.0**-32).abs().max()) < 2.0**-23
    exact = -torch.log(-torch.log1p(-uniform))
    assert float(((got - exact).abs() / (exact.abs().clamp(min=1.0) * 2.0**-23)).max()) <= 2
    assert torch.isfinite(got).all() and float(got.max()) < 22.9 and float(got.min()) > -2.9


def test_noise_does_not_depend_on_other_rows() -> None:
    whole = noise.gumbel(keys(5, 6, 7), positions([3, 4, 5], [9, 8, 7], [0, 0, 1]), 300)
    alone = noise.gumbel(keys(6), positions([8]), 300)
    assert torch.equal(whole[1, 1], alone[0, 0])
    assert torch.equal(whole[2, 0], whole[2, 1]) and not torch.equal(whole[2, 0], whole[2, 2])
    assert torch.equal(noise.gumbel(keys(6), positions([8]), 11)[0, 0], alone[0, 0, :11])
    some = torch.tensor([299, 0, 17], dtype=torch.int32)
    assert torch.equal(noise.gumbel(keys(6), positions([8]), some)[0, 0], alone[0, 0, some.long()])
    each = some.view(1, 1, 3).expand(3, 2, 3)  # ids of their own for every row
    assert torch.equal(
        noise.gumbel(keys(5, 6, 7), positions([0, 4], [8, 8], [1, 2]), each)[1, 1], alone[0, 0, some.long()]
    )
    uniforms = noise.uniform(keys(5, 6), positions([1, 2, 3], [4, 5, 6]), noise.ACCEPT)
    assert torch.equal(uniforms[1, 2], noise.uniform(keys(6), positions([6]), noise.ACCEPT)[0, 0])


def test_words_are_the_same_where_integers_go_through_float32() -> None:
    seeds, places = keys(*SEEDS), positions(*[[0, 1, 77, 4095, 131071, SCALE - 1]] * len(SEEDS))
    ids = torch.arange(0, SCALE, 4093, dtype=torch.int32)
    exact = noise.words(noise.row_keys(seeds, places, noise.RESIDUAL), ids)
    with IntegersThroughFloat32() as seen:
        rounded = noise.words(noise.row_keys(seeds, places, noise.RESIDUAL), ids)
        drawn = noise.uniform(seeds, places, noise.ACCEPT)
    assert all(torch.equal(one, other) for one, other in zip(exact, rounded, strict=True))
    assert torch.equal(drawn, noise.uniform(seeds, places, noise.ACCEPT))
    assert SCALE // 2 < seen.largest < SCALE


def test_the_float32_check_detects_larger_integers() -> None:
    """A check of the check: a product of 32-bit words is not exact in float32."""
    words = torch.tensor([0x7FEB352D, 12345679], dtype=torch.int32)
    with IntegersThroughFloat32():
        assert not torch.equal(words * 3, torch.tensor([0x7FEB352D * 3 - (1 << 32), 12345679 * 3], dtype=torch.int32))


DRAWS = 1 << 21
NUMBERS = torch.arange(DRAWS, dtype=torch.int32)


def limbs(numbers: torch.Tensor) -> torch.Tensor:
    """Seeds that were not mixed, so that neighbours differ in few bits."""
    zero = torch.zeros_like(numbers)
    return torch.stack((numbers & LIMB, numbers >> 16, zero, zero), -1)


AXES: dict[str, Callable[[], torch.Tensor]] = {
    "ids": lambda: draws(keys(3), positions([5]), NUMBERS),
    "positions": lambda: draws(keys(3), NUMBERS.unsqueeze(0), torch.tensor([7], dtype=torch.int32)),
    "seeds": lambda: draws(limbs(NUMBERS), positions([9]).expand(DRAWS, 1), torch.tensor([7], dtype=torch.int32)),
    "rows": lambda: draws(
        keys(*(row_seed(11, row) for row in range(1 << 13))), NUMBERS[:16].expand(1 << 13, 16), NUMBERS[:16]
    ),
}


def draws(seeds: torch.Tensor, places: torch.Tensor, ids: torch.Tensor, *, stream: int = noise.TARGET) -> torch.Tensor:
    """Random words as numbers."""
    high, low = noise.words(noise.row_keys(seeds, places, stream), ids)
    return high.flatten().to(torch.int64) * 65536 + low.flatten()


@pytest.mark.parametrize("axis", AXES)
def test_words_are_random_along_every_axis(axis: str) -> None:
    """Chi-square of every byte, of neighbours' leading bits at several distances, and of Gumbel's distribution."""
    words = AXES[axis]().numpy()
    assert len(words) == DRAWS
    pvalues = [chi_square(words >> shift & 0xFF) for shift in (0, 8, 16, 24)]
    for lag in (1, 2, 3, 16, 255, 256, 4096):
        for shift in (0, 12, 28):
            bits = words >> shift & 0xF
            pvalues.append(chi_square(bits[lag:] << 4 | bits[:-lag]))
    assert min(pvalues) > 1e-3 / len(pvalues), pvalues
    high, low = (torch.from_numpy(part.astype(np.int32)) for part in (words >> 16, words & LIMB))
    values = noise.gumbel_of_words(high, low).double()
    assert float(values.mean()) == pytest.approx(0.5772157, abs=5 * 1.2825 / math.sqrt(DRAWS))
    assert float(values.var()) == pytest.approx(math.pi**2 / 6, abs=5 * 2.98 / math.sqrt(DRAWS))
    assert stats.kstest(values.numpy(), "gumbel_r").pvalue > 1e-3


OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "next seed": lambda: draws(keys(4), positions([5]), NUMBERS),
    "next position": lambda: draws(keys(3), positions([6]), NUMBERS),
    "next row": lambda: draws(keys(row_seed(3, 1)), positions([5]), NUMBERS),
    "draft's stream": lambda: draws(keys(3), positions([5]), NUMBERS, stream=noise.DRAFT),
    "ratio test's stream": lambda: draws(keys(3), positions([5]), NUMBERS, stream=noise.ACCEPT),
    "next id": lambda: draws(keys(3), positions([5]), NUMBERS + 1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_two_streams_are_independent(name: str) -> None:
    """Pairs of bits at four places, the difference and the correlation of 2^21 words each."""
    one, other = AXES["ids"]().numpy(), OTHERS[name]().numpy()
    pvalues = [chi_square((one >> shift & 0xF) << 4 | (other >> shift & 0xF)) for shift in (0, 12, 16, 28)]
    pvalues.append(chi_square((one - other) >> 24 & 0xFF))
    correlation = float(np.corrcoef(one.astype(np.float64), other.astype(np.float64))[0, 1])
    pvalues.append(float(2 * stats.norm.sf(abs(correlation) * math.sqrt(DRAWS))))
    assert min(pvalues) > 1e-3 / len(pvalues), pvalues


def chi_square(values: np.ndarray) -> float:
    return float(stats.chisquare(np.bincount(values, minlength=256)).pvalue)


def test_rows_streams_and_positions_are_independent_of_each_other() -> None:
    """The same ids in 64 rows each of seeds, positions and streams: pairs of leading bits, and correlations."""
    ids = torch.arange(1 << 15, dtype=torch.int32)
    rows = [
        *draws(limbs(torch.arange(20, dtype=torch.int32)), positions(*[[5]] * 20), ids).view(20, -1),
        *draws(keys(3), positions(list(range(20))), ids).view(20, -1),
        *draws(keys(*range(100, 120)), positions(*[[5]] * 20), ids).view(20, -1),
    ]
    for stream in range(4):
        high, low = noise.words(noise.row_keys(keys(77), positions([5]), stream), ids)
        rows.append((high.to(torch.int64) * 65536 + low).flatten())
    several = np.stack([row.numpy() for row in rows])
    correlation = np.corrcoef(several.astype(np.float64))
    assert np.abs(correlation - np.eye(len(rows))).max() < 5.5 / math.sqrt(len(ids))
    pvalues = [chi_square(a >> 28 << 4 | b >> 28) for a, b in pairwise(several)]
    assert min(pvalues) > 1e-3 / len(pvalues)


def test_uniforms_fill_the_unit_interval_excluding_1() -> None:
    draws = noise.uniform(keys(3), NUMBERS.unsqueeze(0), noise.ACCEPT)[0].double()
    assert 0 <= float(draws.min()) < 1e-5
    assert 1 - 1e-5 < float(draws.max()) < 1
    assert torch.equal(draws * SCALE, (draws * SCALE).round())
    assert stats.kstest(draws.numpy(), "uniform").pvalue > 1e-3


def test_seeds_are_distinguished_in_all_64_bits() -> None:
    rows = [noise.gumbel(keys(1 << bit), positions([0]), 8)[0, 0] for bit in range(64)]
    assert len({tuple(row.tolist()) for row in rows}) == 64


def test_no_seed_is_a_shifted_copy_of_another() -> None:
    """The first words of 20,000 seeds at 64 positions: none comes twice, as a shifted copy would."""
    places, ids = torch.arange(0, 64 * 31, 31, dtype=torch.int32).expand(2_000, -1), torch.tensor([0, 1]).int()
    found = []
    for first in range(0, 20_000, 2_000):  # 64 bits of every row: the words of two ids
        high, low = noise.words(noise.row_keys(limbs(NUMBERS[first : first + 2_000]), places, noise.TARGET), ids)
        word = high.to(torch.int64) * 65536 + low
        found.append((word[..., 0] << 31 ^ word[..., 1]).flatten().numpy())
    assert len(np.unique(np.concatenate(found))) == 64 * 20_000


def test_calls_with_consecutive_seeds_share_no_rows() -> None:
    """Counting over seeds and rows counts independent draws: the distribution of the choice among 8 equal tokens."""
    rows = [row_seed(seed, row) for seed in range(60) for row in range(64)]
    assert len(set(rows)) == len(rows) and [row_seed(seed, 0) for seed in range(60)] == list(range(60))
    chosen = noise.gumbel(keys(*rows), positions(*[[12]] * len(rows)), 8).argmax(-1).flatten()
    counts = np.bincount(chosen.numpy(), minlength=8)
    assert stats.chisquare(counts).pvalue > 1e-3
    pairs = chosen.view(60, 64)
    assert (
        stats.chisquare(np.bincount((pairs[1:, :-1] * 8 + pairs[:-1, 1:]).flatten().numpy(), minlength=64)).pvalue
        > 1e-3
    )
