"""A drafter in a process of its own, for one target or several.

Every target has its own drafter object, and so its own state; the process serves one message at a time. Turns are
fair: who has used the least time (over its share) goes first, so that a busy target cannot starve the others.
Not here: how the process is started (`local`, `actors`), and what a target does when this fails (`remote`).
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
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import Protocol

from paceline.core.errors import ChannelError
from paceline.core.protocols import Drafter, Varies
from paceline.core.types import PAD, Proposal, SamplingBatch
from paceline.placement import processes, wire
from paceline.placement.ahead import Ahead
from paceline.placement.blanks import BlankRound, flat
from paceline.placement.channel import Channel
from paceline.placement.quota import Quota

log = logging.getLogger("paceline")

_BREATH = 0.2  # seconds between attempts to accept
_SEND = 5.0  # seconds a target may take to read an answer
_AWHILE = 1  # milliseconds: by then another process has taken up what was sent, if it is on the same CPU too
_PENDING = 64  # messages a target may have waiting; more is not our protocol


class Drafters(Protocol):
    """Who has drafters for targets. Called in turn with everything else: what takes long was done before."""

    def lend(self, hello: wire.Hello) -> Drafter:
        """A drafter for a target that calls; any error is the reason why there is none."""

    def take_back(self, drafter: Drafter) -> None:
        """The target hung up."""


@dataclass(frozen=True, slots=True)
class Unpooled:
    """Drafters that are made when a target calls, and forgotten when it hangs up."""

    lend: Callable[[wire.Hello], Drafter]

    def take_back(self, drafter: Drafter) -> None:
        """See `Drafters`."""


@dataclass(slots=True, eq=False)
class _Client:
    """One target. ``turn`` is the time it has used, over its share, on the server's clock."""

    channel: Channel
    name: str = ""
    slots: int = 0
    share: float = 1.0
    drafter: Drafter | None = None
    varies: bool = False  # its proposals may be shorter than its outline, and those that travel may not
    sampling: SamplingBatch | None = None
    blank: BlankRound | None = None
    pending: deque[bytearray] = field(default_factory=deque)
    turn: float = 0.0
    error: str = ""


