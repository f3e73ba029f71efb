"""Draft-ahead: while the target verifies, the drafter already drafts for the likeliest outcomes.

The likeliest outcome is often that everything is accepted and that the target's own token is the one the drafter would
have drafted next: so the drafter underneath proposes one token more than is sent. The other outcomes end with a second
choice of the drafter's, earlier, if there is a model that tells those (`SecondChoiceModel`). Outcomes are drafted one
after the other as long as time allows (`idle_budget`). If the next commit is one of them, its proposal is ready; if
not, all are dropped.

All outcomes are read into the same cache rows. If one comes true that was not the last to be read, its rows are read
again.

Only for drafters whose proposal depends on the commit and on cache rows before it (a model): one that keeps a history,
as n-grams do, would remember what never happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Commit, DraftShape, FeatureSpec, Proposal, RoundLimits, SamplingTensors
from paceline.placement.lookahead.idle_budget import IdleBudget
from paceline.placement.lookahead.outcomes import Candidate, DraftedSlot, OutcomeModel

_Text = tuple[int, list[int]]  # the cache row of the first token, and the tokens of one slot
_Texts = list[_Text | None]

_END = object()


class SecondChoiceModel(Protocol):
    """Reads again what a drafter has read and drafted, into the same cache rows."""

    def reread(self, commit: Commit, rows: int) -> None:
        """Read the rows of a commit again. ``rows``: `RoundLimits.max_rows`."""

    def seconds(
        self, commit: Commit, drafts: Tensor, sampling: SamplingTensors, *, rows: int
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]]:
        """For every draft [B, N] the second choice, and how far its score was below the first one's."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """A commit that may come, as texts, and the proposal [B, N + 1] that follows it."""

    texts: _Texts
    tokens: Tensor


@dataclass(slots=True)
class _Round:
    """A round from its proposal on. ``tokens`` [B, N + 1] is the whole proposal, ``texts`` the commit as lists."""

    commit: Commit
    texts: _Texts
    tokens: Tensor
    sampling: SamplingTensors
    limits: RoundLimits
    slots: list[DraftedSlot] = field(default_factory=list)
    ready: list[_Ready] = field(default_factory=list)

    def drafted(self) -> Iterator[tuple[DraftedSlot, _Text | None]]:
        """What was drafted for each slot, and its text; None for a slot without a request."""
        return zip(self.slots, self.texts, strict=False)

    def live(self) -> list[DraftedSlot]:
        """What was drafted for requests."""
        return [slot for slot, text in self.drafted() if text is not None]


