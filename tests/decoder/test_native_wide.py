"""Wide registers hold several columns side by side: they give the bits of a machine that has only narrow ones."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from paceline.decoder.native import build
from tests.decoder.other_kernels import Call, attentions, called, kernels, products, quantised_products

pytestmark = pytest.mark.skipif(
    "AVX512" not in torch.backends.cpu.get_cpu_capability(), reason="this machine has no wide registers"
)


@pytest.fixture(scope="module")
def narrow() -> ctypes.CDLL:
    """The kernels, built as if there were no wide registers."""
    made = kernels("-mno-avx512f")
    assert (made.paceline_abreast(), build.library().paceline_abreast()) == (1, 2)
    return made


ROWS = (*range(1, 14), 23, 25, 33, 70)
CALLS: dict[str, Callable[[], Iterator[Call]]] = {
    **{f"{s}": partial(products, s, ROWS) for s in ((7, 5), (16, 16), (33, 96), (97, 261), (384, 130))},
    **{f"quantised {s}": partial(quantised_products, s, ROWS[::4]) for s in ((32, 5), (96, 261), (2048, 5))},
    **{f"attention {w}, {t}": partial(attentions, w, tree=t) for w in (12, 20, 48, 64) for t in (False, True)},
}


@pytest.mark.parametrize("name", CALLS)
def test_wide_kernels_give_the_bits_of_narrow_ones(narrow: ctypes.CDLL, name: str) -> None:
    for kernel, arguments in CALLS[name]():
        assert all(map(torch.equal, *(called(library, kernel, *arguments) for library in (narrow, build.library()))))
