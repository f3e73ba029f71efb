"""Slots and the texts in them. Requests join and leave between rows of rounds; shapes never change.

Holds the only lengths the host knows, all of them derived from commits. Knows no model and no drafter.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.core.sampling import Sampling, param_row, sampling_tensors
from paceline.core.types import (
    IDLE,
    PAD,
    Commit,
    MultiRoundLimits,
    PrefillResult,
    RoundLimits,
    RoundResult,
    SamplingTensors,
)
from paceline.engine.request import Request
from paceline.engine.stopping import StopChecker
from paceline.outputs import RequestOutput, Statistics

MOST_ROUNDS = 32
"""One behind the other, before requests may come and go."""


@dataclass(slots=True)
class Slot:
    """A request at work."""

    request: Request
    watch: StopChecker


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
        self.sampling = sampling_tensors([Sampling()] * size)  # as `_rest` leaves them, and so is the commit
        tokens = torch.tensor([[0] + [PAD] * (width - 1)] * size, dtype=torch.int32)
        ones, zeros = torch.ones(size, dtype=torch.int32), torch.zeros(size, dtype=torch.int32)
        self.commit = Commit(tokens, ones, zeros)
        self._depth, self._reach, self._buckets = depth, reach, buckets
        self._limits, self._limit = [0] * size, zeros.clone()
        self._depths = [0] * size
        self._left = [-1] * size  # room in every slot; below 0: to be worked out
        self._ends: frozenset[int] | None = frozenset()  # ids with which a text may end; None: with others too
        self._statistics = statistics

    @property
    def free(self) -> int | None:
        """A slot without a request."""
        return None if len(self.active) == len(self.slots) else self.slots.index(None)

    def join(
        self, slot: int, request: Request, row: SamplingTensors, *, first: PrefillResult, logprobs: list[float] | None
    ) -> RequestOutput:
        """Seat a request whose prompt is read and whose first token is known; ``row`` is how it samples."""
        self.sampling.params[slot], self.sampling.seeds[slot] = row.params[0], row.seeds[0]
        self.slots[slot] = Slot(request, StopChecker(request.stopping, request.prompt))
        insort(self.active, slot)
        self._reseated()
        self.commit.tokens[slot] = PAD
        self.commit.tokens[slot, 0] = first.token
        self.commit.count[slot] = 1
        self.commit.first_row[slot] = len(request.prompt)
        if first.features is not None:
            self._features(first.features)[slot, 0] = first.features[-1]
        return self._append(slot, [first.token], accepted=0, logprobs=logprobs)

    def apply(self, done: RoundResult, logprobs: list[list[float]] | None) -> list[RequestOutput]:
        """Take over what rounds committed; one event for every request and round."""
        self.commit = commit = done.commit
        if len(self.active) < len(self.slots):
            idle = [index for index, slot in enumerate(self.slots) if slot is None]
            commit.first_row[idle] = 0  # the round moved them on, as it did the others
        events = []
        for told in done.reports:
            for slot in list(self.active):
                tokens, drafted = told.tokens[slot], told.drafted[slot]
                self._left[slot] -= len(tokens)
                accepted = min(len(tokens) - 1, drafted)  # several plain steps commit tokens that nobody drafted
                event = self._append(slot, tokens, accepted=accepted, logprobs=logprobs[slot] if logprobs else None)
                self._statistics.count(drafted, event.accepted, rounds=len(tokens) - accepted)
                events.append(event)
        return events

    def drop(self, indices: Collection[int]) -> None:
        """Free the slots of these requests, where they are."""
        for slot in list(self.active):
            seat = self.slots[slot]
            if seat is not None and seat.request.index in indices:
                self._rest(slot)

    def ends(self, slot: int, tokens: Sequence[int]) -> bool:
        """Whether the text in a slot would end with these tokens; see `paceline.engine.stopping.StopChecker.ends`."""
        seat = self.slots[slot]
        return seat is not None and seat.watch.ends(tokens)

    def bounds(self) -> RoundLimits:
        """What the next round may do."""
        longest = max((len(slot.watch.text) for slot in self.slots if slot is not None), default=1)
        if min(self._left) < 0:
            self._left = self._room(longest)
        limits = [min(depth, left) for depth, left in zip(self._depths, self._left, strict=True)]
        if limits != self._limits:  # a new tensor costs more than all the rest
            self._limits, self._limit = limits, torch.tensor(limits, dtype=torch.int32)
        return RoundLimits(
            self._limit, longest, None if self._ends is None else MultiRoundLimits(self._left, self._ends, MOST_ROUNDS)
        )

    def _room(self, longest: int) -> list[int]:
        """How many nodes every slot could accept in a round of any depth."""
        reach, buckets = self._reach, self._buckets
        border = buckets[min(bisect_left(buckets, longest), len(buckets) - 1)] if buckets else sys.maxsize
        found = []
        for slot in self.slots:
            if slot is None:
                found.append(IDLE)
                continue
            length = len(slot.watch.text)
            rooms = [slot.watch.left - 1, border - length]
            if reach is not None and slot.request.use_speculation:
                rooms.append(max(0, reach - length + 1))
            found.append(max(0, min(rooms)))
        return found

    def _reseated(self) -> None:
        """A request came or went: what was worked out for all of them holds no longer."""
        seated = [slot for slot in self.slots if slot is not None]
        self._left = [-1] * len(self.slots)
        self._depths = [self._depth if slot is not None and slot.request.use_speculation else 0 for slot in self.slots]
        ends = frozenset[int]().union(*(slot.request.stopping.eos for slot in seated))
        self._ends = None if any(slot.watch.watchful for slot in seated) else ends

    def _features(self, example: Tensor) -> Tensor:
        """Features of the commit, to write into; made when the first prompt that has some is read."""
        found = self.commit.states
        if found is None:
            found = example.new_zeros(*self.commit.tokens.shape, example.shape[-1])
        self.commit = replace(self.commit, features=found)
        return found

    def _append(self, slot: int, tokens: list[int], *, accepted: int, logprobs: list[float] | None) -> RequestOutput:
        seat = self.slots[slot]
        assert seat is not None
        kept, reason = seat.watch.extend(tokens)
        self._statistics.new_tokens += kept
        if reason is not None:
            self._rest(slot)
        scores = None if logprobs is None else tuple(logprobs[:kept])
        return RequestOutput(seat.request.index, tuple(tokens[:kept]), min(accepted, kept), reason, scores)

    def _rest(self, slot: int) -> None:
        """Free a slot; it then computes harmless tokens from row 0 of its own cache on."""
        self.slots[slot] = None
        self.active.remove(slot)
        self._reseated()
        self.commit.tokens[slot] = PAD
        self.commit.tokens[slot, 0] = 0
        self.commit.count[slot] = 1
        self.commit.first_row[slot] = 0
        self.sampling.params[slot] = torch.tensor(param_row(Sampling()))  # greedy: the cheapest law
