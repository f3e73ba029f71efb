"""Connecting to a drafter's process and bringing it back, in a thread of its own, so that no round waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Protocol

from paceline.core.drafter_health import State
from paceline.core.errors import ChannelError
from paceline.placement.host.processes import Process
from paceline.placement.remote import messages
from paceline.placement.remote.channel import Address, Channel, connect

START = 600.0
"""Seconds in which a drafter's process is there, unless it is said otherwise: it loads and compiles before."""
_LOOK = 1.0  # seconds between looks whether to stop
_LAST_WORDS = 10.0  # seconds that the thread may take to end
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0  # seconds between calls
_FIRST_REST = 0.2  # seconds between restarts of a process that dies before it can be called


class ProcessSupervisor(Protocol):
    """Who keeps a drafter's process alive."""

    def replace(self, process: Process | None) -> bool:
        """Kill the process if it is still the one that runs (None: whichever runs), and have a new one come up.

        Returns whether anything was done.
        """

    def ensure(self) -> bool:
        """Start a process if none runs. Returns whether one was started."""


@dataclass(frozen=True, slots=True)
class DrafterEndpoint:
    """How to reach a drafter. ``keeper`` None: somebody else restarts it, and it is only called again.

    ``patience``: seconds after which a process that cannot be called is replaced; one that answers, and be it with a
    refusal, never is, for it may serve others.
    """

    address: Address
    secret: bytes = field(repr=False)
    keeper: ProcessSupervisor | None = None
    patience: float = START


class _RefusedError(ChannelError):
    """The drafter lives and does not want this target; it is asked again, less and less often."""


class Reconnector:
    """Owns the connection. ``channel`` is None while there is none."""

    def __init__(self, caller: DrafterEndpoint, hello: messages.Handshake, *, nodes: int, longest: float) -> None:
        self._caller, self._hello, self._nodes, self._longest = caller, hello, nodes, longest
        self._lock = threading.Lock()
        self._up, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self.channel: Channel | None = None  # not a property: every round looks at it
        self.process: Process | None = None
        self.restarts = 0
        self.last_error = ""

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
            thread.join(timeout=_LAST_WORDS)
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        self._up.clear()
        if self.channel is not None:
            self.channel.close()
        self.channel = None

    def _run(self, restart: bool, delay: float) -> None:
        """Until it works: restart if need be, call, and wait longer after each failure."""
        self.last_error = ""
        if self._stop.wait(delay):
            return
        if restart:
            old, self.process = self.process, None
            self._kept(lambda keeper: keeper.replace(old))
        pause, rest, again = _FIRST_PAUSE, _FIRST_REST, monotonic() + _FIRST_REST
        end = monotonic() + self._caller.patience
        while not self._stop.is_set():
            try:
                self._take(self._call(end))
                return
            except _RefusedError as error:
                self.last_error = str(error)
                pause, end = min(2 * pause, self._longest), monotonic() + self._caller.patience
            except Exception as error:  # whatever it is: if this thread ended, nobody would call again
                self.last_error = str(error) if isinstance(error, ChannelError) else repr(error)
                pause = min(1.5 * pause, _LONGEST_PAUSE)
                if monotonic() > end:  # it hangs before it can be called
                    self._kept(lambda keeper: keeper.replace(None))
                    end = monotonic() + self._caller.patience
                elif monotonic() > again and self._kept(lambda keeper: keeper.ensure()):
                    rest = min(2 * rest, self._longest)  # it died before it could be called; if so again, wait longer
                    again = monotonic() + rest
            self._stop.wait(pause)

    def _take(self, channel: Channel) -> None:
        """The connection is there; nothing more is to be done."""
        with self._lock:
            if self._stop.is_set():
                channel.close()
                return
            self.channel, self._thread = channel, None
            self._up.set()

    def _kept(self, act: Callable[[ProcessSupervisor], bool]) -> bool:
        """Whether the keeper started a process. It may fail in any way; it is asked again then."""
        if self._caller.keeper is None:
            return False
        try:
            started = act(self._caller.keeper)
        except ProcessLookupError:
            return False
        except Exception as error:
            self.last_error = repr(error)
            return False
        self.restarts += started
        return started

    def _call(self, end: float) -> Channel:
        """A connection to a drafter that said welcome, before ``end``."""
        channel = connect(self._caller.address, self._caller.secret, seconds=2.0)
        try:
            channel.send(messages.encode(self._hello), 2.0)
            while (frame := channel.receive(_LOOK)) is None:
                if self._stop.is_set() or monotonic() > end:
                    raise ChannelError("the drafter does not say welcome")
            reply = messages.decode(frame)
            if isinstance(reply, messages.ErrorReply):
                raise _RefusedError(reply.reason)
            if not isinstance(reply, messages.HandshakeReply):
                raise ChannelError("the drafter says no welcome")
            if reply.nodes != self._nodes:
                raise _RefusedError(
                    f"the drafter proposes {reply.nodes} tokens a round, not {self._nodes}; start it anew"
                )
        except ChannelError:
            channel.close()
            raise
        self.process = replace(reply.process, pid=channel.peer() or reply.process.pid)
        return channel
