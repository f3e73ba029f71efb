"""A drafter's process on this machine without Ray: started, killed and restarted by its parent.

    with LocalProcess(spec) as process:
        draft = RemoteDrafter(contract, DrafterEndpoint(spec.address, spec.secret, process))

Run as a module it is that process (`python -m paceline.placement.remote.process`, its `ProcessSpec` on stdin).
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from paceline.placement.cluster.roles import MAKERS, maker
from paceline.placement.host import environment
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.host.processes import Process
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.remote.channel import Address, listen
from paceline.placement.remote.server import DrafterPool, DraftServer

_EXIT_S = 5.0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Process to start: it calls ``maker`` with ``settings``; ``env`` is the plan's."""

    address: Address
    secret: bytes = field(repr=False)
    settings: dict[str, Any]
    maker: str = MAKERS["draft"]
    cores: CoreRange | None = None
    env: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> bytes:
        """Return one line of JSON; sent through a pipe, so that the secret is not visible in the process list."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, line: bytes) -> ProcessSpec:
        return msgspec.json.decode(line, type=cls)


class LocalProcess:
    """Supervises one drafter process. It ends with its parent: it watches the pipe that started it."""

    def __init__(self, spec: ProcessSpec) -> None:
        self._spec = spec
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.ensure()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def replace(self, process: Process | None) -> bool:
        """Kill the process if it is still the given one (None: the current one), and start a new one."""
        with self._lock:
            if self._closed or (self._runs and process is not None and process.pid != self.pid):
                return False
            self._start()
            return True

    def ensure(self) -> bool:
        with self._lock:
            if self._closed or self._runs:
                return False
            self._start()
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.placement.remote.process"],
            stdin=subprocess.PIPE,
            env=environment.for_child(self._spec.env),
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once, which its client will notice
            self._process.stdin.write(self._spec.to_json() + b"\n")
            self._process.stdin.flush()

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()  # a suspended process receives no other signal
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def __enter__(self) -> LocalProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Check the environment, lock the cores, create the drafter, and serve until the parent exits."""
    spec = ProcessSpec.from_json(sys.stdin.buffer.readline())
    threading.Thread(target=_follow_parent, daemon=True, name="paceline-parent").start()
    environment.check(spec.env)
    if spec.cores is not None:
        CoreLocks(spec.cores).acquire()
    pool = cast(DrafterPool, maker(spec.maker)(spec.settings))
    DraftServer(listen(spec.address), spec.secret, pool).run()


def _follow_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)  # the main thread may be inside a model; there is nothing to save


if __name__ == "__main__":
    main()
