"""Which process is meant, when it is killed later: numbers of processes are given out again.

Not here: who is killed and why (`revival`, `group`), or on which machine (`nodes`).
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_STARTED = 19  # fields behind the name in /proc/PID/stat (proc_pid_stat(5): field 22)
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
    """End it, if it still runs; whether it did. One that was stopped hears nothing else."""
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
