"""Asynchronous drafting: while the target verifies, the drafter already drafts for the likeliest outcomes.

The likeliest outcome is often that all drafts are accepted and that the bonus token is the one the drafter would have
drafted next. So the inner drafter proposes one token more than is sent. The other outcomes end earlier with the
drafter's second choice, if a model provides those (`SecondChoiceModel`). Outcomes are drafted one after the other as
long as time allows (`IdleBudget`). If the next commit is one of them, its proposal is ready; if not, all are dropped.

All outcomes are read into the same cache rows. If the one that is committed was not the last to be read, its rows are
read again.

Only for drafters whose proposal depends on the commit and on cache rows before it (a model). A drafter with a history,
such as n-grams, would keep outcomes that never happened.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Commit, DraftShape, Proposal, RoundLimits, SamplingTensors

_KEPT = 15  # number of last times, whose median is expected


class IdleBudget:
    """Predicts the seconds until the target's next call from the last ones.

    A unit of work is always finished: if the target calls before that, its reply is delayed. A unit begun too late
    costs more than it saves.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since = clock, 0.0
        self._pauses: deque[float] = deque(maxlen=_KEPT)
        self._units: dict[str, deque[float]] = {}

    def begin(self) -> None:
        """Start the idle time: the target has its reply."""
        self._since = self._clock()

    def paused(self, seconds: float) -> None:
        """Record the seconds from a reply to the target's next call."""
        self._pauses.append(seconds)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        begin = self._clock()
        yield
        self._units.setdefault(kind, deque(maxlen=_KEPT)).append(self._clock() - begin)

    def saves(self, kind: str, odds: float, *, after: str | None = None) -> float:
        """Return the expected net seconds saved by a unit of work whose result is used with probability ``odds``.

        If it is used, the part done before the call is saved. If not, the call waits for the remaining part in vain.
        ``after``: a unit of that kind comes first. Before the first calls, when nothing is known, a unit is assumed to
        take a second, and to fit.
        """
        takes, left = 1.0, math.inf
        if self._pauses and kind in self._units:
            takes = median(self._units[kind])
            left = median(self._pauses) - (self._clock() - self._since)
            if after in self._units:
                left -= median(self._units[after])
        before = min(takes, left)
        return odds * before - (1 - odds) * (takes - before) if before > 0 else 0.0


_EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)  # of gaps between the scores of two choices
_MEMORY = 512  # choices, after which older ones count half, since sequences change
_MIN_ODDS = 0.01  # of an outcome; less likely ones are not drafted


@dataclass(frozen=True, slots=True)
class Candidate:
    """Tokens that the target may commit in every slot, and the probability of that (``odds``)."""

    odds: float
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DraftedSlot:
    """Drafts for one slot.

    drafts   in order, ended by PAD
    limit    how many of them may be accepted
    seconds  second choices at the same positions, or None
    gaps     how far their scores were below those of the drafts, or None
    """

    drafts: Sequence[int]
    limit: int
    seconds: Sequence[int] | None = None
    gaps: Sequence[float] | None = None

    def gap(self, place: int) -> float | None:
        return None if self.gaps is None else self.gaps[place]


