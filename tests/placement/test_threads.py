"""What runs apart leaves no thread of OpenMP behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.placement.host.processes import run_apart

PROGRAM = """
import os, time, torch
from paceline.placement.host.processes import run_apart
torch.set_num_threads(2)
def work():
    torch.ones(2000, 2000).exp().sum()  # a parallel loop
    return torch.get_num_threads()
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
threads, end = run_apart(work), time.monotonic() + 30
while count() > before and time.monotonic() < end:
    time.sleep(0.01)  # its threads end by themselves
apart = count()
work()
print(threads, apart - before, count() > apart)
"""


def test_a_team_of_threads_ends_with_its_thread() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["2", "0", "True"]


def test_what_it_raises_arrives() -> None:
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda: 1 / 0)
