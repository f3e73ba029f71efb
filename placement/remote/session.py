"""One target of a drafter's process: what it was granted at its handshake, and the replies to its messages.

Not here: sockets, turns, and which targets are accepted (`server`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import chain

from paceline.core.errors import ChannelError
from paceline.core.protocols import Drafter, Varies
from paceline.core.types import PAD, Proposal, SamplingTensors
from paceline.placement.lookahead.drafter import LookaheadDrafter
from paceline.placement.remote import messages
from paceline.placement.remote.cache_warm import RequestWarmer
from paceline.placement.remote.channel import Channel


@dataclass(frozen=True, slots=True)
class Grant:
    """What a target got at its handshake.

    slots      of its batch, which count towards the quota
    weight     of its turns
    lookahead  the drafter, if it works while the target does
    varies     its proposals may be shorter than its draft shape; those that travel are padded
    """

    drafter: Drafter
    slots: int
    weight: float
    lookahead: LookaheadDrafter | None
    varies: bool

    @classmethod
    def of(cls, drafter: Drafter, slots: int, weight: float) -> Grant:
        """The grant of a drafter; its kind is looked at once, since every round depends on it."""
        lookahead = drafter if isinstance(drafter, LookaheadDrafter) else None
        return cls(drafter, slots, weight, lookahead, isinstance(drafter, Varies))


class TargetSession:
    """A connected target. ``time_used`` is what its messages took, over its weight, on the server's clock."""

    def __init__(self, channel: Channel, time_used: float) -> None:
        self.channel = channel
        self.time_used = time_used
        self.grant: Grant | None = None
        self.inbox: deque[bytearray] = deque()
        self.warmer = RequestWarmer(self._encoded)
        self._sampling: SamplingTensors | None = None
        self._used_slots: int | None = None  # of `RoundLimits`; as long as the sampling stays, so do the requests
        self._error = ""  # what failed where no reply was due; the next reply says it

    @property
    def works_ahead(self) -> bool:
        """Whether its drafter has something to do before the target asks."""
        lookahead = None if self.grant is None else self.grant.lookahead
        return lookahead is not None and not lookahead.idle

    def charge(self, seconds: float) -> None:
        """So much time was spent on it."""
        self.time_used += seconds if self.grant is None else seconds / self.grant.weight

    def add_request(self, request: messages.AddRequest) -> None:
        """Read a prompt. No reply is due; the next one says if it failed."""
        drafter = self._granted().drafter
        try:
            drafter.add_request(request.slot, request.prompt)
        except Exception as error:  # a drafter may be anything; what its failure means is for the target to decide
            self._error = repr(error)

    def propose(self, request: messages.ProposeRequest, frame: bytearray) -> bytes:
        """The reply to a round, encoded: a proposal, or why there is none. ``frame``: the request as it arrived."""
        grant = self._granted()
        error, self._error = self._error, ""
        if error:
            return messages.encode(messages.ErrorReply(request.number, error))
        try:
            for slot, text in request.texts:
                grant.drafter.add_request(slot, text)
            if request.sampling is not None:
                self._sampling = request.sampling.tensors()
                self._used_slots = _used_slots(self._sampling)
            if self._sampling is None:
                raise ValueError("the first round of a connection must say how to sample")
            buffer, commit, limits = self.warmer.commit(request)
            if request.pause_us and grant.lookahead is not None:
                grant.lookahead.paused(request.pause_us / 1e6)
            grant.drafter.update(commit)
            limits = replace(limits, used_slots=self._used_slots)
            proposal = grant.drafter.propose(commit, self._sampling, limits)
            reply = self._encoded(request.number, proposal)
            self.warmer.prepared(buffer, proposal, None if request.texts else frame)
            return reply
        except Exception as failure:  # as above
            self.warmer.failed()
            return messages.encode(messages.ErrorReply(request.number, repr(failure)))

    def work_ahead(self) -> None:
        """Do one unit of what there is to do before the target asks."""
        lookahead = self._granted().lookahead
        assert lookahead is not None
        try:
            lookahead.work()
        except Exception as error:  # as above
            self._error = repr(error)

    def _encoded(self, number: int, proposal: Proposal) -> bytes:
        """A proposal as the reply to the request of that number."""
        grant, rows = self._granted(), _undrawn_rows(proposal)
        if grant.varies:
            width = grant.drafter.draft_shape.num_draft_tokens
            rows = [row + [PAD] * (width - len(row)) for row in rows]
        tokens = messages.pack_words([*chain.from_iterable(rows)])
        ahead = grant.lookahead is not None and grant.lookahead.hit
        return messages.encode(messages.ProposeReply(number, len(rows), len(rows[0]), tokens, ahead))

    def _granted(self) -> Grant:
        if self.grant is None:
            raise ChannelError("a target must send a handshake first, and then requests")
        return self.grant


def _used_slots(sampling: SamplingTensors) -> int:
    """So many slots, from the first on, hold every request."""
    return max((slot for slot, seated in enumerate(sampling.seated.tolist(), 1) if seated), default=1)


def _undrawn_rows(proposal: Proposal) -> list[list[int]]:
    """The ids of a proposal; only chains that were not drawn can cross processes: no probabilities travel with them."""
    if proposal.draft_probs is not None or proposal.parents is not None:
        raise ValueError("a drafter in another process must propose chains that are not drawn")
    rows: list[list[int]] = proposal.tokens.tolist()  # one call of the tensor library: see `cache_warm`
    if not isinstance(rows[0][0], int):
        raise ValueError("a proposal's tokens must be integers")
    return rows
