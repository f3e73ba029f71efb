"""Drafter server in a separate process, for one target or several.

Every target has its own drafter object, and so its own state; the process serves one message at a time. Turns are fair:
the target that has used the least time is next, so that a busy one cannot starve the others. See also: how the process
is started (`process`, `cluster.replica_group`), and how a target handles its failure (`drafter`).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter
from time import perf_counter, sleep
from typing import Protocol

from paceline.core.errors import ChannelError
from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Proposal, SamplingTensors
from paceline.placement.host import processes
from paceline.placement.lookahead import LookaheadDrafter
from paceline.placement.remote import messages
from paceline.placement.remote.channel import Channel, RequestWarmer


class _TargetSession:
    """Connected target, and the drafter that it got at its handshake.

    time_used  total time of its messages, on the server's clock
    lookahead  the drafter, if it drafts asynchronously: its type is checked once, since every round depends on it
    """

    def __init__(self, channel: Channel, time_used: float) -> None:
        self.channel = channel
        self.time_used = time_used
        self.drafter: Drafter | None = None
        self.lookahead: LookaheadDrafter | None = None
        self.inbox: deque[bytearray] = deque()
        self.warmer = RequestWarmer(self._encoded)
        self._sampling: SamplingTensors | None = None
        self._used_slots: int | None = None  # of `RoundLimits`; unchanged as long as the sampling is
        self._error = ""  # failure of a message without a reply; reported in the next reply

    @property
    def works_ahead(self) -> bool:
        """Whether its drafter has work to do before the target's next request."""
        return self.lookahead is not None and not self.lookahead.idle

    def add_request(self, request: messages.AddRequest) -> None:
        """Read a prompt. No reply is due; the next reply reports a failure."""
        drafter = self._granted()
        try:
            drafter.add_request(request.slot, request.prompt)
        except Exception as error:  # a drafter may raise anything; the target decides how to handle it
            self._error = repr(error)

    def propose(self, request: messages.ProposeRequest, frame: bytearray) -> bytes:
        """Return the encoded reply to a round: a proposal, or the reason for none. ``frame``: as received."""
        drafter = self._granted()
        error, self._error = self._error, ""
        if error:
            return messages.encode(messages.ErrorReply(request.number, error))
        try:
            for slot, text in request.texts:
                drafter.add_request(slot, text)
            if request.sampling is not None:
                self._sampling = request.sampling.tensors()
                seated = enumerate(self._sampling.seated.tolist(), 1)
                self._used_slots = max((slot for slot, taken in seated if taken), default=1)
            if self._sampling is None:
                raise ValueError(
                    "expected the sampling parameters in the first round of a connection, got none; run the same "
                    "version on both sides"
                )
            buffer, commit, limits = self.warmer.commit(request)
            if request.pause_us and self.lookahead is not None:
                self.lookahead.paused(request.pause_us / 1e6)
            drafter.update(commit)
            limits = replace(limits, used_slots=self._used_slots)
            proposal = drafter.propose(commit, self._sampling, limits)
            reply = self._encoded(request.number, proposal)
            self.warmer.prepared(buffer, proposal, None if request.texts else frame)
            return reply
        except Exception as failure:  # as above
            self.warmer.failed()
            return messages.encode(messages.ErrorReply(request.number, repr(failure)))

    def work_ahead(self) -> None:
        assert self.lookahead is not None
        try:
            self.lookahead.work()
        except Exception as error:  # as above
            self._error = repr(error)

    def _encoded(self, number: int, proposal: Proposal) -> bytes:
        drafter, rows = self._granted(), _undrawn_rows(proposal)
        if len(drafter.draft_lengths) > 1:  # proposals are padded when they are sent
            width = drafter.draft_shape.num_draft_tokens
            rows = [row + [PAD] * (width - len(row)) for row in rows]
        tokens = messages.pack_words([*chain.from_iterable(rows)])
        ahead = self.lookahead is not None and self.lookahead.hit
        return messages.encode(messages.ProposeReply(number, len(rows), len(rows[0]), tokens, ahead))

    def _granted(self) -> Drafter:
        if self.drafter is None:
            raise ChannelError(
                "expected a handshake from the target first, got a request; run the same version on both sides"
            )
        return self.drafter


