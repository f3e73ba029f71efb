"""Exclusive cores by file locks, one process per core. The Neuron runtime does the same; this also works without it.

A lock ends with its process, so a dead worker never keeps a core. The file holds the pid of its owner. Cores are
distinguished by node: on a simulated cluster every node has a core 0.

Not `filelock`: the supported versions truncate the file when another process tries to take it, which erases the owner's
pid, and without flock they use a lock that outlives its process.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from time import monotonic, sleep

from paceline.core.errors import CoresBusyError, WorkerError
from paceline.placement.host.environment import lock_folder, private
from paceline.placement.planning.core_range import CoreRange

_PAUSE = 0.05
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class CoreLocks:
    """Locks on the cores of a range, held until `release` or the end of the process."""

    def __init__(self, cores: CoreRange, *, node: str = "local") -> None:
        self._cores, self._node = cores, re.sub(r"[^A-Za-z0-9_.-]", "_", node)
        self._held: list[int] = []

    def acquire(self, timeout: float = 10.0) -> None:
        """Lock every core, or raise CoresBusyError; wait ``timeout`` seconds for a process that is ending."""
        folder = lock_folder() / self._node
        private(folder)
        deadline = monotonic() + timeout
        try:
            for core in self._cores.cores:
                self._acquire(core, folder / f"core-{core}", deadline)
        except BaseException:
            self.release()
            raise

    def _acquire(self, core: int, path: Path, deadline: float) -> None:
        try:
            number = os.open(path, _OPEN | os.O_CREAT, 0o600)
        except OSError as error:
            raise WorkerError(f"the lock {path} cannot be opened ({error}); remove the file") from error
        self._held.append(number)
        while not _take(number):
            if monotonic() > deadline:
                raise CoresBusyError(
                    f"core {core} of {self._cores} is in use by process {_owner(path)}; stop it, or plan without "
                    "these cores"
                )
            sleep(_PAUSE)
        os.ftruncate(number, 0)
        os.pwrite(number, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        while self._held:
            os.close(self._held.pop())


def held(node: str = "local") -> dict[int, int]:
    """Return core -> pid of its owner, for the cores in use on a node of this host."""
    owners = {}
    folder = lock_folder() / re.sub(r"[^A-Za-z0-9_.-]", "_", node)
    for path in folder.glob("core-*") if folder.is_dir() else ():
        number = os.open(path, _OPEN)
        try:
            if not _take(number):
                owners[int(path.name.removeprefix("core-"))] = _owner(path)
        finally:
            os.close(number)
    return owners


def _take(number: int) -> bool:
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _owner(path: Path) -> int:
    return int(path.read_text() or 0)
