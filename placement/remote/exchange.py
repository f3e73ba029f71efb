"""Numbered requests on a channel, and the replies that belong to them, also those that come too late."""

from __future__ import annotations

from time import monotonic

from paceline.core.types import Proposal
from paceline.placement.remote import messages
from paceline.placement.remote.cache_warm import ReplyWarmer
from paceline.placement.remote.channel import Channel


class Exchange:
    """One request at a time, on the channel of now. Every method may raise ChannelError: the other side is gone."""

    def __init__(self, slots: int, num_draft_tokens: int) -> None:
        self._warmer = ReplyWarmer(slots, num_draft_tokens)
        self._channel: Channel | None = None
        self._number = 0
        self._overdue_since: float | None = None  # the last request was not answered in time
        self._sent_at = self._timeout = 0.0
        self._replied_at: float | None = None  # None: something else was sent after the last reply
        self._frame = bytearray()  # of the last reply

    def use(self, channel: Channel | None) -> bool:
        """Go on with this channel; whether it is another one than before, which owes no reply."""
        if channel is self._channel:
            return False
        self._channel, self._overdue_since = channel, None
        return True

    @property
    def overdue(self) -> bool:
        """Whether a reply is still awaited that did not come in time."""
        return self._overdue_since is not None

    @property
    def overdue_seconds(self) -> float:
        """Since when it is."""
        return 0.0 if self._overdue_since is None else monotonic() - self._overdue_since

    @property
    def pause_us(self) -> int:
        """Microseconds since the last reply; 0 if something else was sent after it."""
        if self._replied_at is None:
            return 0
        return min(round(1e6 * (monotonic() - self._replied_at)), messages.MAX_PAUSE_US)

    def interrupt(self) -> None:
        """Something else happens before the next request; the pause before it says nothing."""
        self._replied_at = None

    def next_number(self) -> int:
        """The number of the next request."""
        self._number += 1
        return self._number

    def tell(self, message: messages.AddRequest, timeout: float) -> None:
        """Send what has no reply, within ``timeout`` seconds."""
        self._send(message, timeout)

    def ask(self, request: messages.ProposeRequest, timeout: float) -> None:
        """Send a request whose reply may take ``timeout`` seconds, and wait until it is nearly due."""
        self._send(request, timeout)
        self._sent_at, self._timeout, self._replied_at = monotonic(), timeout, None
        assert self._channel is not None
        self._warmer.wait(self._channel, timeout)

    def reply(self) -> messages.ProposeReply | messages.ErrorReply | None:
        """The reply to the last request; None if it is not there in time, and then it is overdue."""
        self._warmer.rehearse()
        assert self._channel is not None
        end = self._sent_at + self._timeout
        while (frame := self._channel.receive(max(0.0, end - monotonic()))) is not None:
            reply = messages.decode_reply(frame)
            if reply.number == self._number and not isinstance(reply, messages.HandshakeReply):
                self._frame = frame
                return reply
        self._overdue_since = monotonic()
        return None

    def catch_up(self) -> bool:
        """Read what has arrived meanwhile; whether the overdue reply is there."""
        assert self._channel is not None
        while self.overdue and (frame := self._channel.receive(0)) is not None:
            if messages.decode_reply(frame).number == self._number:
                self._overdue_since = None
        return self._overdue_since is None

    def proposal(self, reply: messages.ProposeReply) -> Proposal:
        """The last reply, which was found good, as tensors."""
        self._replied_at = monotonic()
        return self._warmer.proposal(self._frame, reply, seconds=self._replied_at - self._sent_at)

    def _send(self, message: messages.Request, timeout: float) -> None:
        assert self._channel is not None, "nothing is sent without a connection"
        self._channel.send(messages.encode(message), timeout)