def _undrawn_rows(proposal: Proposal) -> list[list[int]]:
    """Return the ids of a proposal. Only chains that were not sampled can be sent: their probabilities would be
    missing.
    """
    if proposal.draft_probs is not None or proposal.parents is not None:
        raise ValueError(
            "drafter: expected chains that are not sampled from a drafter in another process, got others; use "
            "another drafter"
        )
    rows: list[list[int]] = proposal.tokens.tolist()  # one call of the tensor library: see `channel`
    if not isinstance(rows[0][0], int):
        raise ValueError("drafter: expected integers as draft tokens, got others; correct the drafter")
    return rows


log = logging.getLogger("paceline")

_RETRY_S = 0.2  # between attempts to accept
_SEND_S = 5.0  # for a target to read a reply
_MAX_STRANGERS = 16  # connections that have not authenticated themselves, each with a thread for 5 seconds at most
_MAX_INBOX = 64  # messages of one target that may wait; more violate the protocol


class DrafterPool(Protocol):
    """Source of drafters for targets. Calls alternate with all other work, so they must be fast."""

    def acquire(self, handshake: messages.Handshake) -> Drafter:
        """Return a drafter for a connecting target; any error is sent as the reason why there is none."""

    def release(self, drafter: Drafter) -> None:
        """Take back the drafter of a disconnected target."""


@dataclass(frozen=True, slots=True)
class UnpooledDrafters:
    """Drafters that are created when a target connects, and dropped when it disconnects."""

    acquire: Callable[[messages.Handshake], Drafter]

    def release(self, drafter: Drafter) -> None:
        """Drop the drafter (`DrafterPool.release`)."""


class ConnectionListener:
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
        threading.Thread(target=self._accept, daemon=True, name="paceline-accept").start()

    def wake(self) -> bool:
        """End a wait on `fileno`, from any thread. False: it is already closed."""
        try:
            self._wake.send(b".")
        except OSError:
            return False
        return True

    def take(self) -> list[Channel]:
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
                log.warning("accepting a target's connection failed (%s); retrying", error)  # no file descriptor left
                sleep(_RETRY_S)
                continue
            if not self._strangers.acquire(blocking=False):
                log.warning("%d connections are not authenticated yet; closing a new one", _MAX_STRANGERS)
                connection.close()
                continue
            threading.Thread(target=self._authenticate, args=(connection,), daemon=True).start()

    def _authenticate(self, connection: socket.socket) -> None:
        try:
            channel = Channel(connection)
            channel.authenticate(self._secret, server=True)
        except (ChannelError, OSError):
            connection.close()
            return
        finally:
            self._strangers.release()
        self._arrived.append(channel)
        if not self.wake():
            channel.close()


_time_used = attrgetter("time_used")


class TargetQueue:
    """Order in which the targets' messages are served."""

    def __init__(self) -> None:
        self._clock = 0.0
        self._ready: list[_TargetSession] = []  # those with waiting messages
        self.lookahead: list[_TargetSession] = []  # those whose drafters draft asynchronously

    def session(self, channel: Channel) -> _TargetSession:
        """Return a session for a new target; it starts with as much used time as the others."""
        return _TargetSession(channel, self._clock)

    def arrived(self, session: _TargetSession, frames: list[bytearray]) -> None:
        if not session.inbox:  # idle time is not saved up
            session.time_used = max(session.time_used, self._clock)
            self._ready.append(session)
        session.inbox += frames

    def next(self) -> _TargetSession | None:
        """Return the target whose message is next, and begin its turn; None if no message waits."""
        if not self._ready:
            return None
        session = self._ready[0] if len(self._ready) == 1 else min(self._ready, key=_time_used)
        self._clock = session.time_used
        return session

    def served(self, session: _TargetSession) -> None:
        if not session.inbox:
            self._ready.remove(session)

    def next_lookahead(self) -> _TargetSession | None:
        """Return the target with asynchronous drafting work; None if there is none."""
        return min((s for s in self.lookahead if s.works_ahead), key=_time_used, default=None)

    @property
    def busy(self) -> bool:
        """Whether there is work to do even if no message arrives."""
        return bool(self._ready) or any(session.works_ahead for session in self.lookahead)

    def remove(self, session: _TargetSession) -> None:
        for sessions in self.lookahead, self._ready:
            if session in sessions:
                sessions.remove(session)


