"""Identifies a process beyond its pid, so that only that one is killed later: the system uses pids again.

Not here: which process is killed and why (`remote.reconnect`, `cluster.worker_group`), and on which node (`nodes`).
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
