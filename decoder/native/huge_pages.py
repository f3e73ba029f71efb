"""Weights in pages of 2 MB, where the system has them.

A token reads every weight once, in order. With pages of 4 kB that stream stops at every page: for a translation of the
address, and because processors do not fetch ahead over the end of a page. Not here: caches.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterable

from torch import Tensor

PAGE = 2 << 20
_HUGEPAGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE, and MADV_COLLAPSE of Linux 6.1: madvise(2)


def use_huge_pages(tensors: Iterable[Tensor]) -> None:
    """Move the memory of these tensors to huge pages, where it is; their addresses and contents stay.

    Pages that are not mostly theirs are left alone, so that memory grows by little. Systems that have no huge pages
    lose speed alone.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes, madvise.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    runs = _runs(sorted(page for page, used in _pages(tensors).items() if used >= PAGE // 2))
    for run in runs:
        madvise(run.start, len(run), _HUGEPAGE)  # older systems then do it in the background
        madvise(run.start, len(run), _COLLAPSE)  # one call for a run: each waits for all processors


def _runs(pages: list[int]) -> list[range]:
    """Addresses of pages, in order, as ranges of bytes without a gap."""
    runs: list[range] = []
    for page in pages:
        if runs and runs[-1].stop == page:
            runs[-1] = range(runs[-1].start, page + PAGE)
        else:
            runs.append(range(page, page + PAGE))
    return runs


def _pages(tensors: Iterable[Tensor]) -> Counter[int]:
    """Addresses of pages, and the bytes of these tensors that lie there."""
    used: Counter[int] = Counter()
    storages = (one.untyped_storage() for one in tensors)
    for begin, size in {(one.data_ptr(), one.nbytes()) for one in storages}:
        for page in range(begin // PAGE * PAGE, begin + size, PAGE):
            used[page] += min(begin + size, page + PAGE) - max(begin, page)
    return used