class DraftServer:
    """Server of proposals, until it is stopped. Each target has a drafter of the pool."""

    def __init__(self, listener: socket.socket, secret: bytes, pool: DrafterPool) -> None:
        self._pool = pool
        self._acceptor = ConnectionListener(listener, secret)
        self._sessions: dict[int, _TargetSession] = {}  # by the number of its socket
        self._turns = TargetQueue()
        self._replied: _TargetSession | None = None  # had the last reply, and is not prepared for its next round
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
        busy = False
        try:
            while not self._stopped:
                busy = self._turn(busy=busy)
        finally:
            self._acceptor.close()
            for session in list(self._sessions.values()):
                self._drop(session)

    def _turn(self, *, busy: bool) -> bool:
        """Read what has arrived and serve one message; without one, draft asynchronously. Return whether the next turn
        has work even if nothing arrives.
        """
        for number, _ in self._poll.poll(0) if busy else self._wait():
            session = self._sessions.get(number)
            if session is not None:
                self._read(session)
                continue
            for channel in self._acceptor.take():
                arrived = self._sessions[channel.fileno()] = self._turns.session(channel)
                self._poll.register(channel, select.POLLIN)
                self._read(arrived)  # its first message may have come together with its authentication
        if (session := self._turns.next()) is not None:
            self._serve(session)
        elif (session := self._turns.next_lookahead()) is not None:
            begin = perf_counter()
            session.work_ahead()
            session.time_used += perf_counter() - begin
        # The target that has its reply may have to continue on this CPU: little is done before the next wait.
        return self._turns.busy

    def _wait(self) -> list[tuple[int, int]]:
        """Wait for messages. Shortly before the target with the last reply is due, prepare its next round."""
        session, self._replied = self._replied, None
        if session is None:
            return self._poll.poll(None)
        return session.warmer.wait(self._poll.poll, only_target=len(self._sessions) == 1)

    def _read(self, session: _TargetSession) -> None:
        try:
            frames = session.channel.arrived()
        except ChannelError:
            self._drop(session)
            return
        if frames:
            self._turns.arrived(session, frames)
            if len(session.inbox) > _MAX_INBOX:
                self._drop(session)

    def _serve(self, session: _TargetSession) -> None:
        begin = perf_counter()
        frame = session.inbox.popleft()
        try:
            match messages.decode_request(frame):
                case messages.ProposeRequest() as request:
                    session.channel.send(session.propose(request, frame), _SEND_S)
                    session.warmer.replied(request.pause_us / 1e6)
                    self._replied = session
                case messages.AddRequest() as request:
                    session.add_request(request)
                case messages.Handshake() as handshake:
                    session.channel.send(messages.encode(self._accept(session, handshake)), _SEND_S)
            self._turns.served(session)
        except ChannelError:
            self._drop(session)
        session.time_used += perf_counter() - begin

    def _accept(self, session: _TargetSession, handshake: messages.Handshake) -> messages.Reply:
        """Return the reply to a handshake: the granted drafter's properties, or the reason for none."""
        number = handshake.number
        if session.drafter is not None:
            raise ChannelError("expected one handshake from a target, got another; run the same version on both sides")
        try:
            drafter = self._pool.acquire(handshake)
        except Exception as error:  # a drafter may be anything
            return messages.ErrorReply(number, repr(error))
        if drafter.reads is not None or not drafter.draft_shape.is_chain:
            self._pool.release(drafter)
            return messages.ErrorReply(
                number, "a drafter in another process must propose chains, and read no features; run it with its target"
            )
        session.drafter = drafter
        if isinstance(drafter, LookaheadDrafter):
            session.lookahead = drafter
            self._turns.lookahead.append(session)
        process = processes.running(os.getpid())
        return messages.HandshakeReply(number, drafter.draft_shape.num_draft_tokens, drafter.max_positions, process)

    def _drop(self, session: _TargetSession) -> None:
        number = session.channel.fileno()
        self._poll.unregister(number)
        del self._sessions[number]
        self._turns.remove(session)
        session.channel.close()
        if session.drafter is not None:
            self._pool.release(session.drafter)
