"""Weights in pages of 2 MB: the memory is the same, in fewer pages. Not their speed."""

import re
from pathlib import Path

import pytest
import torch

from paceline.decoder.native.huge_pages import PAGE, use_huge_pages


def huge_bytes(address: int) -> int:
    """How much of the mapping that holds this address is in huge pages."""
    inside, found = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith("AnonHugePages:"):
            found = int(line.split()[1]) * 1024
    return found


def test_contents_stay_and_whole_pages_become_huge() -> None:
    weight = torch.randn(4 * PAGE // 4 + 1000)  # at least three whole pages, wherever it lies
    view, before, address = weight.view(-1, 8)[3:], weight.clone(), weight.data_ptr()
    huge = use_huge_pages([view, view.T])
    if huge == 0:
        pytest.skip("this system does not collapse pages when asked (MADV_COLLAPSE, Linux 6.1)")
    assert weight.equal(before) and weight.data_ptr() == address
    assert 3 <= huge <= 5
    assert huge_bytes((address // PAGE + 1) * PAGE) >= 3 * PAGE


def test_small_tensors_do_not_make_pages_huge() -> None:
    assert use_huge_pages([torch.zeros(1000) for _ in range(3)]) == 0
