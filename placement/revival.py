"""Connecting to a drafter's process and bringing it back, in a thread of its own, so that no round waits for it."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from paceline.core.errors import ChannelError
from paceline.placement import wire
from paceline.placement.channel import Address, Channel, connect
from paceline.placement.health import State

_SAY_HELLO = 60.0  # seconds a drafter may take to make itself ready for a target
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between calls
_FIRST_REST = 0.2  # seconds between restarts of a process that dies before it can be called


class Keeper(Protocol):
    """Who keeps a drafter's process alive."""

    def replace(self, pid: int | None) -> bool:
        """Kill the process ``pid`` if it is still the one that runs (None: whichever runs), and have a new one come up.

        Returns whether anything was done.
        """

    def ensure(self) -> bool:
        """Start a process if none runs. Returns whether one was started."""


@dataclass(frozen=True, slots=True)
class Caller:
    """How to reach a drafter. ``keeper`` None: somebody else restarts it, and it is only called again.

    ``patience``: seconds after which a process that cannot be called is replaced.
    """

    address: Address
    secret: bytes
    keeper: Keeper | None = None
    patience: float = 120.0


class Revival:
    """Owns the connection. ``channel`` is None while there is none."""

    def __init__(self, caller: Caller, hello: wire.Hello, *, nodes: int, longest: float) -> None:
        self._caller, self._hello, self._nodes, self._longest = caller, hello, nodes, longest
        self._lock = threading.Lock()
        self._up, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._channel: Channel | None = None
        self.pid: int | None = None
        self.restarts = 0
        self.last_error = ""

    @property
    def channel(self) -> Channel | None:
        """The connection, if there is one."""
        return self._channel

    @property
    def state(self) -> State:
        return "closed" if self._stop.is_set() else "up" if self._up.is_set() else "down"

    def wait(self, seconds: float) -> bool:
        """Whether there is a connection within so many seconds."""
        return self._up.wait(seconds)

    def begin(self, *, restart: bool, delay: float = 0.0) -> None:
        """Hang up, and connect anew behind the caller's back."""
        with self._lock:
            self._hang_up()
            if self._stop.is_set() or self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._run, args=(restart, delay), daemon=True, name="paceline-revival"
            )
            self._thread.start()

    def close(self) -> None:
        """Stop for good."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_SAY_HELLO)
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        self._up.clear()
        if self._channel is not None:
            self._channel.close()
        self._channel = None

    def _run(self, restart: bool, delay: float) -> None:
        """Until it works: restart if need be, call, and wait longer after each failure."""
        if self._stop.wait(delay):
            return
        if restart:
            old, self.pid = self.pid, None
            self._replace(old)
        pause, begun, rest, again = _FIRST_PAUSE, monotonic(), _FIRST_REST, monotonic() + _FIRST_REST
        while not self._stop.is_set():
            try:
                channel = self._call()
            except ChannelError as error:
                self.last_error = str(error)
                if self._stop.wait(pause):
                    return
                pause = min(pause * 1.5, _LONGEST_PAUSE)
                if monotonic() - begun > self._caller.patience:  # it hangs before it can be called
                    self._replace(None)
                    begun = monotonic()
                elif monotonic() > again and self._caller.keeper is not None and self._caller.keeper.ensure():
                    self.restarts += 1  # it died before it could be called; if it does so again, leave it alone longer
                    rest = min(2 * rest, self._longest)
                    again = monotonic() + rest
                continue
            with self._lock:
                if self._stop.is_set():
                    channel.close()
                    return
                self._channel, self._thread = channel, None
                self._up.set()
            return

    def _replace(self, pid: int | None) -> None:
        if self._caller.keeper is not None:
            with suppress(ProcessLookupError):
                self.restarts += self._caller.keeper.replace(pid)

    def _call(self) -> Channel:
        channel = connect(self._caller.address, self._caller.secret, seconds=2.0)
        try:
            channel.send(wire.encode(self._hello), 2.0)
            frame = channel.receive(_SAY_HELLO)
            if frame is None:
                raise ChannelError("the drafter does not say welcome")
            reply = wire.decode(frame)
            if not isinstance(reply, wire.Welcome):
                raise ChannelError(reply.reason if isinstance(reply, wire.Failure) else "the drafter says no welcome")
            if reply.nodes != self._nodes:
                raise ChannelError(
                    f"the drafter proposes {reply.nodes} tokens a round, not {self._nodes}; start it anew"
                )
        except ChannelError:
            channel.close()
            raise
        self.pid = channel.peer() or reply.pid
        return channel
