"""A round whose depth is chosen anew every time, among depths whose graphs are all compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Commit, MultiRoundLimits, PrefillResult, RoundLimits, RoundResult, SamplingTensors
from paceline.engine.draft_length import DraftLengthController
from paceline.engine.engine import TimedRound


@dataclass(frozen=True, slots=True)
class Stage:
    """A round of one depth. ``width``: tokens that the commits it reads and makes have room for."""

    round: TimedRound
    width: int


class AdaptiveRound:
    """Runs one of several rounds, all over the same decoders.

    ``rungs`` maps a depth to the round that drafts so many tokens; at depth 0 nothing of the drafter runs but the note
    it takes of every commit, so that it has no gap when its turn comes. ``rung`` is the depth of the last round.
    ``drafter`` is that of all rungs.
    ``rest``: a round of several plain steps, which takes the place of depth 0 while every text has room for them.

    A rung reads commits as wide as its own: a drafter reads every row of them, those with no token too. What another
    rung has committed beyond that is a commit of its own, which is observed before the round.
    """

    def __init__(
        self, rungs: Mapping[int, Stage], pace: DraftLengthController, *, drafter: Drafter, rest: Stage | None = None
    ) -> None:
        self.stages, self._pace, self._drafter, self.rest = dict(rungs), pace, drafter, rest
        self._one = next(iter(self.stages.values())).round  # they share both sides: one reads prompts for all
        self._seated: set[int] = set()
        self.draft_length: int | None = None
        self._nothing: Tensor | None = None  # limits of a round at depth 0
        self._seen: tuple[Tensor, list[int]] | None = None  # the last limits: mostly the same object again
        self._behind: set[int] = set()  # slots of which the drafter has commits to read

    def __iter__(self) -> Iterator[Stage]:
        """All that can be taken."""
        yield from self.stages.values()
        if self.rest is not None:
            yield self.rest

    @property
    def prefill_seconds(self) -> float:
        return sum(one.round.prefill_seconds for one in self)

    @property
    def draft_seconds(self) -> float:
        return sum(one.round.draft_seconds for one in self)

    @property
    def verify_seconds(self) -> float:
        return sum(one.round.verify_seconds for one in self)

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> PrefillResult:
        """Read a prompt on both sides."""
        self._behind.discard(slot)
        self._seated.add(slot)
        return self._one.start(slot, prompt, sampling)

    def finish_request(self, slot: int) -> None:
        """A request is gone from a slot."""
        self._seated.discard(slot)
        self._one.finish_request(slot)

    def __call__(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> RoundResult:
        """One round, or some at the same depth."""
        if self._seen is None or self._seen[0] is not bounds.max_accept:
            self._seen = (bounds.max_accept, bounds.max_accept.tolist())
        limits = self._seen[1]
        rung = self.draft_length = self._pace.choose(max(limits))
        taken = self.stages[rung]
        if rung == 0 and self.rest is not None and all(limits[slot] for slot in self._seated):
            taken = self.rest
        elif rung == 0 and any(limits):
            self._nothing = torch.zeros_like(bounds.max_accept) if self._nothing is None else self._nothing
            bounds = RoundLimits(self._nothing, bounds.max_rows)
        early = None
        if commit.tokens.shape[1] != taken.width:  # another rung's
            early, commit = fitted(commit, taken.width)
            if early is not None:
                self._drafter.update(early)
        if bounds.multi_round is not None:
            room = MultiRoundLimits(bounds.multi_round.remaining, bounds.multi_round.end_ids, self._pace.rounds)
            bounds = RoundLimits(bounds.max_accept, bounds.max_rows, room)
        done = taken.round(commit, sampling, bounds)
        self._record(
            rung,
            limits,
            done,
            left=bounds.multi_round.remaining if bounds.multi_round else limits,
            early=early is not None,
        )
        return done

    def _record(self, rung: int, limits: list[int], done: RoundResult, *, left: list[int], early: bool) -> None:
        """What rounds at this rung did. To read what was committed before is not what the first one takes."""
        for number, told in enumerate(done.reports):
            asked = [min(rung, limit, max(0, room)) for limit, room in zip(limits, left, strict=True)]
            late = any(asked[slot] for slot in self._behind) or (early and rung > 0 and number == 0)
            if any(asked) or rung == 0:
                accepted = [len(tokens) - 1 for tokens in told.tokens]
                self._pace.record(rung, asked=asked, accepted=accepted, seconds=None if late else told.seconds)
            if rung == 0:
                self._behind = set(range(len(asked)))
            elif self._behind:
                self._behind = {slot for slot in self._behind if not asked[slot]}
            left = [room - len(tokens) for room, tokens in zip(left, told.tokens, strict=True)]


def fitted(commit: Commit, width: int) -> tuple[Commit | None, Commit]:
    """A commit without features as one of another width, with its last tokens, and one of those before them.

    The latter has ``count`` and ``start`` 0 in slots that need none, and is None if no slot needs one.
    """
    room = commit.tokens.shape[1]
    if width > room:
        return None, Commit(
            nn.functional.pad(commit.tokens, (0, width - room), value=PAD), commit.count, commit.first_row
        )
    counts = commit.count.tolist()
    if max(counts) <= width:
        tokens = commit.tokens[:, :width].clone(memory_format=torch.contiguous_format)
        return None, Commit(tokens, commit.count, commit.first_row)
    before = (commit.count - width).clamp(min=0)
    rows = [row[max(0, count - width) : count] for row, count in zip(commit.tokens.tolist(), counts, strict=True)]
    last = torch.tensor([row + [PAD] * (width - len(row)) for row in rows], dtype=torch.int32)
    early = Commit(commit.tokens, before, torch.where(before > 0, commit.first_row, 0))
    return early, Commit(last, commit.count - before, commit.first_row + before)
