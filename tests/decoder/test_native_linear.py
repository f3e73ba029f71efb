"""The native matmul with a weight matrix: right, and the same bits for a row wherever it is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.decoder.kernels.torch_kernels import TorchKernels
from paceline.decoder.native import build
from paceline.decoder.native.ops import Native
from tests.decoder.other_kernels import call, numbers

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 2), (7, 5), (8, 8), (15, 1), (16, 16), (17, 3), (33, 96), (48, 31), (100, 101), (384, 130)]
"""K and N; some odd, some below a vector, some multiples of it."""
ROWS = [*range(1, 14), 16, 23, 25, 31, 33, 64, 69, 70]


def multiplied(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The activations as a product with weights of this type takes them: bfloat16 ones are multiplied in pairs."""
    return x.bfloat16().float() if dtype == torch.bfloat16 else x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_matmul_accumulates_in_float32(native: Native, shape: tuple[int, int], dtype: torch.dtype) -> None:
    K, N = shape
    weight = numbers(N, K, seed=1).to(dtype)
    for rows in ROWS:
        x = numbers(1, rows, K)
        made = native.linear(x, weight)
        x = multiplied(x, dtype)
        exact = x.double() @ weight.double().T
        room = x.abs().double() @ weight.abs().double().T * (K + 1) * 2.0**-24 + 1e-30  # any order of summing
        assert made.dtype == torch.float32
        assert made.shape == (1, rows, N)
        assert ((made - exact).abs() <= room).all()
        torch.testing.assert_close(made, TorchKernels().linear(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_matmul_row_is_bitwise_independent_of_other_rows(
    native: Native, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    K, N = shape
    weight, x = numbers(N, K, seed=1).to(dtype), numbers(1, 70, K)
    alone = torch.cat([native.linear(x[:, i : i + 1], weight) for i in range(70)], 1)
    for rows in ROWS:
        assert torch.equal(native.linear(x[:, :rows], weight), alone[:, :rows])
        assert torch.equal(native.linear(x[:, 70 - rows :], weight), alone[:, 70 - rows :])
    assert torch.equal(native.linear(x.view(7, 10, K), weight).view(1, 70, N), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("junk", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_junk_in_other_rows_changes_no_result(native: Native, dtype: torch.dtype, junk: float) -> None:
    weight, x = numbers(96, 33, seed=1).to(dtype), numbers(1, 9, 33)
    alone = native.linear(x, weight)
    for kept in range(9):
        dirty = torch.full_like(x, junk)
        dirty[:, kept] = x[:, kept]
        assert torch.equal(native.linear(dirty, weight)[:, kept], alone[:, kept])


@pytest.mark.parametrize("dtype", DTYPES)
def test_matmuls_are_the_same_with_any_number_of_threads(
    native: Native, restored_threads: None, dtype: torch.dtype
) -> None:
    for K, N in ((384, 130), (384, 131), (100, 997)):  # past the size at which threads are used at all
        weight, x = numbers(N, K, seed=1).to(dtype), numbers(1, 6, K)
        seen = []
        for threads in (1, 2, 3, 5, 8):
            torch.set_num_threads(threads)
            seen += [native.linear(x, weight), torch.cat([native.linear(x[:, i : i + 1], weight) for i in range(6)], 1)]
        assert all(torch.equal(seen[0], other) for other in seen)


def test_non_contiguous_inputs_give_the_same_result(native: Native) -> None:
    weight, x = numbers(6, 24), numbers(24, 5, 1)
    turned = x.transpose(0, 2)
    assert torch.equal(native.linear(turned, weight), native.linear(turned.contiguous(), weight))


def test_a_smaller_matmul_after_a_larger_one_is_right(native: Native) -> None:
    """The kernel keeps its scratch memory between calls."""
    small, x = numbers(5, 17, seed=1).bfloat16(), numbers(1, 2, 17)
    before = native.linear(x, small)
    native.linear(torch.full((1, 70, 384), float("nan")), numbers(8, 384).bfloat16())
    assert torch.equal(native.linear(x, small), before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(17, 3), (48, 31), (384, 130)])
def test_padding_is_zero_and_real_rows_are_bitwise_identical(
    native: Native, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    K, N = shape
    weight, x = numbers(N, K, seed=1).to(dtype), numbers(4, 9, K)
    whole = native.linear(x, weight)
    count = torch.tensor([9, 4, 1, 0], dtype=torch.int32)
    for b in range(4):
        x[b, count[b] :] = float("nan")
    made = native.linear(x, weight, count)
    for b in range(4):
        assert torch.equal(made[b, : count[b]], whole[b, : count[b]])
        assert not made[b, count[b] :].any()


def test_an_unread_batch_row_is_neither_computed_nor_written(native: Native) -> None:
    """Its count is below 0: -1 - n with n rows. Lines of idle slots times a vocabulary are more than all else."""
    weight, x = numbers(130, 384, seed=1), numbers(4, 9, 384)
    out, count = torch.full((4, 9, 130), 7.0), torch.tensor([-1, 9, -4, 2], dtype=torch.int32)
    call(build.library(), "paceline_linear_real", x, weight, None, out, count, 4, 9, 384, 130, 0)
    assert (out[0] == 7).all() and (out[2, 3:] == 7).all() and not out[3, 2:].any()
    assert torch.equal(out[2, :3], native.linear(x, weight)[2, :3])
    assert torch.equal(out[1], native.linear(x, weight)[1]) and torch.equal(out[3, :2], native.linear(x, weight)[3, :2])
