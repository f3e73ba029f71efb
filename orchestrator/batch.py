"""Slots and the texts in them. Requests join and leave between rounds; shapes never change.

Holds the only lengths the host knows, all of them derived from commits. Knows no model and no drafter.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.sampling import Sampling, knob_row, sampling_batch
from paceline.core.types import PAD, Bounds, Commit, Reading, SamplingBatch
from paceline.request import Request
from paceline.result import Event, Statistics
from paceline.stopping import Watch


@dataclass(slots=True)
class Slot:
    """A request at work."""

    request: Request
    watch: Watch


class Batch:
    """Commit, sampling and bounds of all slots, and the texts behind them.

    A round accepts ``depth`` nodes at most; ``reach`` positions are what the drafter follows, None = all; no window
    crosses the border of one of the cache's ``buckets``, ascending.
    """

    def __init__(
        self,
        size: int,
        width: int,
        statistics: Statistics,
        *,
        depth: int,
        reach: int | None,
        buckets: Sequence[int],
    ) -> None:
        self.slots: list[Slot | None] = [None] * size
        self.active: list[int] = []  # slots that hold a request, ascending; changes in place
        self.sampling = sampling_batch([Sampling()] * size)  # as `_rest` leaves them, and so is the commit
        tokens = torch.tensor([[0] + [PAD] * (width - 1)] * size, dtype=torch.int32)
        ones, zeros = torch.ones(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)
        self.commit = Commit(tokens, ones, zeros)
        self._depth, self._reach, self._buckets = depth, reach, buckets
        self._limits, self._limit = [0] * size, zeros.clone()
        self._alike = -1  # for so many more tokens in every slot the limits stay what they are; below 0: not known
        self._statistics = statistics

    @property
    def free(self) -> int | None:
        """A slot without a request."""
        return None if len(self.active) == len(self.slots) else self.slots.index(None)

    def join(
        self, slot: int, request: Request, row: SamplingBatch, *, first: Reading, logprobs: list[float] | None
    ) -> Event:
        """Seat a request whose prompt is read and whose first token is known; ``row`` is how it samples."""
        self.sampling.knobs[slot], self.sampling.keys[slot] = row.knobs[0], row.keys[0]
        self.slots[slot] = Slot(request, Watch(request.stopping, request.prompt))
        insort(self.active, slot)
        self._alike = -1
        self.commit.tokens[slot] = PAD
        self.commit.tokens[slot, 0] = first.token
        self.commit.count[slot] = 1
        self.commit.start[slot] = len(request.prompt)
        if first.features is not None:
            self._features(first.features)[slot, 0] = first.features[-1]
        return self._append(slot, [first.token], accepted=0, logprobs=logprobs)

    def apply(self, commit: Commit, drafted: list[int], logprobs: list[list[float]] | None) -> list[Event]:
        """Take over a round's commit; one event for every request. ``drafted``: proposed tokens of every slot."""
        self.commit = commit
        if len(self.active) < len(self.slots):
            idle = [index for index, slot in enumerate(self.slots) if slot is None]
            commit.start[idle] = 0  # the round moved them on, as it did the others
        events = []
        rows, counts = commit.tokens.tolist(), commit.count.tolist()
        self._alike -= max(counts)
        for slot in list(self.active):
            tokens = rows[slot][: counts[slot]]
            accepted = min(counts[slot] - 1, drafted[slot])  # several plain steps commit tokens that nobody drafted
            event = self._append(slot, tokens, accepted=accepted, logprobs=logprobs[slot] if logprobs else None)
            self._statistics.count(drafted[slot], event.accepted, rounds=counts[slot] - accepted)
            events.append(event)
        return events

    def drop(self, indices: Collection[int]) -> None:
        """Free the slots of these requests, where they are."""
        for slot in list(self.active):
            seat = self.slots[slot]
            if seat is not None and seat.request.index in indices:
                self._rest(slot)

    def ends(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether the text in a slot would end with these tokens; see `paceline.stopping.Watch.ends`."""
        seat = self.slots[slot]
        return seat is not None and seat.watch.ends(tokens)

    def bounds(self) -> Bounds:
        """What the next round may do."""
        longest = max((len(slot.watch.text) for slot in self.slots if slot is not None), default=1)
        if self._alike < 0:
            limits, self._alike = self._limited(longest)
            if limits != self._limits:  # a new tensor costs more than all the rest
                self._limits, self._limit = limits, torch.tensor(limits, dtype=torch.int32)
        return Bounds(self._limit, longest)

    def _limited(self, longest: int) -> tuple[list[int], int]:
        """How many nodes may be accepted in every slot; and for how many more tokens that holds."""
        depth, reach, buckets = self._depth, self._reach, self._buckets
        border = buckets[min(bisect_left(buckets, longest), len(buckets) - 1)] if buckets else sys.maxsize
        limits, alike = [0] * len(self.slots), border - longest
        for index, slot in enumerate(self.slots):
            if slot is not None and slot.request.speculate:
                length = len(slot.watch.text)
                follows = border if reach is None else reach - length + 1 if length <= reach else 0
                room = min(slot.watch.left - 1, follows, border - length)
                limits[index] = max(0, min(depth, room))
                alike = min(alike, room - depth)
        return limits, alike

    def _features(self, example: Tensor) -> Tensor:
        """Features of the commit, to write into; made when the first prompt that has some is read."""
        found = self.commit.states
        if found is None:
            found = example.new_zeros(*self.commit.tokens.shape, example.shape[-1])
        self.commit = replace(self.commit, features=found)
        return found

    def _append(self, slot: int, tokens: list[int], *, accepted: int, logprobs: list[float] | None) -> Event:
        seat = self.slots[slot]
        assert seat is not None
        kept, reason = seat.watch.extend(tokens)
        self._statistics.new_tokens += kept
        if reason is not None:
            self._rest(slot)
        scores = None if logprobs is None else tuple(logprobs[:kept])
        return Event(seat.request.index, tuple(tokens[:kept]), min(accepted, kept), reason, scores)

    def _rest(self, slot: int) -> None:
        """Free a slot; it then computes a harmless token at row 0 of its own cache."""
        self.slots[slot] = None
        self.active.remove(slot)
        self._alike = -1
        self.commit.tokens[slot] = PAD
        self.commit.tokens[slot, 0] = 0
        self.commit.count[slot] = 1
        self.commit.start[slot] = 0
        self.sampling.knobs[slot] = torch.tensor(knob_row(Sampling()))  # greedy: the cheapest law
