"""Processes and their threads. A process is identified by its pid and start time: pids are reused, and no other process
may be killed later.

See also: which process is killed and why (`remote.reconnect`, `cluster.deployment`), and on which node (`nodes`).
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
_BITS = 31  # of a word in a message; at 100 ticks per second the count repeats after 248 days


@dataclass(frozen=True, slots=True)
class Process:
    """Process on some machine.

    pid    its process id on that machine
    began  its start, in clock ticks since boot; 0 if the system does not report it (there is no /proc)
    """

    pid: int
    began: int


def running(pid: int) -> Process:
    return Process(pid, _began(pid))


def kill(process: Process) -> bool:
    """Kill the process if it still runs; return whether it did. SIGKILL, since a suspended process handles nothing
    else.
    """
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
    """Call ``make`` in a thread that has ended when this returns; return or raise what it does.

    For a process that loads a model in one thread and computes in another. OpenMP keeps a team of threads for every
    thread that ever ran a parallel loop, until that thread ends. With two teams GNU's library has more threads than
    CPUs. Then they sleep between loops instead of spinning, and decoding takes up to twice as long
    (``gomp_throttled_spin_count_var``, https://github.com/gcc-mirror/gcc/blob/master/libgomp/env.c).
    """
    import torch  # not in processes without a model

    num_threads = torch.get_num_threads()  # each thread has its own setting

    def call() -> Made:
        torch.set_num_threads(num_threads)
        return make()

    with ThreadPoolExecutor(1, thread_name_prefix="paceline-load") as pool:
        return pool.submit(call).result()
