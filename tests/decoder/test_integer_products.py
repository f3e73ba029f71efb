"""Products of int8 and blocks: activations become integers, and sums are exact on every processor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from paceline.decoder.native import build
from paceline.decoder.native.ops import Native
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import PackedMatrix, QuantizedTensor, quantize
from tests.decoder.other_kernels import call, kernels, numbers

FORMATS = [WeightFormat.INT8, WeightFormat.Q8_0, WeightFormat.Q4_0, WeightFormat.Q4_1]
SHAPES = [(32, 5), (64, 3), (96, 6), (288, 9), (1056, 4)]
"""K and N: one block, some, more than eight of them, and more than fill a register's columns."""
ODD = [(1, 3), (15, 2), (17, 4), (50, 7), (64, 16), (130, 33), (1024, 47), (4096 + 33, 21)]
"""K and N of int8 alone: no whole step of 16 or tile of 16 rows and 64 columns, a remainder, and more than an int32 may
sum.
"""
LEAST_TOP, SEGMENT = np.float32(2.0**-100), 1024
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


def largest(form: WeightFormat) -> np.float32:
    return np.float32(32767 if form.block_bytes else 16383)


def rounded(x: Floats, form: WeightFormat) -> tuple[Integers, Floats]:
    """Activations [M, K] as integers, and the scales of the rows [M]."""
    most = np.maximum(np.abs(x).max(1, keepdims=True), LEAST_TOP)
    return np.rint(x * (largest(form) / most)).astype(np.int64), (most / largest(form))[:, 0]


def lanes(a: Integers, w: Integers) -> Floats:
    """The sums of eight lanes: of each sixteen numbers 2j and 2j + 1 are lane j's. a [M, k], w [N, k] -> [M, N, 8]"""
    products = (a[:, None] * w[None]).reshape(len(a), len(w), -1, 8, 2)
    exact = products.sum((2, 4))
    assert np.abs(exact).max(initial=0) < 2**31, "an int32 holds it"
    return exact.astype(np.float32)


def total(lane: Floats) -> Floats:
    half = lane[..., :4] + lane[..., 4:]
    quarter = half[..., :2] + half[..., 2:]
    found: Floats = quarter[..., 0] + quarter[..., 1]
    return found


def fused(sums: Floats, a: Floats, b: Floats) -> Floats:
    """sums + a * b, rounded once."""
    wide = np.longdouble
    return (sums.astype(wide) + a.astype(wide) * b.astype(wide)).astype(np.float32)


def by_rows(a: Integers, stored: QuantizedTensor) -> Floats:
    """Sums with weights whose rows have scales, without these: exact in a segment, in any order."""
    w = stored.data.numpy().astype(np.int64)
    found = np.zeros((len(a), len(w)), np.float32)
    for k in range(0, a.shape[1], SEGMENT):
        x, y = a[:, k : k + SEGMENT], w[:, k : k + SEGMENT].T
        assert (np.abs(x) @ np.abs(y)).max() < 2**31, "an int32 holds it"
        found = found + (x @ y).astype(np.float32)
    return found


def by_blocks(a: Integers, stored: QuantizedTensor) -> Floats:
    """Sums with blocks: scales times sums, and after each eight least numbers times the activations' sums."""
    form = stored.format
    blocks = stored.data.numpy().reshape(len(stored.data), -1, form.block_bytes)
    half = [blocks[..., at : at + 2].copy().view(np.float16)[..., 0].astype(np.float32) for at in (0, 2)]
    start = 4 if form is WeightFormat.Q4_1 else 2
    q = blocks[..., start:]
    if form is WeightFormat.Q8_0:
        w = q.copy().view(np.int8).astype(np.int64)
    else:
        w = np.concatenate((q & 15, q >> 4), -1).astype(np.int64) - (8 if form is WeightFormat.Q4_0 else 0)
    count = w.shape[1]
    sums = np.zeros((len(a), len(w), 8), np.float32)
    for g in range(count):
        part = a[:, 32 * g : 32 * g + 32]
        sums = fused(sums, lanes(part, w[:, g]), half[0][None, :, g, None])
        if form is WeightFormat.Q4_1 and (g % 8 == 7 or g == count - 1):
            first = g // 8 * 8
            least, all_of = np.zeros((len(w), 8), np.float32), np.zeros((len(a), 8), np.float32)
            least[:, : g + 1 - first] = half[1][:, first : g + 1]
            all_of[:, : g + 1 - first] = a[:, 32 * first : 32 * (g + 1)].reshape(len(a), -1, 32).sum(2)
            sums = fused(sums, least[None], all_of[:, None])
    return total(sums)


def in_order(x: Tensor, stored: QuantizedTensor) -> Tensor:
    """The product as the kernels compute it. x [M, K]"""
    a, scales = rounded(x.numpy(), stored.format)
    found = (by_blocks if stored.format.block_bytes else by_rows)(a, stored) * scales[:, None]
    return torch.from_numpy(found if stored.scales is None else found * stored.scales.numpy())


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
@pytest.mark.parametrize("shape", SHAPES + ODD)
def test_integer_matmuls_sum_exactly_in_one_order(native: Native, shape: tuple[int, int], form: WeightFormat) -> None:
    K, N = shape
    if form.block_bytes and shape in ODD:
        pytest.skip("rows of blocks have whole ones")
    stored = quantize(numbers(N, K, seed=1), form)
    packed = PackedMatrix(stored)
    for rows in (1, 2, 5, 9, 13, 40):
        x = numbers(rows, K) * torch.logspace(-6, 4, rows).unsqueeze(1)
        assert torch.equal(native.linear(x[None], packed)[0], in_order(x, stored))


