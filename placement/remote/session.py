"""One target of a drafter's process: its state, and what its messages are answered with.

Not here: sockets, turns, and who may come at all (`draft_server`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import chain

from paceline.core.errors import ChannelError
from paceline.core.protocols import Drafter, Varies
from paceline.core.types import PAD, Proposal, SamplingTensors
from paceline.placement.lookahead.drafter import LookaheadDrafter
from paceline.placement.remote import messages
from paceline.placement.remote.blanks import BlankRound
from paceline.placement.remote.channel import Channel
from paceline.placement.remote.due import Due


@dataclass(slots=True, eq=False)
class TargetSession:
    """A target. ``turn`` is the time it has used, over its ``share``, on the server's clock."""

    channel: Channel
    slots: int = 0
    share: float = 1.0
    drafter: Drafter | None = None
    ahead: LookaheadDrafter | None = None  # the drafter, if it works while the target does
    varies: bool = False  # its proposals may be shorter than its draft shape, and those that travel may not
    sampling: SamplingTensors | None = None
    blank: BlankRound | None = None
    held: tuple[BlankRound, Proposal] | None = None  # the last round's tensors: the target would wait for their end
    heard: bytearray | None = None  # its last question, if it brought no texts
    due: Due = field(default_factory=Due)  # its next question
    pending: deque[bytearray] = field(default_factory=deque)
    turn: float = 0.0
    error: str = ""

    def serve_with(self, drafter: Drafter) -> None:
        """The drafter is its from now on."""
        self.drafter, self.varies = drafter, isinstance(drafter, Varies)
        self.ahead = drafter if isinstance(drafter, LookaheadDrafter) else None

    def admit(self, admit: messages.AddRequest) -> None:
        """Read a prompt. Nobody waits for an answer; of a failure the next one tells."""
        drafter = self._drafter()
        try:
            drafter.add_request(admit.slot, admit.text)
        except Exception as error:  # a drafter may be anything; its failure is the target's to weigh
            self.error = repr(error)

    def answer(self, ask: messages.ProposeRequest, frame: bytearray) -> bytes:
        """The proposal behind a commit, or why there is none; encoded. ``frame``: the question as it came."""
        drafter = self._drafter()
        failed, self.error = self.error, ""
        if failed:
            return messages.encode(messages.ErrorReply(ask.number, failed))
        try:
            for slot, text in ask.texts:
                drafter.add_request(slot, text)
            self.sampling = ask.sampling or self.sampling
            if self.sampling is None:
                raise ValueError("the first round says how to sample")
            blank, self.blank = self.blank, None
            if blank is None or blank.shape != (ask.slots, ask.width):
                blank = BlankRound(ask.slots, ask.width)
            commit, bounds = blank.fill(ask.numbers, ask.rows)
            if ask.pause and self.ahead is not None:
                self.ahead.paused(ask.pause / 1e6)
            drafter.update(commit)
            made = drafter.propose(commit, self.sampling, bounds)
            said = self._said(ask, made)
            self.held, self.heard = (blank, made), None if ask.texts else frame
            return said
        except Exception as error:  # as above
            self.held = self.heard = None  # what failed is not gone through again
            return messages.encode(messages.ErrorReply(ask.number, repr(error)))

    def prepare(self) -> None:
        """Make the tensors of the next round, which is like the last one, and be rid of those.

        What the next question will go through is gone through with the last one: see `due`.
        """
        if self.held is None:
            return
        (blank, made), self.held = self.held, None
        self.blank = BlankRound(*blank.shape)
        if self.heard is not None:
            ask = messages.decode(self.heard)
            assert isinstance(ask, messages.ProposeRequest)
            self.blank.fill(ask.numbers, ask.rows)
            self._said(ask, made)

    def work_ahead(self) -> None:
        """Do a part of what is to be done before the target asks."""
        assert self.ahead is not None
        try:
            self.ahead.work()
        except Exception as error:  # as above
            self.error = repr(error)

    def _said(self, ask: messages.ProposeRequest, made: Proposal) -> bytes:
        rows = _undrawn(made)
        if self.varies:
            rows = [row + [PAD] * (self._drafter().draft_shape.num_draft_tokens - len(row)) for row in rows]
        ahead = self.ahead is not None and self.ahead.hit
        return messages.encode(
            messages.ProposeReply(ask.number, len(rows), len(rows[0]), [*chain.from_iterable(rows)], ahead)
        )

    def _drafter(self) -> Drafter:
        if self.drafter is None:
            raise ChannelError("a target says hello first, and then sends requests")
        return self.drafter


def _undrawn(made: Proposal) -> list[list[int]]:
    """Only ids cross processes: a chain, not drawn from a law. One call of the tensor library: see `blanks`."""
    if made.draft_probs is not None or made.parents is not None:
        raise ValueError("a drafter in another process proposes chains that are not drawn")
    rows: list[list[int]] = made.tokens.tolist()
    if not isinstance(rows[0][0], int):
        raise ValueError("a proposal's tokens are not whole numbers")
    return rows
