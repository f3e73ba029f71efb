"""Processes and their threads. A process is known by more than its pid, which the system uses again, so that only that
one is killed later.

Not here: which process is killed and why (`remote.reconnect`, `cluster.deployment`), and on which node (`nodes`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_STARTED = 19  # fields after the name in /proc/PID/stat (proc_pid_stat(5): field 22)
_BITS = 31  # of a word on the wire; at 100 ticks a second the same count comes again after 248 days


@dataclass(frozen=True, slots=True)
class Process:
    """A process of some machine.

    pid    its number there
    began  when it did, in clock ticks since the machine did; 0 where a system does not say (there is no /proc)
    """

    pid: int
    began: int


def running(pid: int) -> Process:
    """The process that has this number now."""
    return Process(pid, _began(pid))


def kill(process: Process) -> bool:
    """Kill it if it still runs; whether it did. SIGKILL, since a stopped process handles nothing else."""
    if _began(process.pid) != process.began:
        return False
    with suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
        return True
    return False


def _began(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[_STARTED]) % (1 << _BITS)


Made = TypeVar("Made")


def run_apart(make: Callable[[], Made]) -> Made:
    """What ``make`` returns or raises, called in a thread that has ended when this returns.

    For a process that loads a model in one thread and computes in another. OpenMP keeps a team of threads for every
    thread that ever ran a parallel loop, until that one ends. With two teams GNU's library has more threads than there
    are CPUs, and then they sleep between loops instead of waiting for the next one, with which decoding takes up to
    twice as long (``gomp_throttled_spin_count_var``, https://github.com/gcc-mirror/gcc/blob/master/libgomp/env.c).
    """
    import torch  # not where no model is

    num_threads = torch.get_num_threads()  # each thread has a number of its own

    def call() -> Made:
        torch.set_num_threads(num_threads)
        return make()

    with ThreadPoolExecutor(1, thread_name_prefix="paceline-load") as pool:
        return pool.submit(call).result()
