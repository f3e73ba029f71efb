"""Drafter server in a separate process, for one target or several, and that process without Ray.

Every target has its own drafter object, and so its own state; the process serves one message at a time. Turns are fair:
the target that has used the least time is next, so that a busy one cannot starve the others. See also: how a target
handles a failure (`drafter`), and the process on Ray (`cluster.actors`).

    with LocalProcess(spec) as process:
        draft = RemoteDrafter(contract, DrafterEndpoint(spec.address, spec.secret, process))
"""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from time import perf_counter, sleep
from typing import Any, Protocol, cast

import msgspec

from paceline.core.errors import ChannelError
from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Proposal, SamplingTensors
from paceline.placement.cluster.roles import MAKERS, maker
from paceline.placement.host import environment, processes
from paceline.placement.host.core_locks import CoreLocks
from paceline.placement.host.processes import Process
from paceline.placement.lookahead import LookaheadDrafter
from paceline.placement.planning.core_range import CoreRange
from paceline.placement.remote import protocol
from paceline.placement.remote.protocol import Address, Channel, listen

log = logging.getLogger("paceline")

_RETRY_S = 0.2  # between attempts to accept
_MAX_STRANGERS = 16  # connections that have not authenticated themselves, each with a thread for some seconds
_EXIT_S = 5.0


