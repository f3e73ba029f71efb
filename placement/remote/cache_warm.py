"""Keeps a round through another process from finding cold CPU caches.

After a pause of some milliseconds code and data are out of the caches: the first Python and the first tensor operations
take eight to ten times as long, which is most of what a round through another process costs. So a side that waits for a
message does twice what saves that time, both in ``wait``:

- Shortly before the message is due it goes through the same steps with the previous message (a rehearsal).
- It makes the tensors that the message will fill. Numbers are then copied into memory that exists.

This saves a third of the cost of such a round (docs/results.md). Not here: sockets (`channel`), messages (`messages`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import TypeVar

from paceline.core.types import Commit, Proposal, RoundLimits
from paceline.placement.remote import messages
from paceline.placement.remote.channel import Channel

Events = TypeVar("Events")

_KEPT = 8  # pauses; the shortest of them counts, so that a rehearsal never delays a message that is there
_LEAD_S = 0.0009  # a rehearsal begins this long before the message is due; with 0.0004 it often delayed the message
_MIN_WAIT_MS = 1  # by then the other process has taken up what was sent to it, even on the same CPU


class DueTime:
    """Predicts when the next message is due, from the pauses before earlier ones."""

    def __init__(self) -> None:
        self._pauses: deque[float] = deque(maxlen=_KEPT)

    def observe(self, seconds: float) -> None:
        """A message came so long after the last one went the other way."""
        self._pauses.append(seconds)

    def milliseconds(self, elapsed: float = 0.0) -> int:
        """How long to wait until there is just time for a rehearsal. ``elapsed``: seconds since the last message went
        the other way.
        """
        return max(_MIN_WAIT_MS, int(1000 * (min(self._pauses, default=0.0) - _LEAD_S - elapsed)))


class IntBuffer:
    """An int32 tensor of a shape, whose numbers come later and are written once."""

    def __init__(self, *shape: int) -> None:
        import torch

        self.tensor = torch.empty(shape, dtype=torch.int32)
        self._memory = self.tensor.view(-1).numpy().data

    def fill(self, numbers: memoryview) -> None:
        """Write all numbers, row by row, as `messages.unpack_words` gives them."""
        self._memory[:] = numbers


class CommitBuffer:
    """A commit [B, W] and its limits [B], whose numbers come later."""

    def __init__(self, slots: int, width: int) -> None:
        self.shape = slots, width
        size = slots * width
        self._buffer = IntBuffer(slots * (width + 3))
        numbers = self._buffer.tensor
        count, first_row, self._max_accept = numbers[size:].view(3, slots).unbind()
        self._commit = Commit(numbers[:size].view(slots, width), count, first_row)

    def fill(self, request: messages.ProposeRequest) -> tuple[Commit, RoundLimits]:
        """The commit and the limits of a request."""
        self._buffer.fill(messages.unpack_words(request.numbers))
        return self._commit, RoundLimits(self._max_accept, request.max_rows)


class ReplyWarmer:
    """The target's side: waits for proposals of one shape [B, N], and makes tensors of them."""

    def __init__(self, slots: int, num_draft_tokens: int) -> None:
        self._shape = slots, num_draft_tokens
        self._due = DueTime()
        self._buffer = IntBuffer(*self._shape)
        self._last: bytearray | None = None  # the frame of the last proposal

    def wait(self, channel: Channel, timeout: float) -> None:
        """Until a reply is nearly due, or there; but no longer than ``timeout`` seconds."""
        channel.wait(min(self._due.milliseconds(), int(1000 * timeout)))

    def rehearse(self) -> None:
        """Prepare for the reply. Afterwards nothing but the reply itself is to be done."""
        self._buffer = IntBuffer(*self._shape)
        if self._last is not None:
            reply = messages.decode_reply(self._last)
            assert isinstance(reply, messages.ProposeReply)
            self._buffer.fill(messages.unpack_words(reply.tokens))

    def proposal(self, frame: bytearray, reply: messages.ProposeReply, *, seconds: float) -> Proposal:
        """The reply as a proposal, which came so many ``seconds`` after its request. ``frame``: as it arrived."""
        self._buffer.fill(messages.unpack_words(reply.tokens))
        self._last = frame
        self._due.observe(seconds)
        return Proposal(self._buffer.tensor)


class RequestWarmer:
    """The drafter's side of one target: waits for its next round, and makes a commit of it.

    ``encode`` turns a request's number and a proposal into the reply's bytes; a rehearsal does that too.
    """

    def __init__(self, encode: Callable[[int, Proposal], bytes]) -> None:
        self._encode = encode
        self._due = DueTime()
        self._buffer: CommitBuffer | None = None  # ready for the next request
        self._last: tuple[CommitBuffer, Proposal, bytearray | None] | None = None
        self._replied_at = 0.0

    def wait(self, poll: Callable[[int], list[Events]], *, only_target: bool) -> list[Events]:
        """Until ``poll`` (milliseconds; -1 = for ever) finds something; meanwhile prepare for the next request.

        ``only_target``: it is the only one. Of several targets any may be next, and soon.
        """
        due = self._due.milliseconds(perf_counter() - self._replied_at) if only_target else _MIN_WAIT_MS
        if events := poll(due):
            return events
        self._rehearse()
        return poll(-1)

    def commit(self, request: messages.ProposeRequest) -> tuple[CommitBuffer, Commit, RoundLimits]:
        """The commit and the limits of a request, and the buffer that holds their tensors."""
        buffer, self._buffer = self._buffer, None
        if buffer is None or buffer.shape != (request.slots, request.width):
            buffer = CommitBuffer(request.slots, request.width)
        return buffer, *buffer.fill(request)

    def prepared(self, buffer: CommitBuffer, proposal: Proposal, frame: bytearray | None) -> None:
        """A request was answered with this proposal; ``frame`` is the request if the next one will be like it.

        Its tensors are kept until the target has its reply, so that it does not wait while they are freed.
        """
        self._last = buffer, proposal, frame

    def failed(self) -> None:
        """A request failed; its steps are not gone through again."""
        self._last = None

    def replied(self, pause: float) -> None:
        """The reply is sent; ``pause`` seconds lay between the last reply and this request (0 = not known)."""
        self._replied_at = perf_counter()
        if pause:
            self._due.observe(pause)

    def _rehearse(self) -> None:
        if self._last is None:
            return
        (buffer, proposal, frame), self._last = self._last, None
        self._buffer = CommitBuffer(*buffer.shape)
        if frame is not None:
            request = messages.decode_request(frame)
            assert isinstance(request, messages.ProposeRequest)
            self._buffer.fill(request)
            self._encode(request.number, proposal)