class OutcomeModel:
    """Frequencies with which the target's token was the drafter's first or second choice, by the gap of their scores.

    The target accepts some drafts and adds one token. If that is not the drafter's first choice, it is most often its
    second one. So an outcome is some of the drafts, then the first or the second choice. Its probability depends on the
    gap between the two scores.
    """

    def __init__(self) -> None:
        # Per range of gaps: choices, first was right, second was right; with a small prior. The last range is for any
        # gap.
        self._counts = [[1.0, 0.5, 0.25] for _ in range(len(_EDGES) + 2)]

    def of(self, gap: float | None) -> tuple[float, float]:
        """Return the odds of the first and second choice if all before were right. None: the gap is not known."""
        times, first, second = self._counts[-1 if gap is None else bisect(_EDGES, gap)]
        return first / times, second / times

    def learn(self, slot: DraftedSlot, committed: Sequence[int]) -> None:
        """Count the choices of a slot that were right, from what the target committed."""
        for place, (draft, token) in enumerate(zip(slot.drafts, committed, strict=False)):
            if draft == PAD:
                return
            second = slot.seconds is not None and token == slot.seconds[place] != draft
            self._count(None, token == draft, second)
            if slot.gaps is not None:
                self._count(slot.gaps[place], token == draft, second)
            if token != draft:
                return

    def full(self, slots: Sequence[DraftedSlot]) -> Candidate | None:
        """Return the outcome with all drafts accepted and the next draft as bonus token; None if there is no such
        draft.
        """
        texts = [_first(slot) for slot in slots]
        if any(PAD in tokens for tokens in texts):
            return None
        odds = [self.of(slot.gap(place))[0] for slot, t in zip(slots, texts, strict=True) for place in range(len(t))]
        return Candidate(math.prod(odds), tuple(texts))

    def outcomes(self, slots: Sequence[DraftedSlot]) -> Iterator[Candidate]:
        """Yield outcomes of all slots together, likeliest first. ``slots`` have second choices."""
        return _jointly([self._of_slot(slot) for slot in slots])

    def _of_slot(self, slot: DraftedSlot) -> list[Candidate]:
        assert slot.seconds is not None
        candidates, so_far, drafts = [], 1.0, _first(slot)
        for place, draft in enumerate(drafts):
            if draft == PAD:
                break
            first, second = self.of(slot.gap(place))
            candidates.append(Candidate(so_far * second, ((*drafts[:place], slot.seconds[place]),)))
            so_far *= first
        else:
            candidates.append(Candidate(so_far, (drafts,)))
        return sorted(candidates, key=lambda outcome: -outcome.odds)

    def _count(self, gap: float | None, first: bool, second: bool) -> None:
        counts = self._counts[-1 if gap is None else bisect(_EDGES, gap)]
        if counts[0] >= _MEMORY:
            counts[:] = [number / 2 for number in counts]
        counts[0] += 1
        counts[1] += first
        counts[2] += second


def _first(slot: DraftedSlot) -> tuple[int, ...]:
    """Return the drafts that may be accepted, and one more."""
    return tuple(slot.drafts[: slot.limit + 1])


def _jointly(slots: Sequence[Sequence[Candidate]]) -> Iterator[Candidate]:
    """Yield combinations of one outcome per slot (each list is sorted), likeliest first, down to `_MIN_ODDS`."""
    if not all(slots):
        return
    start = (0,) * len(slots)
    waiting, known = [(-math.prod(slot[0].odds for slot in slots), start)], {start}
    while waiting:
        odds, places = heapq.heappop(waiting)
        if -odds < _MIN_ODDS:
            return
        chosen = [slot[place] for slot, place in zip(slots, places, strict=True)]
        yield Candidate(-odds, tuple(candidate.tokens[0] for candidate in chosen))
        for index, place in enumerate(places):
            after = (*places[:index], place + 1, *places[index + 1 :])
            if place + 1 < len(slots[index]) and after not in known:
                known.add(after)
                odds = math.prod(slot[at].odds for slot, at in zip(slots, after, strict=True))
                heapq.heappush(waiting, (-odds, after))


_Text = tuple[int, list[int]]  # the cache row of the first token, and the tokens of one slot
_Texts = list[_Text | None]

_END = object()


class SecondChoiceModel(Protocol):
    """Model that reads tokens again which a drafter has read and drafted, into the same cache rows."""

    def reread(self, commit: Commit, rows: int) -> None:
        """Read the rows of a commit again. ``rows``: `RoundLimits.max_rows`."""

    def seconds(
        self, commit: Commit, drafts: Tensor, sampling: SamplingTensors, *, rows: int
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]]:
        """Return for every draft [B, N] the second choice, and how far its score was below the first one's."""


@dataclass(frozen=True, slots=True)
class _Ready:
    """Expected commit, as sequences, and the proposal [B, N + 1] that follows it."""

    texts: _Texts
    tokens: Tensor


@dataclass(slots=True)
class _Round:
    """Round since its proposal. ``tokens`` [B, N + 1] is the whole proposal, ``texts`` the commit as lists."""

    commit: Commit
    texts: _Texts
    tokens: Tensor
    sampling: SamplingTensors
    limits: RoundLimits
    slots: list[DraftedSlot] = field(default_factory=list)
    ready: list[_Ready] = field(default_factory=list)

    def drafted(self) -> Iterator[tuple[DraftedSlot, _Text | None]]:
        """Return the drafts of each slot and its sequence; None for a slot without a request."""
        return zip(self.slots, self.texts, strict=False)

    def live(self) -> list[DraftedSlot]:
        return [slot for slot, text in self.drafted() if text is not None]


