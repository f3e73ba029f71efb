"""A round whose depth is chosen anew every time, among depths whose graphs are all compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import perf_counter

import torch
from torch import Tensor

from paceline.core.types import Bounds, Commit, Reading, SamplingBatch
from paceline.loop import TimedRound
from paceline.pace import Pace


class Adaptive:
    """Runs one of several rounds, all over the same decoders and of the same commit width.

    ``rungs`` maps a depth to the round that drafts so many tokens; at depth 0 nothing of the drafter runs but the note
    it takes of every commit, so that it has no gap when its turn comes. ``rung`` is the depth of the last round.
    ``rest``: a round of several plain steps, which takes the place of depth 0 while every text has room for them.
    """

    def __init__(self, rungs: Mapping[int, TimedRound], pace: Pace, *, rest: TimedRound | None = None) -> None:
        self.rungs, self._pace, self._rest = dict(rungs), pace, rest
        self._one = next(iter(self.rungs.values()))  # they share drafter and verifier: one reads prompts for all
        self._seated: set[int] = set()
        self.drafted: list[int] = []
        self.rung: int | None = None
        self._nothing: Tensor | None = None  # limits of a round at depth 0
        self._behind: set[int] = set()  # slots of which the drafter has commits to read

    def __iter__(self) -> Iterator[TimedRound]:
        """Every round that can be taken."""
        yield from self.rungs.values()
        if self._rest is not None:
            yield self._rest

    @property
    def prefill_seconds(self) -> float:
        return sum(one.prefill_seconds for one in self)

    @property
    def draft_seconds(self) -> float:
        return sum(one.draft_seconds for one in self)

    @property
    def verify_seconds(self) -> float:
        return sum(one.verify_seconds for one in self)

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingBatch) -> Reading:
        """Read a prompt on both sides."""
        self._behind.discard(slot)
        self._seated.add(slot)
        return self._one.start(slot, prompt, sampling)

    def release(self, slot: int) -> None:
        """A request is gone from a slot."""
        self._seated.discard(slot)
        self._one.release(slot)

    def __call__(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Commit:
        """One round."""
        limits = bounds.limit.tolist()
        rung = self.rung = self._pace.choose(max(limits))
        taken = self.rungs[rung]
        if rung == 0 and self._rest is not None and all(limits[slot] for slot in self._seated):
            taken = self._rest
        elif rung == 0 and any(limits):
            self._nothing = torch.zeros_like(bounds.limit) if self._nothing is None else self._nothing
            bounds = Bounds(self._nothing, bounds.rows)
        begin = perf_counter()
        made = taken(commit, sampling, bounds)
        seconds = perf_counter() - begin
        self.drafted = taken.drafted
        asked = [min(rung, limit) for limit in limits]
        # To read what was committed during a rest is not what a rung takes.
        late = any(asked[slot] for slot in self._behind)
        if any(asked) or rung == 0:
            accepted = [count - 1 for count in made.count.tolist()]
            self._pace.record(rung, asked=asked, accepted=accepted, seconds=None if late else seconds)
        self._behind = self._behind.difference(s for s, n in enumerate(asked) if n) if rung else set(range(len(asked)))
        return made
