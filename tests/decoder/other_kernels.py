"""Calls of native kernels, also of those compiled with fewer instructions, and numbers for them; no tests."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paceline.decoder import environment
from paceline.decoder.native import build
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.quantize import quantize

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Argument = Tensor | int | float | None
Call = tuple[str, tuple[Argument, ...]]
"""The name of a kernel and its arguments."""


def kernels(*flags: str) -> ctypes.CDLL:
    """Built with these flags too, as fast as they can be built, and kept in the cache."""
    (path,) = build._build([build.NATIVE.with_flags("-O0", *flags)], environment.cache_root() / "native")
    return ctypes.CDLL(str(path))


def call(library: ctypes.CDLL, name: str, *arguments: Argument) -> None:
    """Call a kernel; tensors go as pointers."""
    getattr(library, name)(
        *(
            ctypes.c_int64(one)
            if isinstance(one, int)
            else ctypes.c_float(one)
            if isinstance(one, float)
            else ctypes.c_void_p(None if one is None else one.data_ptr())
            for one in arguments
        )
    )


def called(library: ctypes.CDLL, name: str, *arguments: Argument) -> list[Tensor]:
    """The bytes of all tensors after a call, which gets copies of them."""
    own = [one.clone() if isinstance(one, Tensor) else one for one in arguments]
    call(library, name, *own)
    return [one.view(torch.uint8) for one in own if isinstance(one, Tensor)]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def products(shape: tuple[int, int], rows: Sequence[int]) -> Iterator[Call]:
    """Products with weights in every float format."""
    K, N = shape
    for code, dtype in enumerate(DTYPES):
        weight = numbers(N, K, seed=1).to(dtype)
        for count in rows:
            x, out = numbers(count, K), torch.zeros(count, N)
            yield "paceline_linear", (x, weight, None, out, count, K, N, code)


def quantised_products(shape: tuple[int, int], rows: Sequence[int]) -> Iterator[Call]:
    K, N = shape
    for form in WeightFormat:
        stored = quantize(numbers(N, K, seed=1), form)
        for count in rows:
            x, out = numbers(count, K), torch.zeros(count, N)
            yield "paceline_linear", (x, stored.data, stored.scales, out, count, K, N, form.code)


def attentions(width: int, *, tree: bool) -> Iterator[Call]:
    heads, groups, rows = 6, 2, 40
    for code, dtype in enumerate(DTYPES):
        cache = [numbers(1, groups, rows, width, seed=side).to(dtype) for side in (1, 2)]
        for window, row in ((1, 0), (1, 17), (2, 20), (5, 23), (9, 8)):
            qkv = [numbers(1, window, n, width, seed=3 + side) for side, n in enumerate((heads, groups, groups))]
            place = [torch.tensor([n], dtype=torch.int32) for n in (row, window, 0)]
            parents = torch.tensor([[-1, *(i // 2 for i in range(window - 1))]], dtype=torch.int32) if tree else None
            sizes = torch.tensor([1, window, heads, groups, width, rows, 0])
            out = torch.zeros(1, window, heads * width)
            yield "paceline_attend", (*qkv, *cache, out, *place, parents, sizes, code, 0, 0.0, None, None)