@pytest.mark.parametrize("shape", [(64, 16), (96, 40), (1056, 37)])
def test_every_number_of_rows_has_the_same_sums(native: Native, shape: tuple[int, int]) -> None:
    """From one on, to those of several tiles."""
    K, N = shape
    stored, x = quantize(numbers(N, K, seed=1), WeightFormat.INT8), numbers(40, K)
    packed, wanted = PackedMatrix(stored), in_order(x, stored)
    for rows in range(1, 41):
        assert torch.equal(native.linear(x[None, :rows], packed)[0], wanted[:rows])


def test_ties_round_to_even_and_zeros_stay_zero(native: Native) -> None:
    one = QuantizedTensor(torch.eye(16, dtype=torch.int8), torch.ones(16), WeightFormat.INT8, 16)
    x = torch.tensor([16383, 0.5, 1.5, 2.5, -0.5, -1.5, 0.49, 0.51, -16383.0, *range(7)])
    wanted = torch.tensor([16383, 0, 2, 2, 0, -2, 0, 1, -16383.0, *range(7)])
    for scale in (1.0, 2.0**-60, 2.0**90):  # powers of two change no bit
        assert torch.equal(native.linear((x * scale).view(1, 1, 16), PackedMatrix(one)).view(16), wanted * scale)
    assert not native.linear(torch.zeros(1, 2, 16), PackedMatrix(one)).any()
    tiny = torch.full((1, 1, 16), 2.0**-117)  # of the least largest number an eighth of a step
    assert not native.linear(tiny, PackedMatrix(one)).any()


def test_every_activation_is_exact(native: Native) -> None:
    """All integers from -16383 to 16383, each by a weight of one."""
    one = QuantizedTensor(torch.eye(64, dtype=torch.int8), torch.ones(64), WeightFormat.INT8, 64)
    x = torch.full((521, 64), 16383.0)
    x[:, 1:] = torch.arange(-16383.0, -16383 + 521 * 63).clamp(max=16383).view(521, 63)
    assert torch.equal(native.linear(x[None], PackedMatrix(one))[0], x)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
def test_nan_and_infinity_stay_in_their_row(native: Native, form: WeightFormat) -> None:
    packed, x = PackedMatrix(quantize(numbers(7, 64), form)), numbers(1, 20, 64)
    clean = native.linear(x, packed)
    for junk in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        for column in (0, 63):
            dirty = x.clone()
            dirty[0, ::2, column] = junk
            found = native.linear(dirty, packed)
            assert torch.equal(found[:, 1::2], clean[:, 1::2]) and found[:, ::2].isnan().all()


@pytest.mark.parametrize("sign", [1, -1])
def test_integer_sums_do_not_overflow(native: Native, sign: int) -> None:
    """All products as large as they can be. Checkpoints may have -128, which is not made in this test."""
    K = 3 * SEGMENT + 16
    stored = QuantizedTensor(torch.full((3, K), -128, dtype=torch.int8), torch.ones(3), WeightFormat.INT8, K)
    for rows in (1, 5, 9):
        x = torch.full((rows, K), 32767.0 * sign)
        found = native.linear(x[None], PackedMatrix(stored))[0]
        torch.testing.assert_close(found, torch.full((rows, 3), -128.0 * 32767 * K * sign), rtol=1e-6, atol=0)
        assert torch.equal(found, in_order(x, stored))


Product = Callable[[Tensor, QuantizedTensor], Tensor]


@pytest.fixture(scope="module", params=["without AMX", "without VNNI", "without AVX2"])
def other(request: pytest.FixtureRequest) -> Product:
    """The product by kernels that are built for a processor with fewer instructions."""
    flags, left = {
        "without AMX": ((), 2),
        "without VNNI": (("-mno-avx512vnni", "-mno-avxvnni"), 1),
        "without AVX2": (("-mno-avx2",), 0),
    }[request.param]
    own = build.library()
    if own.paceline_tiles() + own.paceline_integer_sums() <= left:
        pytest.skip("this processor has none of these instructions")
    library = kernels("-U__AMX_INT8__", *flags)
    assert not library.paceline_tiles() and library.paceline_integer_sums() == left

    def product(x: Tensor, stored: QuantizedTensor) -> Tensor:
        made, sizes = torch.empty(len(x), stored.shape[0]), (len(x), *reversed(stored.shape), stored.format.code)
        call(library, "paceline_linear", x, stored.data, stored.scales, made, *sizes)
        return made

    return product


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.value)
@pytest.mark.parametrize("shape", [(64, 130), (1056, 9), (2144, 40)])
def test_kernels_for_older_processors_are_bitwise_identical(
    native: Native, other: Product, form: WeightFormat, shape: tuple[int, int]
) -> None:
    K, N = shape
    stored = quantize(numbers(N, K, seed=1), form)
    for rows in (1, 2, 5, 9, 13, 33):
        x = numbers(rows, K)
        assert torch.equal(native.linear(x[None], PackedMatrix(stored))[0], other(x, stored))
