"""Connecting to a drafter's process and bringing it back, in a thread of its own, so that no round waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Protocol

from paceline.core.drafter_statistics import State
from paceline.core.errors import ChannelError
from paceline.placement.host.processes import Process
from paceline.placement.remote import messages
from paceline.placement.remote.channel import Address, Channel, SilentError, connect

STARTUP_TIMEOUT_S = 600.0
"""Seconds in which a drafter's process can be called, unless another time is given: it loads and compiles first."""
_POLL_S = 1.0  # between looks whether to stop
_JOIN_S = 10.0  # that the thread may take to end
_CALL_S = 2.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.02, 1.0  # between calls
_FIRST_RESTART_S = 0.2  # between restarts of a process that dies before it can be called
_MAX_DOUBLINGS = 64  # a float has no room for the thousands that weeks of faults would come to


class ProcessSupervisor(Protocol):
    """Keeps a drafter's process alive."""

    def replace(self, process: Process | None) -> bool:
        """Kill the process if it is still the one that runs (None: whichever runs), and have a new one come up.

        Returns whether anything was done.
        """

    def ensure(self) -> bool:
        """Start a process if none runs. Returns whether one was started."""


@dataclass(frozen=True, slots=True)
class DrafterEndpoint:
    """How to reach a drafter.

    supervisor         restarts its process; None: something else does, and it is only called again
    startup_timeout_s  a process that cannot be called for so long is replaced; one that answers, even with a refusal,
                       is not, for it may serve other targets
    """

    address: Address
    secret: bytes = field(repr=False)
    supervisor: ProcessSupervisor | None = None
    startup_timeout_s: float = STARTUP_TIMEOUT_S


@dataclass(slots=True)
class Backoff:
    """How long a drafter is left alone: twice as long after each failure in a row, from ``first_s`` up to ``max_s``."""

    first_s: float
    max_s: float
    failures: int = 0
    _until: float = 0.0

    def fail(self) -> None:
        """One more failure in a row."""
        self.failures += 1

    def reset(self) -> None:
        """It worked."""
        self.failures = 0

    @property
    def seconds(self) -> float:
        """The pause after so many failures."""
        doublings = min(max(0, self.failures - 1), _MAX_DOUBLINGS)
        return min(self.first_s * 2.0**doublings, self.max_s)

    def rest(self) -> None:
        """Begin the pause."""
        self._until = monotonic() + self.seconds

    @property
    def resting(self) -> bool:
        """Whether the pause lasts."""
        return self._until > monotonic()


class _RefusedError(ChannelError):
    """The drafter runs and does not accept this target, which asks again, less and less often."""


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
        self.channel: Channel | None = None  # not a property: every round looks at it
        self.restarts = 0
        self.last_error = ""

    @property
    def state(self) -> State:
        return "closed" if self._stop.is_set() else "up" if self._up.is_set() else "down"

    def wait(self, seconds: float) -> bool:
        """Whether there is a connection within so many seconds."""
        return self._up.wait(seconds)

    def begin(self, *, restart: bool, delay: float = 0.0) -> None:
        """Hang up, and connect anew in the background, after a restart of the process if that is asked for."""
        with self._lock:
            self._hang_up()
            if self._stop.is_set() or self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._reconnect, args=(restart, delay), daemon=True, name="paceline-reconnect"
            )
            self._thread.start()

    def close(self) -> None:
        """Stop for good."""
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
        """Until it works: restart the process where needed, call it, and wait longer after each failure."""
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
            except Exception as error:  # whatever it is: if this thread ended, nothing would call again
                self.last_error = str(error) if isinstance(error, ChannelError) else repr(error)
                pause = min(1.5 * pause, _MAX_PAUSE_S)
                silent_since = (silent_since or begin) if isinstance(error, SilentError) else None
                hangs = silent_since is not None and monotonic() - silent_since > self._hang_timeout_s
                if hangs or monotonic() > deadline:  # behind its socket, or before it can be called
                    self._supervise(lambda supervisor: supervisor.replace(None))
                    deadline, silent_since = monotonic() + self._endpoint.startup_timeout_s, None
                elif monotonic() > restart_at and self._supervise(lambda supervisor: supervisor.ensure()):
                    restart_pause = min(2 * restart_pause, self._max_backoff_s)  # it died before it could be called
                    restart_at = monotonic() + restart_pause
            self._stop.wait(pause)

    def _connected(self, channel: Channel) -> None:
        """Hand the connection over; this thread has nothing more to do."""
        with self._lock:
            if self._stop.is_set():
                channel.close()
                return
            self.channel, self._thread = channel, None
            self._up.set()

    def _supervise(self, act: Callable[[ProcessSupervisor], bool]) -> bool:
        """Whether the supervisor started a process. It may fail in any way, and is asked again then."""
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
        """A connection to a drafter that accepted this target before the deadline."""
        channel = connect(self._endpoint.address, self._endpoint.secret, seconds=_CALL_S)
        try:
            channel.send(messages.encode(self._handshake), _CALL_S)
            while (frame := channel.receive(_POLL_S)) is None:
                if self._stop.is_set() or monotonic() > deadline:
                    raise ChannelError("the drafter does not answer the handshake")
            reply = messages.decode_reply(frame)
            if isinstance(reply, messages.ErrorReply):
                raise _RefusedError(reply.reason)
            if not isinstance(reply, messages.HandshakeReply):
                raise ChannelError("the drafter answered the handshake with something else")
            if reply.num_draft_tokens != self._num_draft_tokens:
                raise _RefusedError(
                    f"the drafter proposes {reply.num_draft_tokens} tokens a round, not {self._num_draft_tokens}; "
                    "restart it with the same k"
                )
        except ChannelError:
            channel.close()
            raise
        self._process = replace(reply.process, pid=channel.peer() or reply.process.pid)
        return channel
