"""Weights in pages of 2 MB: the memory is the same, in fewer pages. Not their speed."""

import ctypes
import mmap
from types import SimpleNamespace

import pytest
import torch

from paceline.decoder.native import ops
from paceline.decoder.native.ops import PAGE, use_huge_pages


def test_huge_pages_are_requested_for_complete_pages_and_contents_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to the system, not what it grants: that depends on how fragmented its memory is."""
    asked: list[tuple[range, int]] = []

    def madvise(start: int, size: int, advice: int) -> int:
        asked.append((range(start, start + size), advice))
        return real(start, size, advice)

    libc = ctypes.CDLL(None)
    real = libc.madvise
    real.argtypes, real.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    monkeypatch.setattr(ops.ctypes, "CDLL", lambda name: SimpleNamespace(madvise=madvise))
    memory = mmap.mmap(-1, 4 * PAGE + 4000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    weight = torch.frombuffer(memory, dtype=torch.float32)  # at least three whole pages, wherever it lies
    weight.normal_()
    view, before, address = weight.view(-1, 8)[3:], weight.clone(), weight.data_ptr()
    use_huge_pages([view, view.T])
    assert weight.equal(before) and weight.data_ptr() == address
    first = -(-address // PAGE) * PAGE
    (pages, huge), (same, now) = asked
    assert pages == same and (huge, now) == (14, 25)  # MADV_HUGEPAGE, then MADV_COLLAPSE
    assert pages.start % PAGE == len(pages) % PAGE == 0
    assert pages.start <= first and first + 3 * PAGE <= pages.stop <= address + len(memory) + PAGE


@pytest.mark.parametrize("number", [1000, PAGE // 8 - 1])
def test_pages_mostly_used_by_other_data_are_not_changed(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(ops.ctypes, "CDLL", lambda name: SimpleNamespace(madvise=lambda *call: asked.append(call[0])))
    memory = mmap.mmap(-1, 2 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % PAGE
    use_huge_pages([torch.frombuffer(memory, dtype=torch.float32, count=number, offset=begin)])
    assert asked == []
