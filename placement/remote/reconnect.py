"""Connection to a drafter's process and its recovery, in a separate thread, so that no round waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Protocol

from paceline.core.drafter_statistics import DrafterState
from paceline.core.errors import ChannelError
from paceline.placement.host.processes import Process
from paceline.placement.remote import messages
from paceline.placement.remote.channel import Address, Channel, SilentError, connect

STARTUP_TIMEOUT_S = 600.0
"""Default time in seconds until a drafter's process must respond; before that it loads and compiles."""
_POLL_S = 1.0  # between checks whether to stop
_JOIN_S = 10.0  # for the thread to end
_CALL_S = 2.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 1.0  # between calls
_FIRST_RESTART_S = 0.2  # between restarts of a process that dies before it can be called
_MAX_DOUBLINGS = 64  # a float cannot hold the powers that weeks of faults would reach


class ProcessSupervisor(Protocol):
    """Keeps a drafter's process alive."""

    def replace(self, process: Process | None) -> bool:
        """Kill the process if it is still the running one (None: any), and start a new one; return whether it did."""

    def ensure(self) -> bool:
        """Start a process if none is running; return whether one was started."""


@dataclass(frozen=True, slots=True)
class DrafterEndpoint:
    """Address and supervisor of a drafter.

    supervisor         restarts its process; None: another program does, and this one only reconnects
    startup_timeout_s  seconds without a response after which a process is replaced; one that responds, even with a
                       rejection, is not, since it may serve other targets
    """

    address: Address
    secret: bytes = field(repr=False)
    supervisor: ProcessSupervisor | None = None
    startup_timeout_s: float = STARTUP_TIMEOUT_S


@dataclass(slots=True)
class Backoff:
    """Pause after failures: doubled after each consecutive failure, from ``first_s`` up to ``max_s`` seconds."""

    first_s: float
    max_s: float
    failures: int = 0
    _until: float = 0.0

    @property
    def seconds(self) -> float:
        doublings = min(max(0, self.failures - 1), _MAX_DOUBLINGS)
        return min(self.first_s * 2.0**doublings, self.max_s)

    def rest(self) -> None:
        self._until = monotonic() + self.seconds

    @property
    def resting(self) -> bool:
        return self._until > monotonic()


class _RefusedError(ChannelError):
    """The drafter runs and rejects this target, which retries at increasing intervals."""


class Reconnector:
    """Owns the connection to a drafter. ``channel`` is None while there is none."""

    def __init__(
        self,
        endpoint: DrafterEndpoint,
        handshake: messages.Handshake,
        *,
        num_draft_tokens: int,
        max_backoff_s: float,
        hang_timeout_s: float,
    ) -> None:
        self._endpoint, self._handshake = endpoint, handshake
        self._num_draft_tokens, self._max_backoff_s = num_draft_tokens, max_backoff_s
        self._hang_timeout_s = hang_timeout_s
        self._lock = threading.Lock()
        self._up, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._process: Process | None = None
        self.channel: Channel | None = None  # not a property: every round reads it
        self.restarts = 0
        self.last_error = ""

    @property
    def state(self) -> DrafterState:
        return "closed" if self._stop.is_set() else "up" if self._up.is_set() else "down"

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for a connection; return whether there is one."""
        return self._up.wait(seconds)

    def begin(self, *, restart: bool, delay: float = 0.0) -> None:
        """Close the connection and reconnect in the background, with a restart of the process if ``restart``."""
        with self._lock:
            self._hang_up()
            if self._stop.is_set() or self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._reconnect, args=(restart, delay), daemon=True, name="paceline-reconnect"
            )
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=_JOIN_S)
        with self._lock:
            self._hang_up()

    def _hang_up(self) -> None:
        self._up.clear()
        if self.channel is not None:
            self.channel.close()
        self.channel = None

    def _reconnect(self, restart: bool, delay: float) -> None:
        """Retry until connected: restart the process if needed, connect, and wait longer after each failure."""
        self.last_error = ""
        if self._stop.wait(delay):
            return
        if restart:
            old, self._process = self._process, None
            self._supervise(lambda supervisor: supervisor.replace(old))
        pause, restart_pause, restart_at = _FIRST_PAUSE_S, _FIRST_RESTART_S, monotonic() + _FIRST_RESTART_S
        deadline = monotonic() + self._endpoint.startup_timeout_s
        silent_since: float | None = None
        while not self._stop.is_set():
            begin = monotonic()
            try:
                self._connected(self._call(deadline))
                return
            except _RefusedError as error:
                self.last_error = str(error)
                pause, deadline = min(2 * pause, self._max_backoff_s), monotonic() + self._endpoint.startup_timeout_s
                silent_since = None
            except Exception as error:  # any error: if this thread ended, no thread would reconnect
                self.last_error = str(error) if isinstance(error, ChannelError) else repr(error)
                pause = min(1.5 * pause, _MAX_PAUSE_S)
                silent_since = (silent_since or begin) if isinstance(error, SilentError) else None
                hangs = silent_since is not None and monotonic() - silent_since > self._hang_timeout_s
                if hangs or monotonic() > deadline:  # it listens without responding, or never became reachable
                    self._supervise(lambda supervisor: supervisor.replace(None))
                    deadline, silent_since = monotonic() + self._endpoint.startup_timeout_s, None
                elif monotonic() > restart_at and self._supervise(lambda supervisor: supervisor.ensure()):
                    restart_pause = min(2 * restart_pause, self._max_backoff_s)  # it died before it could be called
                    restart_at = monotonic() + restart_pause
            self._stop.wait(pause)

    def _connected(self, channel: Channel) -> None:
        """Publish the connection, which ends this thread's work."""
        with self._lock:
            if self._stop.is_set():
                channel.close()
                return
            self.channel, self._thread = channel, None
            self._up.set()

    def _supervise(self, act: Callable[[ProcessSupervisor], bool]) -> bool:
        """Call the supervisor; return whether it started a process. It may fail in any way, and is then retried."""
        if self._endpoint.supervisor is None:
            return False
        try:
            started = act(self._endpoint.supervisor)
        except ProcessLookupError:
            return False
        except Exception as error:
            self.last_error = repr(error)
            return False
        self.restarts += started
        return started

    def _call(self, deadline: float) -> Channel:
        """Return a connection to a drafter that accepted this target before the deadline."""
        channel = connect(self._endpoint.address, self._endpoint.secret, seconds=_CALL_S)
        try:
            channel.send(messages.encode(self._handshake), _CALL_S)
            while (frame := channel.receive(_POLL_S)) is None:
                if self._stop.is_set() or monotonic() > deadline:
                    raise ChannelError("the drafter did not answer the handshake; see its log")
            reply = messages.decode_reply(frame)
            if isinstance(reply, messages.ErrorReply):
                raise _RefusedError(reply.reason)
            if not isinstance(reply, messages.HandshakeReply):
                raise ChannelError(
                    "expected a handshake from the drafter, got another message; run the same version on both sides"
                )
            if reply.num_draft_tokens != self._num_draft_tokens:
                raise _RefusedError(
                    f"k: expected {self._num_draft_tokens} draft tokens per round, got {reply.num_draft_tokens} "
                    "from the drafter; restart it with the same k"
                )
        except ChannelError:
            channel.close()
            raise
        self._process = replace(reply.process, pid=channel.peer() or reply.process.pid)
        return channel
