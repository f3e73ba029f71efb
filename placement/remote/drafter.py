"""`RemoteDrafter`: a drafter in another process, which may die, hang, be late or send nonsense without harm.

To the engine it is an ordinary drafter: each round sends one message and gets one back. Whatever goes wrong, the round
goes on with nothing proposed, so that the tokens are those of plain decoding; the process is restarted in the
background, reads the sequences anew, and is asked again. Not here: processes (`process`, `cluster.actors`),
reconnecting (`reconnect`), what the process has read (`sequence_tracker`), the other end (`server`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from paceline.core.drafter_health import DrafterHealth, Fault, HealthCounters
from paceline.core.errors import ChannelError
from paceline.core.types import PAD, Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.placement.planning.yaml_file import FORBID_EXTRA, Count, Seconds
from paceline.placement.remote import messages
from paceline.placement.remote.exchange import Exchange
from paceline.placement.remote.reconnect import Backoff, DrafterEndpoint, Reconnector
from paceline.placement.remote.sequence_tracker import CommitRows, SequenceTracker

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrafterContract:
    """What target and drafter agree on.

    num_draft_tokens  N, drafted tokens a round
    slots             B of the target's batch
    vocab_size        V of the target
    max_positions     positions the drafter follows; None = all
    target            the target's name, for quotas and turns
    """

    num_draft_tokens: int
    slots: int
    vocab_size: int
    max_positions: int | None = None
    target: str = "target"


@dataclass(frozen=True, slots=True)
class DraftTimeouts:
    """How long a target waits for its drafter, and how often it tries.

    reply_timeout_s   seconds a reply may take; a round waits no longer
    resync_timeout_s  seconds more where sequences have to be read anew (in the first round of a request too)
    hang_timeout_s    seconds after which a process with an overdue reply counts as hung, and is restarted; one that
                      listens, and does not answer a target that calls it, too
    max_failures      faults in a row after which the process is restarted
    backoff_s         seconds it is left alone after a fault; twice as long after each further one, but no longer than
    max_backoff_s     these
    """

    reply_timeout_s: Seconds = 1.0
    resync_timeout_s: Seconds = 10.0
    hang_timeout_s: Seconds = 10.0
    max_failures: Count = 4
    backoff_s: Seconds = 0.05
    max_backoff_s: Seconds = 30.0

    __pydantic_config__ = FORBID_EXTRA


class RemoteDrafter:
    """Proposes what a process at the other end of a socket drafts. Call ``close`` when done."""

    reads: FeatureSpec | None = None

    def __init__(
        self, contract: DrafterContract, endpoint: DrafterEndpoint, *, timeouts: DraftTimeouts | None = None
    ) -> None:
        self.draft_shape = DraftShape.chain(contract.num_draft_tokens)
        self.max_positions = contract.max_positions
        self._contract, self._timeouts = contract, timeouts or DraftTimeouts()
        self._tracker = SequenceTracker(contract.max_positions)
        self._exchange = Exchange(contract.slots, contract.num_draft_tokens)
        self._counters = HealthCounters()
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
        """Forget the sequence."""
        self._tracker.finish_request(slot)

    def update(self, commit: Commit) -> None:
        """Follow the sequences, whether or not the process does."""
        self._tracker.record(commit)

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        """Ask the process, and wait no longer than the timeout. Whatever fails, nothing is proposed."""
        if not self._usable():
            self._counters.count("skipped")
            return self._nothing()
        rows = CommitRows.of(commit)
        texts = self._tracker.missing(commit, rows)
        rows = rows.without(self._tracker.left_out)
        numbers = [*chain.from_iterable(rows.tokens), *rows.counts, *rows.first_rows, *limits.max_accept.tolist()]
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
            self._counters.count("asked")
            self._counters.count("rereads", len(texts))
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
        self._backoff.reset()
        self._counters.count("answered")
        self._counters.count("ahead", reply.ahead)
        return proposal

    @property
    def health(self) -> DrafterHealth:
        """Counts so far and the state of now."""
        connection, last_error = self._connection, self._counters.last_error
        state = connection.state
        if state == "up" and self._exchange.overdue:
            state = "late"
        elif state == "up" and self._backoff.resting:
            state = "broken"
        if connection.channel is None:
            last_error = connection.last_error or last_error
        return self._counters.snapshot(state, connection.restarts, last_error)

    def wait_until_up(self, seconds: float) -> bool:
        """Whether the process is there within so many seconds. No request has to wait for it; a first one may."""
        return self._connection.wait(seconds)

    def close(self) -> None:
        """Hang up for good."""
        self._connection.close()

    # ---- inside

    def _nothing(self) -> Proposal:
        import torch

        shape = self._contract.slots, self._contract.num_draft_tokens
        return Proposal(torch.full(shape, PAD, dtype=torch.int32))

    def _usable(self) -> bool:
        """Whether the process is up, not left alone after a fault, and owes no reply."""
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
        """What is wrong with a proposal; nothing if it can be verified."""
        contract, shape = self._contract, (reply.slots, reply.num_draft_tokens)
        if shape != (contract.slots, contract.num_draft_tokens):
            return f"a proposal of shape {list(shape)}, not {[contract.slots, contract.num_draft_tokens]}"
        tokens = messages.unpack_words(reply.tokens)
        if max(tokens, default=0) >= contract.vocab_size or min(tokens, default=0) < PAD:
            return f"ids outside the vocabulary of {contract.vocab_size}"
        return ""

    def _fail(self, kind: Fault, reason: str) -> Proposal:
        """Count a fault, leave the process alone for a while, and restart it if it is gone or fails too often."""
        self._counters.fault(kind, reason)
        self._backoff.fail()
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
        self._counters.last_error = reason
        self._exchange.use(None)
        self._connection.begin(restart=True, delay=self._backoff.seconds)
