"""A drafter in a process of its own, for one target or several.

Every target has its own drafter object, and so its own state; the process serves one message at a time. Turns are
fair: who has used the least time (over its share) goes first, so that a busy target cannot starve the others.
Not here: how the process is started (`local`, `actors`), and what a target does when this fails (`remote`).
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

import torch

from paceline.core.errors import ChannelError
from paceline.core.protocols import Drafter
from paceline.core.types import Proposal
from paceline.placement import wire
from paceline.placement.ahead import Ahead
from paceline.placement.channel import Channel

MakeDrafter = Callable[[wire.Hello], Drafter]
_SEND = 5.0  # seconds a target may take to read an answer
_PENDING = 64  # messages a target may have waiting; more is not our protocol


@dataclass(frozen=True, slots=True)
class Quota:
    """What targets may have. ``shares``: turns by the client's name, where they are not all equal."""

    clients: int = 16
    slots: int = 256
    shares: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Client:
    """One target. ``turn`` is the time it has used, over its share, on the server's clock."""

    channel: Channel
    name: str = ""
    slots: int = 0
    share: float = 1.0
    drafter: Drafter | None = None
    pending: deque[bytearray] = field(default_factory=deque)
    turn: float = 0.0
    error: str = ""


class DraftServer:
    """Serves proposals until it is stopped. ``make`` gives each target a drafter."""

    def __init__(
        self, listener: socket.socket, secret: bytes, make: MakeDrafter, *, quota: Quota | None = None
    ) -> None:
        self._listener, self._secret, self._make, self._quota = listener, secret, make, quota or Quota()
        self._clients: list[_Client] = []
        self._arrivals: deque[Channel] = deque()
        self._clock = 0.0
        self._stopped = False
        self._wake, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._woken, selectors.EVENT_READ, None)

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._stopped = True
        self._wake.send(b".")

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
            for client in list(self._clients):
                self._drop(client)
            while self._arrivals:
                self._arrivals.popleft().close()
            self._selector.close()
            self._wake.close()
            self._woken.close()

    # ---- connections

    def _accept(self) -> None:
        """Let targets in; who is slow to introduce itself holds up nobody."""
        while not self._stopped:
            try:
                link, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._prove, args=(link,), daemon=True).start()

    def _prove(self, link: socket.socket) -> None:
        channel = Channel(link)
        try:
            channel.prove(self._secret, server=True)
        except ChannelError:
            channel.close()
            return
        self._arrivals.append(channel)
        try:
            self._wake.send(b".")
        except OSError:  # the server ended meanwhile
            channel.close()

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.channel)
        client.channel.close()
        self._clients.remove(client)

    # ---- turns

    def _turn(self) -> None:
        """Read what has arrived and serve one message, or work ahead when there is none."""
        busy = any(client.pending for client in self._clients)
        eager = [c for c in self._clients if isinstance(c.drafter, Ahead) and not c.drafter.idle]
        for key, _ in self._selector.select(0 if busy or eager else None):
            if key.data is None:
                self._woken.recv(4096)
            else:
                self._read(key.data)
        while self._arrivals:
            client = _Client(self._arrivals.popleft(), turn=self._clock)
            self._clients.append(client)
            self._selector.register(client.channel, selectors.EVENT_READ, client)
            self._read(client)  # its first message may have come together with its proof
        ready = [client for client in self._clients if client.pending]
        if ready:
            self._serve(min(ready, key=lambda client: client.turn))
        elif eager:
            self._ahead(min(eager, key=lambda client: client.turn))

    def _read(self, client: _Client) -> None:
        try:
            while client.channel.waiting():
                frame = client.channel.receive(0)
                assert frame is not None
                if not client.pending:  # time in which it wanted nothing is not saved up
                    client.turn = max(client.turn, self._clock)
                client.pending.append(frame)
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
            for slot, text in message.texts:
                client.drafter.admit(slot, text)
            client.drafter.observe(message.commit)
            made = client.drafter.propose(message.commit, message.sampling, message.bounds)
            hit = isinstance(client.drafter, Ahead) and client.drafter.hit
            return wire.Answer(message.number, _undrawn(made), hit)
        except Exception as error:  # as above
            if isinstance(message, wire.Ask):
                return wire.Failure(message.number, repr(error))
            client.error = repr(error)
            return None
        finally:
            if isinstance(message, wire.Ask):
                client.error = ""

    def _welcome(self, client: _Client, hello: wire.Hello) -> wire.Reply:
        others = [other for other in self._clients if other is not client and other.drafter is not None]
        slots = hello.slots + sum(other.slots for other in others)
        if len(others) >= self._quota.clients or slots > self._quota.slots:
            return wire.Failure(hello.number, f"quota: {len(others)} targets with {slots - hello.slots} slots are here")
        try:
            drafter = self._make(hello)
            if drafter.reads is not None or not drafter.outline.is_chain:
                raise ValueError("a drafter in another process proposes chains, from tokens alone")
        except Exception as error:  # as above
            return wire.Failure(hello.number, repr(error))
        client.name, client.slots, client.drafter = hello.client, hello.slots, drafter
        client.share = self._quota.shares.get(hello.client, 1.0)
        return wire.Welcome(hello.number, drafter.outline.nodes, drafter.reach, os.getpid())


def _undrawn(made: Proposal) -> torch.Tensor:
    """Only ids cross processes: a chain, not drawn from a law."""
    if made.law is not None or made.parents is not None:
        raise ValueError("a drafter in another process proposes chains that are not drawn")
    if made.tokens.is_floating_point():
        raise ValueError("a proposal's tokens are not whole numbers")
    return made.tokens.to(torch.int32)
