"""Weights in pages of 2 MB: the memory is the same, in fewer pages. Not their speed."""

import ctypes
import mmap
import re
from pathlib import Path

import pytest
import torch

from paceline.decoder.native.ops import PAGE, use_huge_pages


def huge_bytes(address: int) -> int:
    """How much of the mapping that holds this address is in huge pages."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found = int(line.split()[1]) * 1024
    return found


def collapses() -> bool:
    """Whether this system makes pages huge when asked (MADV_COLLAPSE, Linux 6.1)."""
    with mmap.mmap(-1, 3 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"1" * len(memory))
        address = ctypes.addressof(place := ctypes.c_char.from_buffer(memory))
        whole = ctypes.c_void_p((address + PAGE - 1) // PAGE * PAGE)
        done = ctypes.CDLL(None).madvise(whole, ctypes.c_size_t(PAGE), 25) == 0
        del place
    return done


@pytest.mark.skipif(not collapses(), reason="this system does not make pages huge when asked")
def test_contents_stay_and_whole_pages_become_huge() -> None:
    # memory of its own: what the heap hands out may lie in pages that an earlier test has made huge
    memory = mmap.mmap(-1, 4 * PAGE + 4000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    weight = torch.frombuffer(memory, dtype=torch.float32)  # at least three whole pages, wherever it lies
    weight.normal_()
    view, before, address = weight.view(-1, 8)[3:], weight.clone(), weight.data_ptr()
    first = (address // PAGE + 1) * PAGE
    huge = huge_bytes(first)
    use_huge_pages([view, view.T])
    assert weight.equal(before) and weight.data_ptr() == address
    assert huge + 3 * PAGE <= huge_bytes(first) <= huge + 5 * PAGE


def test_small_tensors_do_not_make_pages_huge() -> None:
    tensors = [torch.zeros(1000) for _ in range(3)]
    huge = [huge_bytes(one.data_ptr()) for one in tensors]
    use_huge_pages(tensors)
    assert [huge_bytes(one.data_ptr()) for one in tensors] == huge