class LookaheadDrafter:
    """A drafter that works in its idle time. ``hit``: the last proposal was ready when it was asked for.

    ``second_choices``: without it only the outcome is drafted in which everything is right.
    """

    reads: FeatureSpec | None = None

    def __init__(
        self,
        inner: Drafter,
        second_choices: SecondChoiceModel | None = None,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        assert inner.draft_shape.is_chain and inner.draft_shape.num_draft_tokens > 1, (
            "the drafter underneath proposes a chain of one token more than is sent"
        )
        self._inner, self._second_choices = inner, second_choices
        self.draft_shape = DraftShape.chain(inner.draft_shape.num_draft_tokens - 1)
        self.max_positions = inner.max_positions
        self._outcomes, self._idle = OutcomeModel(), IdleBudget(clock)
        self._last: _Round | None = None
        self._work: Iterator[None] | None = None  # what is left to do before the next commit
        self._unread: Commit | None = None  # recorded, and not yet passed on
        self._overwritten: tuple[Commit, int] | None = None  # its rows hold another outcome's
        self.hit = False

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Read a prompt. The next commit is then none of those that were expected."""
        self._last = self._work = None
        self._restore()
        self._pass_on()
        self._inner.add_request(slot, prompt)

    def finish_request(self, slot: int) -> None:
        """Release the slot; what was expected may still happen in the other slots."""
        self._inner.finish_request(slot)

    def update(self, commit: Commit) -> None:
        """Keep the commit: if it was expected, the drafter has read it already, and need not read it again."""
        self._pass_on()
        self._unread = commit

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        """The proposal that is ready, or one that is made now."""
        before, texts = self._last, _texts(commit)
        expected = [] if before is None else before.ready
        match = next((ready for ready in expected if _same(ready.texts, texts)), None)
        self.hit = match is not None
        if match is not None:
            self._unread, tokens = None, match.tokens
            self._overwritten = None if match is expected[-1] else (commit, limits.max_rows)
        else:
            self._restore()
            self._pass_on()
            tokens = self._inner.propose(commit, sampling, limits).tokens
        self._last = _Round(commit, texts, tokens, sampling, limits)
        self._work = self._units(self._last, before)
        self._idle.begin()
        return Proposal(tokens[:, : self.draft_shape.num_draft_tokens])

    def paused(self, seconds: float) -> None:
        """The target took so long from the last reply to its next request."""
        self._idle.paused(seconds)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do before the next commit."""
        return self._work is None

    def work(self) -> None:
        """Do one unit of work. Afterwards the next commit may have arrived, and is to be looked for."""
        units, self._work = self._work, None
        if units is not None and next(units, _END) is not _END:
            self._work = units

    # ---- inside

    def _units(self, last: _Round, before: _Round | None) -> Iterator[None]:
        """All there is to do after a round, unit by unit."""
        if before is not None:
            self._learn(before, last)
        if self._overwritten is not None:
            self._restore()
            yield
        limits = [min(limit, self.draft_shape.num_draft_tokens) for limit in last.limits.max_accept.tolist()]
        last.slots = [DraftedSlot(drafts, limit) for drafts, limit in zip(last.tokens.tolist(), limits, strict=True)]
        full, drafted = self._outcomes.full(last.live()), None
        if full is not None and (now := self._idle.saves("draft", full.odds)) > self._saves_after_review(full.odds):
            if now <= 0:
                return
            self._draft(last, full)
            drafted = full.tokens
            yield
        if self._second_choices is None or self._saves_after_review(0.0) <= 0:
            return
        self._review(last, self._second_choices)
        yield
        for outcome in self._outcomes.outcomes(last.live()):
            if outcome.tokens != drafted:
                if self._idle.saves("draft", outcome.odds) <= 0:
                    return
                self._draft(last, outcome)
                yield

    def _saves_after_review(self, full: float) -> float:
        """What it is expected to save to look for second choices first, and then to draft for the likeliest outcome:
        everything right, with odds ``full`` unless that is drafted already, or a second choice, as known so far.
        """
        if self._second_choices is None:
            return -math.inf
        return self._idle.saves("draft", max(full, self._outcomes.of(None)[1]), after="review")

    def _draft(self, last: _Round, outcome: Candidate) -> None:
        """Draft for an outcome, and keep the proposal."""
        outcomes = iter(outcome.tokens)
        rows = [list(slot.drafts[:1] if text is None else next(outcomes)) for slot, text in last.drafted()]
        texts = [
            None if text is None else (text[0] + len(text[1]), row) for text, row in zip(last.texts, rows, strict=True)
        ]
        longest = max((first + len(row) for first, row in filter(None, texts)), default=1)
        width = last.commit.tokens.shape[1]
        # Beyond its positions nothing is asked of a drafter.
        if max(map(len, rows)) > width or (self.max_positions is not None and longest > self.max_positions):
            return
        tokens = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows], dtype=torch.int32)
        count = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        commit = Commit(tokens, count, last.commit.first_row + last.commit.count)
        limits = RoundLimits(last.limits.max_accept, longest, used_slots=last.limits.used_slots)
        with self._idle.timed("draft"):
            proposal = self._inner.propose(commit, last.sampling, limits)
        last.ready.append(_Ready(texts, proposal.tokens))

    def _review(self, last: _Round, second_choices: SecondChoiceModel) -> None:
        """Look for the second choices next to what was drafted."""
        with self._idle.timed("review"):
            seconds, gaps = second_choices.seconds(last.commit, last.tokens, last.sampling, rows=last.limits.max_rows)
        last.slots = [
            replace(slot, seconds=second, gaps=gap) for slot, second, gap in zip(last.slots, seconds, gaps, strict=True)
        ]

    def _learn(self, before: _Round, last: _Round) -> None:
        """What was committed after a proposal, in every slot whose text went on."""
        for (slot, text), now in zip(before.drafted(), last.texts, strict=False):
            if text is not None and now is not None and now[0] == text[0] + len(text[1]):
                self._outcomes.learn(slot, now[1])

    def _restore(self) -> None:
        """Read a commit again whose rows were overwritten."""
        overwritten, self._overwritten = self._overwritten, None
        if overwritten is not None:
            assert self._second_choices is not None, "rows are overwritten only where several outcomes are drafted"
            self._second_choices.reread(*overwritten)

    def _pass_on(self) -> None:
        if self._unread is not None:
            self._inner.update(self._unread)
        self._unread = None


def _texts(commit: Commit) -> _Texts:
    """First row and tokens of every slot that holds a request (an idle one is at row 0)."""
    rows, counts, first_rows = commit.tokens.tolist(), commit.count.tolist(), commit.first_row.tolist()
    return [
        (first, row[:count]) if first > 0 else None for first, row, count in zip(first_rows, rows, counts, strict=True)
    ]


def _same(expected: _Texts, texts: _Texts) -> bool:
    """Whether the commits agree in every slot that still holds a request."""
    return all(text is None or text == other for other, text in zip(expected, texts, strict=True))