class DraftServer:
    """Serves proposals until it is stopped. Each target has one of the ``drafters``."""

    def __init__(
        self, listener: socket.socket, secret: bytes, drafters: Drafters, *, quota: Quota | None = None
    ) -> None:
        self._listener, self._secret, self._drafters, self._quota = listener, secret, drafters, quota or Quota()
        self._clients: dict[int, _Client] = {}  # by the number of its socket
        self._arrivals: deque[Channel] = deque()
        self._clock = 0.0
        self._next: tuple[_Client, tuple[int, int]] | None = None  # who was answered last, and the shape of its commits
        self._stopped = False
        self._wake, self._woken = socket.socketpair()
        self._poll = select.poll()  # without the layers of `selectors`: every call is part of a round
        self._poll.register(self._woken, select.POLLIN)

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._stopped = True
        self._awaken()

    def _awaken(self) -> bool:
        """End a wait of `run`. False: it has ended meanwhile, and closed what it waits at."""
        try:
            self._wake.send(b".")
        except OSError:
            return False
        return True

    def run(self) -> None:
        """Serve. Returns after `stop`; then every connection is closed."""
        threading.Thread(target=self._accept, daemon=True, name="paceline-accept").start()
        try:
            while not self._stopped:
                self._turn()
        finally:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)  # closing alone would not wake the thread that accepts
            self._listener.close()
            for client in list(self._clients.values()):
                self._drop(client)
            while self._arrivals:
                self._arrivals.popleft().close()
            self._wake.close()
            self._woken.close()

    # ---- connections

    def _accept(self) -> None:
        """Let targets in; who is slow to introduce itself holds up nobody."""
        while not self._stopped:
            try:
                link, _ = self._listener.accept()
            except OSError as error:
                if self._stopped or self._listener.fileno() < 0:
                    return
                log.warning("a drafter cannot let a target in (%s); it tries again", error)  # no file is left to open
                sleep(_BREATH)
                continue
            threading.Thread(target=self._prove, args=(link,), daemon=True).start()

    def _prove(self, link: socket.socket) -> None:
        channel = Channel(link)
        try:
            channel.prove(self._secret, server=True)
        except ChannelError:
            channel.close()
            return
        self._arrivals.append(channel)
        if not self._awaken():
            channel.close()

    def _drop(self, client: _Client) -> None:
        number = client.channel.fileno()
        self._poll.unregister(number)
        del self._clients[number]
        client.channel.close()
        if client.drafter is not None:
            self._drafters.take_back(client.drafter)

    # ---- turns

    def _turn(self) -> None:
        """Read what has arrived and serve one message, or work ahead when there is none."""
        clients = self._clients.values()
        busy = any(client.pending for client in clients)
        eager = [c for c in clients if isinstance(c.drafter, Ahead) and not c.drafter.idle]
        for number, _ in self._poll.poll(0) if busy or eager else self._wait():
            if number in self._clients:
                self._read(self._clients[number])
            else:
                self._woken.recv(4096)
        while self._arrivals:
            client = _Client(self._arrivals.popleft(), turn=self._clock)
            self._clients[client.channel.fileno()] = client
            self._poll.register(client.channel, select.POLLIN)
            self._read(client)  # its first message may have come together with its proof
        ready = [client for client in clients if client.pending]
        if ready:
            self._serve(min(ready, key=lambda client: client.turn))
        elif eager:
            self._ahead(min(eager, key=lambda client: client.turn))

    def _wait(self) -> list[tuple[int, int]]:
        """Until something arrives. Tensors for the next round are made meanwhile, when whoever was answered runs."""
        if self._next is not None:
            if found := self._poll.poll(_AWHILE):
                return found
            client, shape = self._next
            client.blank, self._next = BlankRound(*shape), None
        return self._poll.poll(None)

    def _read(self, client: _Client) -> None:
        try:
            frames = client.channel.arrived()
            if frames and not client.pending:  # time in which it wanted nothing is not saved up
                client.turn = max(client.turn, self._clock)
            client.pending += frames
            if len(client.pending) > _PENDING:
                raise ChannelError("more messages than a target sends")
        except ChannelError:
            self._drop(client)

    def _serve(self, client: _Client) -> None:
        begin = perf_counter()
        self._clock = client.turn
        reply: wire.Reply | None = None
        try:
            message = wire.decode(client.pending.popleft())
            reply = self._reply(client, message)
            if reply is not None:
                client.channel.send(wire.encode(reply), _SEND)
            if isinstance(message, wire.Ask):
                self._next = client, (message.slots, message.width)
        except ChannelError:
            self._drop(client)
        client.turn += (perf_counter() - begin) / client.share

    def _ahead(self, client: _Client) -> None:
        begin = perf_counter()
        assert isinstance(client.drafter, Ahead)
        try:
            client.drafter.work()
        except Exception as error:  # a drafter may be anything; its failure is the target's to weigh
            client.error = repr(error)
        client.turn += (perf_counter() - begin) / client.share

    def _reply(self, client: _Client, message: wire.Request | wire.Reply) -> wire.Reply | None:
        if isinstance(message, wire.Hello):
            return self._welcome(client, message)
        if client.drafter is None or not isinstance(message, wire.Admit | wire.Ask):
            raise ChannelError("a target says hello first, and then sends requests")
        try:
            if isinstance(message, wire.Admit):
                client.drafter.admit(message.slot, message.text)
                return None
            if client.error:
                return wire.Failure(message.number, client.error)
            return self._proposal(client, client.drafter, message)
        except Exception as error:  # as above
            if isinstance(message, wire.Ask):
                return wire.Failure(message.number, repr(error))
            client.error = repr(error)
            return None
        finally:
            if isinstance(message, wire.Ask):
                client.error = ""

    def _proposal(self, client: _Client, drafter: Drafter, ask: wire.Ask) -> wire.Answer:
        for slot, text in ask.texts:
            drafter.admit(slot, text)
        client.sampling = ask.sampling or client.sampling
        if client.sampling is None:
            raise ValueError("the first round says how to sample")
        blank, client.blank = client.blank, None
        if blank is None or blank.shape != (ask.slots, ask.width):
            blank = BlankRound(ask.slots, ask.width)
        commit, bounds = blank.fill(ask.numbers, ask.rows)
        if ask.pause and isinstance(drafter, Ahead):
            drafter.paused(ask.pause / 1e6)
        drafter.observe(commit)
        rows = _undrawn(drafter.propose(commit, client.sampling, bounds))
        if client.varies:
            rows = [row + [PAD] * (drafter.outline.nodes - len(row)) for row in rows]
        ahead = isinstance(drafter, Ahead) and drafter.hit
        return wire.Answer(ask.number, len(rows), len(rows[0]), wire.words(flat(rows)), ahead)

    def _welcome(self, client: _Client, hello: wire.Hello) -> wire.Reply:
        others = [other for other in self._clients.values() if other is not client and other.drafter is not None]
        slots = hello.slots + sum(other.slots for other in others)
        if len(others) >= self._quota.clients or slots > self._quota.slots:
            return wire.Failure(hello.number, f"quota: {len(others)} targets with {slots - hello.slots} slots are here")
        if client.drafter is not None:
            raise ChannelError("a target says hello once")
        try:
            drafter = self._drafters.lend(hello)
        except Exception as error:  # as above
            return wire.Failure(hello.number, repr(error))
        if drafter.reads is not None or not drafter.outline.is_chain:
            self._drafters.take_back(drafter)
            return wire.Failure(hello.number, "a drafter in another process proposes chains, from tokens alone")
        client.name, client.slots, client.drafter = hello.client, hello.slots, drafter
        client.varies = isinstance(drafter, Varies)
        client.share = self._quota.shares.get(hello.client, 1.0)
        return wire.Welcome(hello.number, drafter.outline.nodes, drafter.reach, processes.running(os.getpid()))


def _undrawn(made: Proposal) -> list[list[int]]:
    """Only ids cross processes: a chain, not drawn from a law. One call of the tensor library: see `blanks`."""
    if made.law is not None or made.parents is not None:
        raise ValueError("a drafter in another process proposes chains that are not drawn")
    rows: list[list[int]] = made.tokens.tolist()
    if not isinstance(rows[0][0], int):
        raise ValueError("a proposal's tokens are not whole numbers")
    return rows