class _TargetSession:
    """Connected target.

    time_used  total time of its messages, on the server's clock
    drafter    granted at its handshake
    lookahead  the same drafter, if it drafts asynchronously
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.time_used = 0.0
        self.drafter: Drafter | None = None
        self.lookahead: LookaheadDrafter | None = None
        self._sampling: SamplingTensors | None = None
        self._used_slots: int | None = None  # of `RoundLimits`; unchanged as long as the sampling is
        self._error = ""  # failure of a message without a reply; reported in the next reply

    def grant(self, drafter: Drafter) -> None:
        """Set the drafter of this target."""
        self.drafter = drafter
        self.lookahead = drafter if isinstance(drafter, LookaheadDrafter) else None

    def add_request(self, request: protocol.AddRequest) -> None:
        """Read a prompt. No reply is due; the next reply reports a failure."""
        drafter = self._granted()
        try:
            drafter.add_request(request.slot, request.prompt)
        except Exception as error:  # a drafter may raise anything; the target decides how to handle it
            self._error = repr(error)

    def propose(self, request: protocol.ProposeRequest) -> protocol.Reply:
        """Return the reply to a round: a proposal, or the reason for none."""
        drafter = self._granted()
        error, self._error = self._error, ""
        if error:
            return protocol.ErrorReply(request.number, error)
        try:
            for slot, text in request.texts:
                drafter.add_request(slot, text)
            if request.sampling is not None:
                self._sampling = request.sampling.tensors()
                self._used_slots = _used_slots(self._sampling)
            if self._sampling is None:
                raise ValueError(
                    "expected the sampling parameters in the first round of a connection, got none; run the same "
                    "version on both sides"
                )
            if request.pause_us and self.lookahead is not None:
                self.lookahead.paused(request.pause_us / 1e6)
            commit = request.commit()
            drafter.update(commit)
            proposal = drafter.propose(commit, self._sampling, request.limits(self._used_slots))
            return self._reply(request.number, proposal)
        except Exception as failure:  # as above
            return protocol.ErrorReply(request.number, repr(failure))

    def work_ahead(self) -> None:
        """Do one unit of asynchronous drafting work."""
        assert self.lookahead is not None
        try:
            self.lookahead.work()
        except Exception as error:  # as above
            self._error = repr(error)

    def _reply(self, number: int, proposal: Proposal) -> protocol.ProposeReply:
        drafter, rows = self._granted(), _undrawn_rows(proposal)
        if len(drafter.draft_lengths) > 1:  # proposals are padded when they are sent
            width = drafter.draft_shape.num_draft_tokens
            rows = [row + [PAD] * (width - len(row)) for row in rows]
        tokens = protocol.pack_words([*chain.from_iterable(rows)])
        ahead = self.lookahead is not None and self.lookahead.hit
        return protocol.ProposeReply(number, len(rows), len(rows[0]), tokens, ahead)

    def _granted(self) -> Drafter:
        if self.drafter is None:
            raise ChannelError(
                "expected a handshake from the target first, got a request; run the same version on both sides"
            )
        return self.drafter


def _used_slots(sampling: SamplingTensors) -> int:
    """Return the number of slots, from the first one, that hold all requests."""
    return max((slot for slot, seated in enumerate(sampling.seated.tolist(), 1) if seated), default=1)


def _undrawn_rows(proposal: Proposal) -> list[list[int]]:
    """Return the ids of a proposal. Only chains that were not sampled can be sent: their probabilities would be
    missing.
    """
    if proposal.draft_probs is not None or proposal.parents is not None:
        raise ValueError(
            "drafter: expected chains that are not sampled from a drafter in another process, got others; use "
            "another drafter"
        )
    rows: list[list[int]] = proposal.tokens.tolist()
    if not isinstance(rows[0][0], int):
        raise ValueError("drafter: expected integers as draft tokens, got others; correct the drafter")
    return rows


class DrafterPool(Protocol):
    """Source of drafters for targets. Calls alternate with all other work, so they must be fast."""

    def acquire(self, handshake: protocol.Handshake) -> Drafter:
        """Return a drafter for a connecting target; any error is sent as the reason why there is none."""

    def release(self, drafter: Drafter) -> None:
        """Take back the drafter of a disconnected target."""


@dataclass(frozen=True, slots=True)
class UnpooledDrafters:
    """Drafters that are created when a target connects, and dropped when it disconnects."""

    acquire: Callable[[protocol.Handshake], Drafter]

    def release(self, drafter: Drafter) -> None:
        """Drop the drafter (`DrafterPool.release`)."""


class Acceptor:
    """Accepts and authenticates connections in threads; a slow one does not delay the others."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        self._listener, self._secret = listener, secret
        self._arrived: deque[Channel] = deque()
        self._closed = False
        self._strangers = threading.BoundedSemaphore(_MAX_STRANGERS)
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)

    def fileno(self) -> int:
        """Return a descriptor that is readable after an arrival or `wake`."""
        return self._woken.fileno()

    def start(self) -> None:
        """Start accepting connections."""
        threading.Thread(target=self._accept, daemon=True, name="paceline-accept").start()

    def wake(self) -> bool:
        """End a wait on `fileno`, from any thread. False: it is already closed."""
        try:
            self._wake.send(b".")
        except OSError:
            return False
        return True

    def take(self) -> list[Channel]:
        """Return the connections that have arrived."""
        with suppress(BlockingIOError):
            self._woken.recv(4096)
        return [self._arrived.popleft() for _ in range(len(self._arrived))]

    def close(self) -> None:
        """Stop accepting, and close the connections that were not taken."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing would not wake the thread that accepts
        self._listener.close()
        while self._arrived:
            self._arrived.popleft().close()
        self._wake.close()
        self._woken.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closed or self._listener.fileno() < 0:
                    return
                log.warning("a drafter cannot accept a target (%s); it tries again", error)  # no file descriptor left
                sleep(_RETRY_S)
                continue
            if not self._strangers.acquire(blocking=False):
                log.warning("%d connections have not authenticated themselves; another one is closed", _MAX_STRANGERS)
                connection.close()
                continue
            threading.Thread(target=self._authenticate, args=(connection,), daemon=True).start()

    def _authenticate(self, connection: socket.socket) -> None:
        channel = None
        try:
            channel = Channel(connection)
            channel.authenticate(self._secret, server=True)
        except (ChannelError, OSError):
            (channel or connection).close()
            return
        finally:
            self._strangers.release()
        self._arrived.append(channel)
        if not self.wake():
            channel.close()


class DraftServer:
    """Server of proposals, until it is stopped. Each target has a drafter of the pool."""

    def __init__(self, listener: socket.socket, secret: bytes, pool: DrafterPool) -> None:
        self._pool = pool
        self._acceptor = Acceptor(listener, secret)
        self._sessions: dict[int, _TargetSession] = {}  # by the number of its socket
        self._ready: list[_TargetSession] = []  # those whose messages wait
        self._clock = 0.0  # time used by the target served last
        self._stopped = False
        self._poll = select.poll()  # without the layers of `selectors`: every call is part of a round
        self._poll.register(self._acceptor, select.POLLIN)

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._stopped = True
        self._acceptor.wake()

    def run(self) -> None:
        """Serve until `stop`; then close every connection."""
        self._acceptor.start()
        try:
            while not self._stopped:
                self._turn()
        finally:
            self._acceptor.close()
            for session in list(self._sessions.values()):
                self._drop(session)

    def _turn(self) -> None:
        """Serve one message, of the target that has used the least time; without one, draft asynchronously."""
        ahead = [one for one in self._sessions.values() if one.lookahead is not None and not one.lookahead.idle]
        ready = []
        for number, _ in self._poll.poll(0 if ahead else None):
            if (session := self._sessions.get(number)) is None:
                for channel in self._acceptor.take():
                    self._sessions[channel.fileno()] = _TargetSession(channel)
                    self._poll.register(channel, select.POLLIN)
                continue
            if session not in self._ready:  # idle time is not saved up
                session.time_used = max(session.time_used, self._clock)
            ready.append(session)
        self._ready = ready
        if not ready and not ahead:
            return
        session = min(ready or ahead, key=_time_used)
        begin = perf_counter()
        if ready:
            self._clock = session.time_used
            self._serve(session)
        else:
            session.work_ahead()
        session.time_used += perf_counter() - begin

    def _serve(self, session: _TargetSession) -> None:
        """Serve a message of a target; drop a target that is gone, or violates the protocol."""
        try:
            match protocol.decode_request(session.channel.read()):
                case protocol.ProposeRequest() as request:
                    session.channel.send(protocol.encode(session.propose(request)))
                case protocol.AddRequest() as request:
                    session.add_request(request)
                case protocol.Handshake() as handshake:
                    session.channel.send(protocol.encode(self._accept(session, handshake)))
        except ChannelError:
            self._drop(session)

    def _accept(self, session: _TargetSession, handshake: protocol.Handshake) -> protocol.Reply:
        """Return the reply to a handshake: the granted drafter's properties, or the reason for none."""
        number = handshake.number
        if session.drafter is not None:
            raise ChannelError("expected one handshake from a target, got another; run the same version on both sides")
        try:
            drafter = self._pool.acquire(handshake)
        except Exception as error:  # a drafter may be anything
            return protocol.ErrorReply(number, repr(error))
        if drafter.reads is not None or not drafter.draft_shape.is_chain:
            self._pool.release(drafter)
            return protocol.ErrorReply(
                number, "a drafter in another process must propose chains, and read no features; run it with its target"
            )
        session.grant(drafter)
        process = processes.running(os.getpid())
        return protocol.HandshakeReply(number, drafter.draft_shape.num_draft_tokens, drafter.max_positions, process)

    def _drop(self, session: _TargetSession) -> None:
        number = session.channel.fileno()
        self._poll.unregister(number)
        del self._sessions[number]
        session.channel.close()
        if session.drafter is not None:
            self._pool.release(session.drafter)


def _time_used(session: _TargetSession) -> float:
    return session.time_used


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
        """Read the output of `to_json`."""
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
        """PID of the running draft process."""
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
        """Start a process if none is running."""
        with self._lock:
            if self._closed or self._runs:
                return False
            self._start()
            return True

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._closed = True
            self._end()

    @property
    def _runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _start(self) -> None:
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
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
    """Check the environment, lock the cores, make the drafter, and serve until the parent has ended."""
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
