"""Wide registers hold several columns side by side: they give the bits of a machine that has only narrow ones."""

from __future__ import annotations

import ctypes

import pytest
import torch

from paceline.decoder.native import build
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import quantize
from tests.decoder.other_kernels import call, kernels

pytestmark = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="this machine has no wide registers"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def narrow() -> ctypes.CDLL:
    """The kernels, built as if there were no wide registers."""
    made = kernels("-mno-avx512f")
    assert (made.paceline_abreast(), build.library().paceline_abreast()) == (1, 2)
    return made


@pytest.mark.parametrize("code", range(3))
@pytest.mark.parametrize("shape", [(7, 5), (16, 16), (33, 96), (97, 261), (384, 130)])
def test_wide_kernels_give_the_bits_of_narrow_matmuls(narrow: ctypes.CDLL, code: int, shape: tuple[int, int]) -> None:
    K, N = shape
    torch.manual_seed(0)
    weight = torch.randn(N, K).to(DTYPES[code])
    for rows in (*range(1, 14), 23, 25, 33, 70):
        x, seen = torch.randn(rows, K), []
        for library in (narrow, build.library()):
            seen.append(torch.empty(rows, N))
            call(library, "paceline_linear", x, weight, None, seen[-1], rows, K, N, code)
        assert torch.equal(*seen)


@pytest.mark.parametrize("form", WeightFormat, ids=lambda form: form.value)
@pytest.mark.parametrize("shape", [(32, 5), (96, 261), (2048, 5)])
def test_wide_kernels_give_the_bits_of_narrow_quantised_matmuls(
    narrow: ctypes.CDLL, form: WeightFormat, shape: tuple[int, int]
) -> None:
    K, N = shape
    torch.manual_seed(0)
    stored = quantize(torch.randn(N, K), form)
    for rows in (1, 2, 5, 9, 13, 33):
        x, seen = torch.randn(rows, K), []
        for library in (narrow, build.library()):
            seen.append(torch.empty(rows, N))
            call(library, "paceline_linear", x, stored.data, stored.scales, seen[-1], rows, K, N, form.code)
        assert torch.equal(*seen)


@pytest.mark.parametrize("code", range(3))
@pytest.mark.parametrize("width", [12, 20, 48, 64])
@pytest.mark.parametrize("tree", [False, True])
def test_wide_kernels_give_the_bits_of_narrow_attention(narrow: ctypes.CDLL, code: int, width: int, tree: bool) -> None:
    heads, groups, rows = 6, 2, 40
    torch.manual_seed(0)
    cache = [torch.randn(1, groups, rows, width).to(DTYPES[code]) for _ in range(2)]
    for window, row in ((1, 0), (1, 17), (2, 20), (5, 23), (9, 8)):
        q, k, v = (torch.randn(1, window, n, width) for n in (heads, groups, groups))
        place = [torch.tensor([n], dtype=torch.int32) for n in (row, window, 0)]
        parents = torch.tensor([[-1, *(i // 2 for i in range(window - 1))]], dtype=torch.int32) if tree else None
        sizes, seen = torch.tensor([1, window, heads, groups, width, rows]), []
        for library in (narrow, build.library()):
            seen.append(torch.empty(1, window, heads * width))
            own = [one.clone() for one in cache]
            call(library, "paceline_attend", q, k, v, *own, seen[-1], *place, parents, sizes, code, 0, 0.0, None, None)
        assert torch.equal(*seen)
