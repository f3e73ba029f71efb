"""`RemoteDrafter`: a drafter in another process, which may die, hang, lie or be late without anybody noticing.

It is an ordinary drafter to the loop: one message a round goes out, one comes back. Whatever goes wrong, the round goes
on with nothing proposed, so that the tokens are those of plain decoding; the process is restarted behind the scenes,
reads the texts anew, and is asked again. Not here: processes (`local`, `actors`), reconnecting (`revival`), the other
end (`draft_server`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from time import monotonic

import torch
from torch import Tensor

from paceline.core.drafter_health import COUNTED, DrafterHealth, Fault
from paceline.core.errors import ChannelError
from paceline.core.types import PAD, Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.placement.remote import messages
from paceline.placement.remote.blanks import Blank
from paceline.placement.remote.channel import Channel
from paceline.placement.remote.due import Due
from paceline.placement.remote.reconnect import DrafterEndpoint, Reconnector
from paceline.placement.remote.sequence_tracker import Texts, lists


@dataclass(frozen=True, slots=True)
class DrafterContract:
    """What target and drafter agree on.

    nodes       N, drafted tokens a round
    slots       B of the target's batch
    vocab_size  V of the target
    reach       positions the drafter follows; None = all
    client      the target's name, for turns and quotas
    """

    nodes: int
    slots: int
    vocab_size: int
    reach: int | None = None
    client: str = "target"


@dataclass(frozen=True, slots=True)
class DraftTimeouts:
    """Seconds, and how often.

    reply_timeout_s  an answer may take; a round waits no longer
    resync_timeout_s    more, when texts have to be read anew (the first round of a request too)
    hang_timeout_s      after which an overdue answer means that the process hangs, and it is restarted
    max_failures     faults in a row after which it is restarted
    backoff_s      it is left alone after a fault, twice as long after each further one, up to ``longest``
    """

    reply_timeout_s: float = 1.0
    resync_timeout_s: float = 10.0
    hang_timeout_s: float = 10.0
    max_failures: int = 4
    backoff_s: float = 0.05
    max_backoff_s: float = 30.0


_LONG = 1_000_000_000  # microseconds; more has no room in a message
_REPLIES = (messages.ProposeReply, messages.ErrorReply)
_DOUBLINGS = 64  # of a rest; a float has no room for the thousands that faults of weeks would come to


class RemoteDrafter:
    """Proposes what a process at the other end of a socket drafts. ``close`` when done."""

    reads: FeatureSpec | None = None

    def __init__(
        self, terms: DrafterContract, caller: DrafterEndpoint, *, patience: DraftTimeouts | None = None
    ) -> None:
        self.draft_shape, self.max_positions = DraftShape.chain(terms.nodes), terms.reach
        self._terms, self._patience = terms, patience or DraftTimeouts()
        self._texts = Texts(terms.reach)
        self._reading = False  # a prompt was sent that may not be read yet
        self._number = 0
        self._overdue: tuple[int, float] | None = None  # the message whose answer is late, and since when
        self._resting = 0.0  # until then it is not asked
        self._row = 0  # faults in a row
        self._had: float | None = None  # when the last answer came, if nothing but a round came after it
        self._counts = dict.fromkeys(COUNTED, 0)
        self._drawn = False  # the process knows how the requests sample
        self._last_error = ""
        self._due, self._sent = Due(), 0.0  # when an answer is expected; when it was asked for
        self._frame: bytearray | None = None  # the last reply
        self._heard: bytearray | None = None  # the last one that was a proposal
        self._channel: Channel | None = None
        hello = messages.Handshake(0, terms.client, terms.slots, terms.vocab_size)
        self._revival = Reconnector(caller, hello, nodes=terms.nodes, longest=self._patience.max_backoff_s)
        self._revival.begin(restart=False)

    # ---- the drafter

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Remember the text, and let the process read it while the target reads on."""
        self._texts.admit(slot, prompt)
        self._drawn, self._had = False, None
        channel = self._usable()
        if channel is None or (self.max_positions is not None and len(prompt) >= self.max_positions):
            return
        try:
            channel.send(
                messages.encode(messages.AddRequest(self._next(), slot, tuple(prompt))), self._patience.reply_timeout_s
            )
            self._texts.told(slot)
            self._reading = True
        except ChannelError as error:
            self._fault("lost", str(error))

    def finish_request(self, slot: int) -> None:
        """Forget the text."""
        self._texts.release(slot)
        self._drawn = False

    def update(self, commit: Commit) -> None:
        """Follow the texts, whether or not the process does."""
        self._texts.note(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        """Ask, and wait no longer than the deadline."""
        channel = self._usable()
        if channel is None:
            self._counts["skipped"] += 1
            return self._nothing()
        now = rows, counts, starts = lists(commit)
        texts = self._texts.unread(commit, now)
        wait = self._patience.reply_timeout_s
        if texts or self._reading:
            wait += self._patience.resync_timeout_s
        numbers = [*chain.from_iterable(rows), *counts, *starts, *bounds.max_accept.tolist()]
        drawn = None if self._drawn else sampling
        pause = 0 if self._had is None else min(round(1e6 * (monotonic() - self._had)), _LONG)
        number = self._next()
        ask = messages.ProposeRequest(
            number, tuple(texts), len(rows), len(rows[0]), numbers, bounds.max_rows, drawn, pause
        )
        try:
            channel.send(messages.encode(ask), wait)
            self._sent = monotonic()
            channel.wait(min(self._due.milliseconds(), int(1000 * wait)))
            self._reading, self._drawn, self._had = False, True, None
            self._counts["asked"] += 1
            self._counts["rereads"] += len(texts)
            self._texts.asked(now)
            blank = self._prepared()
            made = Proposal(blank.tensor)
            reply = self._reply(channel, number, self._sent + wait)
        except ChannelError as error:
            self._fault("lost", str(error))
            return self._nothing()
        if reply is None:
            self._overdue = (number, monotonic())
            self._fault("late", f"no answer within {wait} seconds")
            return self._nothing()
        return made if self._taken(reply, blank) else self._nothing()

    @property
    def health(self) -> DrafterHealth:
        """Counts so far and the state of now."""
        state = self._revival.state
        if state == "up":
            resting = self._resting > monotonic()
            state = "late" if self._overdue else "broken" if resting else "up"
        why = self._last_error if self._revival.channel is not None else self._revival.last_error or self._last_error
        return DrafterHealth(state=state, restarts=self._revival.restarts, last_error=why, **self._counts)

    @property
    def pid(self) -> int | None:
        """The process at the other end, if it is up."""
        process = self._revival.process
        return None if process is None else process.pid

    def wait_until_up(self, seconds: float) -> bool:
        """Whether the process is there within so many seconds. Nobody has to wait; a first request may want to."""
        return self._revival.wait(seconds)

    def close(self) -> None:
        """Hang up for good."""
        self._revival.close()
        self._channel = None

    # ---- inside

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _nothing(self) -> Proposal:
        return Proposal(torch.full((self._terms.slots, self._terms.nodes), PAD, dtype=torch.int32))

    def _usable(self) -> Channel | None:
        """The channel, if the process is up, not resting and owes no answer."""
        channel = self._revival.channel
        if channel is not self._channel:  # a new process knows no text
            self._channel, self._overdue = channel, None
            self._texts.forget()
            self._drawn = False
        if channel is None or self._resting > monotonic():
            return None
        if self._overdue is None:
            return channel
        number, since = self._overdue
        try:
            while (frame := channel.receive(0)) is not None:
                if messages.decode(frame).number == number:
                    self._overdue = None
                    return channel
        except ChannelError as error:
            self._fault("lost", str(error))
            return None
        if monotonic() - since > self._patience.hang_timeout_s:
            self._revive("the process hangs")
        return None

    def _prepared(self) -> Blank:
        """Room for the answer. What that will go through is gone through with the last one: see `due`."""
        blank = Blank(self._terms.slots, self._terms.nodes)
        if self._heard is not None:
            last = messages.decode(self._heard)
            assert isinstance(last, messages.ProposeReply)
            blank.fill(last.tokens)
        return blank

    def _reply(self, channel: Channel, number: int, end: float) -> messages.Reply | None:
        while (frame := channel.receive(max(0.0, end - monotonic()))) is not None:
            reply = messages.decode(frame)
            if reply.number == number and isinstance(reply, _REPLIES):
                self._frame = frame
                return reply
        return None

    def _taken(self, reply: messages.Reply, blank: Blank) -> bool:
        """Whether the reply is a proposal; it is written into the blank then."""
        if type(reply) is not messages.ProposeReply:
            self._fault(
                "failed", reply.reason if type(reply) is messages.ErrorReply else "an answer to another question"
            )
            return False
        if reply.slots != self._terms.slots or reply.nodes != self._terms.nodes:
            shape, wanted = [reply.slots, reply.nodes], [self._terms.slots, self._terms.nodes]
            self._fault("invalid", f"a proposal of shape {shape}, not {wanted}")
            return False
        if max(reply.tokens, default=0) >= self._terms.vocab_size or min(reply.tokens, default=0) < PAD:
            self._fault("invalid", f"ids outside the vocabulary of {self._terms.vocab_size}")
            return False
        blank.fill(reply.tokens)
        self._texts.answered()
        self._row = 0
        self._counts["answered"] += 1
        self._heard, self._had = self._frame, monotonic()
        self._due.came_after(self._had - self._sent)
        if reply.ahead:
            self._counts["ahead"] += 1
        return True

    def _fault(self, kind: Fault, why: str) -> None:
        """Count it, let the process rest, and start it anew if it is gone or fails too often."""
        self._counts[kind] += 1
        self._last_error = why
        self._row += 1
        self._texts.forget()
        self._drawn = False
        if kind == "lost" or (self._row >= self._patience.max_failures and kind != "late"):
            self._revive(why)
        else:
            self._resting = monotonic() + self._rest()

    def _revive(self, why: str) -> None:
        self._last_error = why
        self._overdue = None
        self._channel = None
        self._revival.begin(restart=True, delay=self._rest())

    def _rest(self) -> float:
        """Seconds it is left alone after so many faults in a row."""
        doublings = min(max(0, self._row - 1), _DOUBLINGS)
        return min(self._patience.backoff_s * 2.0**doublings, self._patience.max_backoff_s)
