"""A drafter's process on this machine without Ray: started, killed and started again by its parent.

with LocalProcess(order) as process:
    draft = RemoteDraft(terms, Caller(order.address, order.secret, process))
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field

from paceline.placement.cluster.roles import MAKERS, Settings
from paceline.placement.host import environment
from paceline.placement.host.processes import Process
from paceline.placement.planning.quota import Quota
from paceline.placement.remote.channel import Address

_LAST_WORDS = 5.0


@dataclass(frozen=True, slots=True)
class Order:
    """What to start. ``maker`` gets ``settings``; ``cores`` are the first and the last; ``env`` is the plan's."""

    address: Address
    secret: bytes = field(repr=False)
    settings: Settings
    maker: str = MAKERS["draft"]
    cores: tuple[int, int] | None = None
    env: tuple[tuple[str, str], ...] = ()
    quota: Quota = field(default_factory=Quota)

    def to_json(self) -> str:
        """One line; it goes through a pipe, so that no secret shows among the processes."""
        return json.dumps(
            {
                "address": str(self.address),
                "secret": self.secret.hex(),
                "settings": dict(self.settings),
                "maker": self.maker,
                "cores": self.cores,
                "env": self.env,
                "quota": self.quota.to_dict(),
            }
        )


class LocalProcess:
    """Keeps one drafter process. It ends with its parent: it watches the pipe that started it."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.ensure()

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    def replace(self, process: Process | None) -> bool:
        """Kill the process if it is still ours (None: whichever runs), and start a new one."""
        with self._lock:
            if self._closed or (self._runs and process is not None and process.pid != self.pid):
                return False
            self._end()
            self._start()
            return True

    def ensure(self) -> bool:
        """Start a process if none runs."""
        with self._lock:
            if self._closed or self._runs:
                return False
            self._end()
            self._start()
            return True

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "paceline.placement.remote.process"],
            stdin=subprocess.PIPE,
            env=environment.for_child(self._order.env),
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once; whoever calls it will see
            self._process.stdin.write(self._order.to_json().encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._closed = True
            self._end()

    def _end(self) -> None:
        if self._process is None:
            return
        self._process.kill()  # one that was stopped by a signal hears nothing else
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_WORDS)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()

    def __enter__(self) -> LocalProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
