"""Threads of parallel loops. Not here: how many a process takes (`paceline.placement.host.environment`)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Made = TypeVar("Made")


def run_apart(make: Callable[[], Made]) -> Made:
    """What ``make`` returns or raises, called in a thread that has ended when this returns.

    For a process that loads a model in one thread and computes in another. OpenMP keeps a team of threads for every
    thread that ever ran a parallel loop, until that one ends. With two teams GNU's library has more threads than there
    are CPUs, and then they sleep between loops instead of waiting for the next one, with which decoding takes up to
    twice as long (``gomp_throttled_spin_count_var``, https://github.com/gcc-mirror/gcc/blob/master/libgomp/env.c).
    """
    num_threads = torch.get_num_threads()  # each thread has a number of its own

    def call() -> Made:
        torch.set_num_threads(num_threads)
        return make()

    with ThreadPoolExecutor(1, thread_name_prefix="paceline-load") as pool:
        return pool.submit(call).result()
