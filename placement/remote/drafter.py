"""`RemoteDrafter`: a drafter in another process; its crashes, delays and invalid replies do no harm.

The engine uses it as an ordinary drafter: each round sends one message and gets one back. If anything fails, the round
continues without a proposal, so its tokens are those of plain decoding. The process is restarted in the background,
reads the sequences again, and is then used again. See also: processes (`process`, `cluster.replica_group`),
reconnecting (`reconnect`), the other end (`server`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

from paceline.core.drafter_statistics import DrafterHealth, Fault
from paceline.core.errors import ChannelError
from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Commit, DraftShape, Proposal, RoundLimits, SamplingTensors
from paceline.placement.planning.yaml_file import FORBID_EXTRA, Count, Seconds
from paceline.placement.remote import messages
from paceline.placement.remote.channel import Channel, ReplyWarmer
from paceline.placement.remote.reconnect import Backoff, DrafterEndpoint, Reconnector

if TYPE_CHECKING:
    from torch import Tensor


class _Exchange:
    """One request at a time, on the current channel. Every method may raise ChannelError: the other side is gone."""

    def __init__(self, slots: int, num_draft_tokens: int) -> None:
        self._warmer = ReplyWarmer(slots, num_draft_tokens)
        self._channel: Channel | None = None
        self._number = 0
        self._overdue_since: float | None = None  # set if the last request was not answered in time
        self._sent_at = self._timeout = 0.0
        self._replied_at: float | None = None  # None: something else was sent after the last reply
        self._frame = bytearray()  # of the last reply

    def use(self, channel: Channel | None) -> bool:
        """Continue with this channel; return whether it is a new one, which owes no reply."""
        if channel is self._channel:
            return False
        self._channel, self._overdue_since = channel, None
        return True

    @property
    def overdue(self) -> bool:
        """Whether a reply that did not come in time is still missing."""
        return self._overdue_since is not None

    @property
    def overdue_seconds(self) -> float:
        return 0.0 if self._overdue_since is None else monotonic() - self._overdue_since

    @property
    def pause_us(self) -> int:
        """Microseconds since the last reply; 0 if something else was sent after it."""
        if self._replied_at is None:
            return 0
        return min(round(1e6 * (monotonic() - self._replied_at)), messages.MAX_PAUSE_US)

    def interrupt(self) -> None:
        self._replied_at = None

    def next_number(self) -> int:
        self._number += 1
        return self._number

    def ask(self, request: messages.ProposeRequest, timeout: float) -> None:
        """Send a request whose reply may take ``timeout`` seconds, and wait until it is nearly due."""
        self.tell(request, timeout)
        self._sent_at, self._timeout, self._replied_at = monotonic(), timeout, None
        assert self._channel is not None
        self._warmer.wait(self._channel, timeout)

    def reply(self) -> messages.ProposeReply | messages.ErrorReply | None:
        """Return the reply to the last request; None if it does not arrive in time, and then it is overdue."""
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
        """Read the messages that have arrived; return whether the overdue reply is among them."""
        assert self._channel is not None
        while self.overdue and (frame := self._channel.receive(0)) is not None:
            if messages.decode_reply(frame).number == self._number:
                self._overdue_since = None
        return self._overdue_since is None

    def proposal(self, reply: messages.ProposeReply) -> Proposal:
        """Return the last reply, which was found valid, as tensors."""
        self._replied_at = monotonic()
        return self._warmer.proposal(self._frame, reply, seconds=self._replied_at - self._sent_at)

    def tell(self, message: messages.TargetMessage, timeout: float) -> None:
        """Send a message, within ``timeout`` seconds."""
        assert self._channel is not None, "nothing is sent without a connection"
        self._channel.send(messages.encode(message), timeout)


_ALL = 1 << 20


class CommitRows(NamedTuple):
    """Commit as lists: tokens [B][W], counts [B] and first rows [B]."""

    tokens: list[list[int]]
    counts: list[int]
    first_rows: list[int]

    @classmethod
    def of(cls, commit: Commit) -> CommitRows:
        return cls(commit.tokens.tolist(), commit.count.tolist(), commit.first_row.tolist())

    def without(self, slots: Collection[int]) -> CommitRows:
        """Return the same commit with these slots marked as idle."""
        if not slots:
            return self
        tokens, counts, first_rows = list(self.tokens), list(self.counts), list(self.first_rows)
        for slot in slots:
            tokens[slot] = [0, *[PAD] * (len(tokens[slot]) - 1)]
            counts[slot], first_rows[slot] = 1, 0
        return CommitRows(tokens, counts, first_rows)


class SequenceTracker:
    """Sequences of a target's slots, and the tokens of each that the drafter's process has read.

    The only record of this on either side of the socket: each request carries exactly what is missing. A commit is only
    recorded when it arrives, and appended to the sequences while the process drafts; otherwise a round would wait for
    it.

    max_positions   the drafter does not follow longer sequences; None: it follows all
    sampling_known  the process knows the sampling parameters of the current requests
    prompt_pending  a prompt was sent that it may still be reading
    left_out        slots whose sequence the process lacks, and which `missing` left for later requests
    """

    def __init__(self, max_positions: int | None) -> None:
        self._max_positions = max_positions
        self._sequences: dict[int, list[int]] = {}
        self._read: dict[int, int] = {}  # slot -> tokens the process has read
        self._recorded: Commit | None = None  # not yet part of the sequences
        self._in_flight: dict[int, int] = {}  # lengths in the last request
        self._acked = False  # it has replied
        self._most = self._taken = _ALL  # sequences to be read again in a request; in the last one
        self.left_out = frozenset[int]()
        self.sampling_known = self.prompt_pending = False

    def add_request(self, slot: int, prompt: Sequence[int]) -> None:
        self._settle()
        self._sequences[slot] = list(prompt)
        self._read.pop(slot, None)
        self._in_flight.pop(slot, None)
        self.sampling_known = False

    def mark_read(self, slot: int) -> None:
        """Record that the process was sent the current sequence of that slot."""
        self._read[slot] = len(self._sequences[slot])
        self.prompt_pending = True

    def finish_request(self, slot: int) -> None:
        """Remove a request; the process overwrites its rows with the next one in that slot."""
        self._settle()
        self._sequences.pop(slot, None)
        self._read.pop(slot, None)
        self._in_flight.pop(slot, None)
        self.sampling_known = False

    def reset(self) -> None:
        """Forget what the process has read: unknown after a fault, or nothing if it is a new process."""
        self._settle()
        self._read.clear()
        self._in_flight = {}
        self.sampling_known = False

    def overdue(self) -> None:
        """Halve the sequences of the next request, after a late reply. If all were sent again each time, a process that
        cannot read them within one deadline would never catch up.
        """
        self._most = max(1, min(self._most, self._taken) // 2)

    def acked_late(self) -> None:
        """Record the overdue reply: the sequences of its request are read, though they have continued since."""
        self._settle()
        self._read.update(self._in_flight)
        self._in_flight = {}

    def record(self, commit: Commit) -> None:
        if self._recorded is not None and self._recorded is not commit:
            self._settle()  # no proposal was requested after that one
        self._recorded = commit

    def missing(self, commit: Commit, rows: CommitRows) -> list[tuple[int, tuple[int, ...]]]:
        """Return what the process has to read before it can continue after a commit: (slot, sequence). ``rows``: the
        commit as lists. If that is too much for one request, the shortest come first, and ``left_out`` has the others.
        """
        if self._acked and len(self._in_flight) == len(self._sequences) and self._recorded is commit:
            self._taken, self.left_out = 0, frozenset()
            return []
        self._settle(rows if self._recorded is commit else None)
        first_rows = rows.first_rows
        behind = [slot for slot in self._followed(rows) if self._read.get(slot) != first_rows[slot]]
        behind.sort(key=lambda slot: first_rows[slot])
        taken, self.left_out = behind[: self._most], frozenset(behind[self._most :])
        self._taken = len(taken)
        return [(slot, tuple(self._sequences[slot][: first_rows[slot]])) for slot in taken]

    def sent(self, rows: CommitRows) -> None:
        """Record a request to continue after this commit, and update the sequences while the process drafts."""
        self._settle(rows)
        self._in_flight = {slot: len(self._sequences[slot]) for slot in self._followed(rows)}
        self.sampling_known, self.prompt_pending = True, False

    def acked(self) -> None:
        """Record its reply: it has read all sequences of the request."""
        self._acked = True
        if not self.left_out:
            self._most = _ALL

    def _followed(self, rows: CommitRows) -> list[int]:
        """Return the slots whose sequence ends with this commit, if the drafter can follow it."""
        return [
            slot
            for slot, sequence in self._sequences.items()
            if len(sequence) == rows.first_rows[slot] + rows.counts[slot]
            and (self._max_positions is None or len(sequence) <= self._max_positions)
        ]

    def _settle(self, recorded: CommitRows | None = None) -> None:
        """Apply the recorded and acknowledged tokens. ``recorded``: the commit as lists, if they exist."""
        if self._acked:
            self._read.update(self._in_flight)
            self._acked = False
        commit, self._recorded = self._recorded, None
        if commit is None:
            return
        rows = recorded or CommitRows.of(commit)
        for slot, sequence in self._sequences.items():
            if rows.first_rows[slot] == len(sequence):
                sequence += rows.tokens[slot][: rows.counts[slot]]


@dataclass(frozen=True, slots=True)
class DrafterContract:
    """Parameters that target and drafter agree on.

    num_draft_tokens  N, drafted tokens per round
    slots             B, batch size of the target
    vocab_size        V, vocabulary size of the target
    max_positions     positions the drafter follows; None: all
    target            the target's name, for messages
    """

    num_draft_tokens: int
    slots: int
    vocab_size: int
    max_positions: int | None = None
    target: str = "target"


@dataclass(frozen=True, slots=True)
class DraftTimeouts:
    """Timeouts and retries of a target for its drafter.

    reply_timeout_s   seconds a reply may take; a round waits no longer
    resync_timeout_s  additional seconds if sequences have to be read again (also in the first round of a request)
    hang_timeout_s    seconds after which a process with an overdue reply counts as hung, and is restarted; also one
                      that listens, and does not respond to a target
    max_failures      consecutive faults after which the process is restarted
    backoff_s         seconds without requests after a fault; doubled after each further one, up to
    max_backoff_s     this maximum
    """

    reply_timeout_s: Seconds = 1.0
    resync_timeout_s: Seconds = 10.0
    hang_timeout_s: Seconds = 10.0
    max_failures: Count = 4
    backoff_s: Seconds = 0.05
    max_backoff_s: Seconds = 30.0

    __pydantic_config__ = FORBID_EXTRA


class RemoteDrafter(Drafter):
    """Drafter whose proposals come from a process at the other end of a socket. Call ``close`` when done."""

    def __init__(
        self, contract: DrafterContract, endpoint: DrafterEndpoint, *, timeouts: DraftTimeouts | None = None
    ) -> None:
        self.draft_shape = DraftShape.chain(contract.num_draft_tokens)
        self.max_positions = contract.max_positions
        self._contract, self._timeouts = contract, timeouts or DraftTimeouts()
        self._tracker = SequenceTracker(contract.max_positions)
        self._exchange = _Exchange(contract.slots, contract.num_draft_tokens)
        self._counts = Counter[str]()  # those of `DrafterHealth`
        self._last_error = ""
        self._backoff = Backoff(self._timeouts.backoff_s, self._timeouts.max_backoff_s)
        handshake = messages.Handshake(0, contract.target, contract.slots, contract.vocab_size)
        self._connection = Reconnector(
            endpoint,
            handshake,
            num_draft_tokens=contract.num_draft_tokens,
            max_backoff_s=self._timeouts.max_backoff_s,
            hang_timeout_s=self._timeouts.hang_timeout_s,
        )
        self._connection.begin(restart=False)

    # ---- the drafter

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Send the prompt, so that the process reads it while the target does."""
        self._tracker.add_request(slot, prompt)
        self._exchange.interrupt()
        if not self._usable() or (self.max_positions is not None and len(prompt) >= self.max_positions):
            return
        message = messages.AddRequest(self._exchange.next_number(), slot, tuple(prompt))
        try:
            self._exchange.tell(message, self._timeouts.reply_timeout_s)
            self._tracker.mark_read(slot)
        except ChannelError as error:
            self._fail("lost", str(error))

    def finish_request(self, slot: int) -> None:
        self._tracker.finish_request(slot)

    def update(self, commit: Commit) -> None:
        """Record a commit, whether or not the process is available."""
        self._tracker.record(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        """Request a proposal, and wait up to the timeout. If anything fails, propose nothing."""
        if not self._usable():
            self._counts["skipped"] += 1
            return self._nothing()
        rows = CommitRows.of(commit)
        texts = self._tracker.missing(commit, rows)
        rows = rows.without(self._tracker.left_out)
        numbers = [*chain.from_iterable(rows.tokens), *rows.counts, *rows.first_rows, *limits.max_accept]
        timeout = self._timeouts.reply_timeout_s
        if texts or self._tracker.prompt_pending:
            timeout += self._timeouts.resync_timeout_s
        request = messages.ProposeRequest(
            self._exchange.next_number(),
            tuple(texts),
            len(rows.tokens),
            len(rows.tokens[0]),
            messages.pack_words(numbers),
            limits.max_rows,
            None if self._tracker.sampling_known else messages.SamplingWords.of(sampling),
            self._exchange.pause_us,
        )
        try:
            self._exchange.ask(request, timeout)
            self._counts["asked"] += 1
            self._counts["rereads"] += len(texts)
            self._tracker.sent(rows)
            reply = self._exchange.reply()
        except ChannelError as error:
            return self._fail("lost", str(error))
        if reply is None:
            return self._fail("late", f"no reply within {timeout} seconds")
        if isinstance(reply, messages.ErrorReply):
            return self._fail("failed", reply.reason)
        if reason := self._why_invalid(reply):
            return self._fail("invalid", reason)
        proposal = self._exchange.proposal(reply)
        self._tracker.acked()
        self._backoff.failures = 0
        self._counts["answered"] += 1
        self._counts["ahead"] += reply.ahead
        return proposal

    @property
    def health(self) -> DrafterHealth:
        """Counts so far and the current state."""
        connection, last_error = self._connection, self._last_error
        state = connection.state
        if state == "up" and self._exchange.overdue:
            state = "late"
        elif state == "up" and self._backoff.resting:
            state = "broken"
        if connection.channel is None:
            last_error = connection.last_error or last_error
        return DrafterHealth(state=state, restarts=connection.restarts, last_error=last_error, **self._counts)

    def wait_until_up(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the process; return whether it is up. No request has to wait; a first one may."""
        return self._connection.wait(seconds)

    def close(self) -> None:
        """Close the connection permanently."""
        self._connection.close()

    # ---- inside

    def _nothing(self) -> Proposal:
        import torch

        shape = self._contract.slots, self._contract.num_draft_tokens
        return Proposal(torch.full(shape, PAD, dtype=torch.int32))

    def _usable(self) -> bool:
        """Return whether the process is up, not in its backoff pause, and owes no reply."""
        channel = self._connection.channel
        if self._exchange.use(channel):
            self._tracker.reset()  # a new process has read nothing
        if channel is None or self._backoff.resting:
            return False
        if not self._exchange.overdue:
            return True
        try:
            arrived = self._exchange.catch_up()
        except ChannelError as error:
            self._fail("lost", str(error))
            return False
        if self._exchange.overdue_seconds > self._timeouts.hang_timeout_s:
            self._restart("the process hangs")
            return False
        if arrived:
            self._tracker.acked_late()
        return arrived

    def _why_invalid(self, reply: messages.ProposeReply) -> str:
        """Return what is wrong with a proposal; "" if it can be verified."""
        contract, shape = self._contract, (reply.slots, reply.num_draft_tokens)
        if shape != (contract.slots, contract.num_draft_tokens):
            return f"a proposal of shape {list(shape)}, not {[contract.slots, contract.num_draft_tokens]}"
        tokens = messages.unpack_words(reply.tokens)
        if max(tokens, default=0) >= contract.vocab_size or min(tokens, default=0) < PAD:
            return f"ids outside the vocabulary of {contract.vocab_size}"
        return ""

    def _fail(self, kind: Fault, reason: str) -> Proposal:
        """Count a fault, start the backoff pause, and restart the process if it is lost or fails too often."""
        self._counts[kind] += 1
        self._last_error = reason
        self._backoff.failures += 1
        if kind == "late":
            self._tracker.overdue()
        else:
            self._tracker.reset()
        if kind == "lost" or (self._backoff.failures >= self._timeouts.max_failures and kind != "late"):
            self._restart(reason)
        else:
            self._backoff.rest()
        return self._nothing()

    def _restart(self, reason: str) -> None:
        self._last_error = reason
        self._exchange.use(None)
        self._connection.begin(restart=True, delay=self._backoff.seconds)
