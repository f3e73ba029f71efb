"""Products of bfloat16 weights: activations are rounded once, and pairs are added in one order on every processor."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from paceline.decoder.native import build
from paceline.decoder.native.ops import Native
from tests.decoder.other_kernels import call, kernels, numbers

SHAPES = [(1, 3), (15, 2), (16, 5), (17, 4), (31, 7), (33, 9), (96, 6), (101, 5)]
"""K and N: below a pair's step of sixteen, whole steps, and odd remainders."""
SIZES = (1.0, 1e-19, 3e-20, 1e-38)
"""Of activations and weights: ordinary, products around the least normal number, and denormals."""
Numbers = npt.NDArray[np.float32]


def fused(total: Numbers, a: Numbers, b: Numbers) -> Numbers:
    """total + a * b, rounded once: of two bfloat16 the product is exact, and a long double has room for both."""
    wide = np.longdouble
    return (total.astype(wide) + a.astype(wide) * b.astype(wide)).astype(np.float32)


def in_order(x: Tensor, weight: Tensor) -> Tensor:
    """The product with its sums in the order of the kernels: eight lanes of pairs, the odd number first."""
    rows, columns = x.bfloat16().float().numpy()[:, None], weight.float().numpy()[None]
    inner = x.shape[1]
    whole = inner // 16 * 16
    lanes = np.zeros((len(x), len(weight), 8), np.float32)
    for k in range(0, whole, 16):
        for first in (1, 0):
            lanes = fused(lanes, rows[..., k + first : k + 16 : 2], columns[..., k + first : k + 16 : 2])
    half = lanes[..., :4] + lanes[..., 4:]
    quarter = half[..., :2] + half[..., 2:]
    total: Numbers = quarter[..., 0] + quarter[..., 1]
    for k in range(whole, inner):
        total = fused(total, rows[..., k], columns[..., k])
    return torch.from_numpy(total)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_rounded_and_pairs_added_in_order(native: Native, shape: tuple[int, int], batch: int) -> None:
    K, N = shape
    weight = numbers(N, K, seed=1).bfloat16()
    for window in (1, 5, 9):
        x = numbers(batch, window, K)
        made = native.linear(x, weight)
        assert torch.equal(made, in_order(x.view(-1, K), weight).view(batch, window, N))
        assert torch.equal(native.linear(x.bfloat16().float(), weight), made), "rounding twice changes nothing"


def test_ties_round_to_even_and_nan_stays_nan(native: Native) -> None:
    weight = torch.eye(16).bfloat16()
    x = torch.tensor([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, -1 - 2.0**-8] * 4)
    assert torch.equal(native.linear(x.view(1, 1, 16), weight).view(16), x.bfloat16().float())
    for junk in (float("nan"), float("inf")):
        x = torch.ones(1, 2, 16)
        x[0, 1, 3] = junk
        made = native.linear(x, torch.ones(3, 16).bfloat16())
        assert (made[0, 0] == 16).all() and not made[0, 1].isfinite().any()


@pytest.fixture(scope="module")
def by_hand() -> Callable[[Tensor, Tensor], Tensor]:
    """The product by kernels that are built as if there were no instruction for pairs."""
    if not build.library().paceline_pairs():
        pytest.skip("this processor has no instruction for pairs")
    library = kernels("-mno-avx512bf16")
    assert not library.paceline_pairs() and library.paceline_abreast() == build.library().paceline_abreast()

    def product(x: Tensor, weight: Tensor) -> Tensor:
        made = torch.empty(len(x), len(weight))
        call(library, "paceline_linear", x, weight, None, made, *x.shape, len(weight), 1)
        return made

    return product


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", [*SHAPES, (384, 130)])
def test_kernels_without_the_bf16_instruction_are_bitwise_identical(
    native: Native, by_hand: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, int], size: float
) -> None:
    """Denormals too, which the instruction takes and gives as zeros."""
    K, N = shape
    weight = (numbers(N, K, seed=1) * (size if size > 1e-30 else 1)).bfloat16()
    for rows in (1, 2, 5, 9, 13, 33):
        x = numbers(rows, K) * size
        assert torch.equal(native.linear(x[None], weight)[0], by_hand(x, weight))
