"""A drafter in a process of its own, for one target or several.

Every target has its own drafter object, and so its own state; the process serves one message at a time. Turns are
fair: who has used the least time (over its share) goes first, so that a busy target cannot starve the others.
Not here: what a message is answered with (`clients`), how the process is started (`local`, `actors`), and what a target
does when this fails (`remote`).
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
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Protocol

from paceline.core.errors import ChannelError
from paceline.core.protocols import Drafter
from paceline.placement.host import processes
from paceline.placement.planning.quota import Quota
from paceline.placement.remote import messages
from paceline.placement.remote.channel import Channel
from paceline.placement.remote.session import TargetSession

log = logging.getLogger("paceline")

_BREATH = 0.2  # seconds between attempts to accept
_SEND = 5.0  # seconds a target may take to read an answer
_AWHILE = 1  # milliseconds: by then another process has taken up what was sent, if it is on the same CPU too
_PENDING = 64  # messages a target may have waiting; more is not our protocol


class DrafterPool(Protocol):
    """Who has drafters for targets. Called in turn with everything else: what takes long was done before."""

    def lend(self, hello: messages.Handshake) -> Drafter:
        """A drafter for a target that calls; any error is the reason why there is none."""

    def take_back(self, drafter: Drafter) -> None:
        """The target hung up."""


@dataclass(frozen=True, slots=True)
class UnpooledDrafters:
    """Drafters that are made when a target calls, and forgotten when it hangs up."""

    lend: Callable[[messages.Handshake], Drafter]

    def take_back(self, drafter: Drafter) -> None:
        """See `DrafterPool`."""


class DraftServer:
    """Serves proposals until it is stopped. Each target has one of the ``drafters``."""

    def __init__(
        self, listener: socket.socket, secret: bytes, drafters: DrafterPool, *, quota: Quota | None = None
    ) -> None:
        self._listener, self._secret, self._drafters, self._quota = listener, secret, drafters, quota or Quota()
        self._clients: dict[int, TargetSession] = {}  # by the number of its socket
        self._arrivals: deque[Channel] = deque()
        self._clock = 0.0
        self._last: TargetSession | None = None  # who was answered last, and is not prepared for its next round
        self._answered = 0.0  # when
        self._stopped = False
        self._aheads: list[TargetSession] = []  # those whose drafters work while their targets do
        self._ready: list[TargetSession] = []  # those whose messages wait
        self._busy = False  # something is to be done whether or not more arrives
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

    def _drop(self, client: TargetSession) -> None:
        number = client.channel.fileno()
        self._poll.unregister(number)
        del self._clients[number]
        for among in self._aheads, self._ready:
            if client in among:
                among.remove(client)
        client.channel.close()
        if client.drafter is not None:
            self._drafters.take_back(client.drafter)

    # ---- turns

    def _turn(self) -> None:
        """Read what has arrived and serve one message, or work ahead when there is none."""
        for number, _ in self._poll.poll(0) if self._busy else self._wait():
            client = self._clients.get(number)
            if client is None:
                self._woken.recv(4096)
            else:
                self._read(client)
        while self._arrivals:
            client = TargetSession(self._arrivals.popleft(), turn=self._clock)
            self._clients[client.channel.fileno()] = client
            self._poll.register(client.channel, select.POLLIN)
            self._read(client)  # its first message may have come together with its proof
        if self._ready:
            self._serve(self._ready[0] if len(self._ready) == 1 else min(self._ready, key=_turn_of))
        elif eager := self._eager():
            self._work_ahead(min(eager, key=_turn_of))
        # Whoever was answered may have to go on on this CPU: little is done before the next wait.
        self._busy = bool(self._ready) or bool(self._aheads and self._eager())

    def _eager(self) -> list[TargetSession]:
        """Those for whom there is something to do before they ask."""
        return [client for client in self._aheads if client.ahead is not None and not client.ahead.idle]

    def _wait(self) -> list[tuple[int, int]]:
        """Until something arrives. Shortly before, the next round of whoever was answered is prepared."""
        last, self._last = self._last, None
        if last is not None:
            # Of several targets any may be next, and soon.
            wait = last.due.milliseconds(perf_counter() - self._answered) if len(self._clients) == 1 else _AWHILE
            if found := self._poll.poll(wait):
                return found
            last.prepare()
        return self._poll.poll(None)

    def _read(self, client: TargetSession) -> None:
        try:
            frames = client.channel.arrived()
        except ChannelError:
            self._drop(client)
            return
        if not frames:
            return
        if not client.pending:  # time in which it wanted nothing is not saved up
            client.turn = max(client.turn, self._clock)
            self._ready.append(client)
        client.pending += frames
        if len(client.pending) > _PENDING:  # more messages than a target sends
            self._drop(client)

    def _serve(self, client: TargetSession) -> None:
        begin = perf_counter()
        self._clock = client.turn
        try:
            frame = client.pending.popleft()
            message = messages.decode(frame)
            if type(message) is messages.ProposeRequest:
                client.channel.send(client.answer(message, frame), _SEND)
                self._last, self._answered = client, perf_counter()
                if message.pause:
                    client.due.came_after(message.pause / 1e6)
            elif type(message) is messages.AddRequest:
                client.admit(message)
            elif type(message) is messages.Handshake:
                client.channel.send(messages.encode(self._welcome(client, message)), _SEND)
            else:
                raise ChannelError("a target sends requests")
            if not client.pending:
                self._ready.remove(client)
        except ChannelError:
            self._drop(client)
        client.turn += (perf_counter() - begin) / client.share

    def _work_ahead(self, client: TargetSession) -> None:
        begin = perf_counter()
        client.work_ahead()
        client.turn += (perf_counter() - begin) / client.share

    def _welcome(self, client: TargetSession, hello: messages.Handshake) -> messages.Reply:
        others = [other for other in self._clients.values() if other is not client and other.drafter is not None]
        slots = hello.slots + sum(other.slots for other in others)
        if len(others) >= self._quota.max_targets or slots > self._quota.max_slots:
            return messages.ErrorReply(
                hello.number, f"quota: {len(others)} targets with {slots - hello.slots} slots are here"
            )
        if client.drafter is not None:
            raise ChannelError("a target says hello once")
        try:
            drafter = self._drafters.lend(hello)
        except Exception as error:  # a drafter may be anything
            return messages.ErrorReply(hello.number, repr(error))
        if drafter.reads is not None or not drafter.draft_shape.is_chain:
            self._drafters.take_back(drafter)
            return messages.ErrorReply(hello.number, "a drafter in another process proposes chains, from tokens alone")
        client.serve_with(drafter)
        if client.ahead is not None:
            self._aheads.append(client)
        client.slots, client.share = hello.slots, self._quota.weights.get(hello.client, 1.0)
        return messages.HandshakeReply(
            hello.number, drafter.draft_shape.num_draft_tokens, drafter.max_positions, processes.running(os.getpid())
        )


def _turn_of(client: TargetSession) -> float:
    return client.turn