class LookaheadDrafter(Drafter):
    """Drafter that works in its idle time. ``hit``: the last proposal was ready when it was requested.

    ``second_choices``: without it, only the outcome with all drafts accepted is drafted.
    """

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
        self._work: Iterator[None] | None = None  # work left before the next commit
        self._unread: Commit | None = None  # recorded, and not yet passed on
        self._overwritten: tuple[Commit, int] | None = None  # its rows hold another outcome's
        self.hit = False

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """Read a prompt. The next commit is then none of the expected ones."""
        self._last = self._work = None
        self._restore()
        self._pass_on()
        self._inner.add_request(slot, prompt)

    def finish_request(self, slot: int) -> None:
        """Release the slot; the expected outcomes remain possible in the other slots."""
        self._inner.finish_request(slot)

    def update(self, commit: Commit) -> None:
        """Record the commit: if it was expected, the drafter has read it already, and does not read it again."""
        self._pass_on()
        self._unread = commit

    def propose(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> Proposal:
        """Return the proposal that is ready, or make one now."""
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
        self._idle.paused(seconds)

    @property
    def idle(self) -> bool:
        """Whether no work is left before the next commit."""
        return self._work is None

    def work(self) -> None:
        """Do one unit of work. Check for the next commit afterwards: it may have arrived."""
        units, self._work = self._work, None
        if units is not None and next(units, _END) is not _END:
            self._work = units

    # ---- inside

    def _units(self, last: _Round, before: _Round | None) -> Iterator[None]:
        if before is not None:
            self._learn(before, last)
        if self._overwritten is not None:
            self._restore()
            yield
        limits = [min(limit, self.draft_shape.num_draft_tokens) for limit in last.limits.max_accept]
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
        """Return the seconds expected to be saved by finding second choices first, and then drafting for the likeliest
        outcome: all drafts right, with odds ``full`` unless that is drafted already, or a second choice.
        """
        if self._second_choices is None:
            return -math.inf
        return self._idle.saves("draft", max(full, self._outcomes.of(None)[1]), after="review")

    def _draft(self, last: _Round, outcome: Candidate) -> None:
        outcomes = iter(outcome.tokens)
        rows = [list(slot.drafts[:1] if text is None else next(outcomes)) for slot, text in last.drafted()]
        texts = [
            None if text is None else (text[0] + len(text[1]), row) for text, row in zip(last.texts, rows, strict=True)
        ]
        longest = max((first + len(row) for first, row in filter(None, texts)), default=1)
        width = last.commit.tokens.shape[1]
        # A drafter is not used beyond its positions.
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
        with self._idle.timed("review"):
            seconds, gaps = second_choices.seconds(last.commit, last.tokens, last.sampling, rows=last.limits.max_rows)
        last.slots = [
            replace(slot, seconds=second, gaps=gap) for slot, second, gap in zip(last.slots, seconds, gaps, strict=True)
        ]

    def _learn(self, before: _Round, last: _Round) -> None:
        """Count the tokens committed after a proposal, in every slot whose sequence continued."""
        for (slot, text), now in zip(before.drafted(), last.texts, strict=False):
            if text is not None and now is not None and now[0] == text[0] + len(text[1]):
                self._outcomes.learn(slot, now[1])

    def _restore(self) -> None:
        """Read again a commit whose rows were overwritten."""
        overwritten, self._overwritten = self._overwritten, None
        if overwritten is not None:
            assert self._second_choices is not None, "rows are overwritten only where several outcomes are drafted"
            self._second_choices.reread(*overwritten)

    def _pass_on(self) -> None:
        if self._unread is not None:
            self._inner.update(self._unread)
        self._unread = None


def _texts(commit: Commit) -> _Texts:
    """Return the first row and tokens of every slot that holds a request (an idle one is at row 0)."""
    rows, counts, first_rows = commit.tokens.tolist(), commit.count.tolist(), commit.first_row.tolist()
    return [
        (first, row[:count]) if first > 0 else None for first, row, count in zip(first_rows, rows, counts, strict=True)
    ]


def _same(expected: _Texts, texts: _Texts) -> bool:
    """Whether the commits agree in every slot that still holds a request."""
    return all(text is None or text == other for other, text in zip(expected, texts, strict=True))
