"""Draft-ahead: while the target verifies, the drafter already drafts for the likeliest outcomes.

The likeliest outcome is often that everything is accepted and that the target's own token is the one the drafter would
have drafted next: so the drafter underneath proposes one token more than is sent. The other outcomes end with a second
choice of the drafter's, earlier, if there is a model that tells those (`SecondChoiceModel`). Outcomes are drafted one
after the other as long as time allows (`IdleBudget`). If the next commit is one of them, its proposal is ready; if
not, all are dropped.

All outcomes are read into the same cache rows. If one comes true that was not the last to be read, its rows are read
again.

Only for drafters whose proposal depends on the commit and on cache rows before it (a model): one that keeps a history,
as n-grams do, would remember what never happened.
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

_KEPT = 15  # of the last times, whose median is expected


class IdleBudget:
    """Predicts the seconds until the target's next call from the last ones.

    A unit of work that was begun is finished: if the target calls meanwhile, its reply is delayed. Begun too late,
    a unit costs more than it saves.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._since = clock, 0.0
        self._pauses: deque[float] = deque(maxlen=_KEPT)
        self._units: dict[str, deque[float]] = {}

    def begin(self) -> None:
        """The target has its reply: the idle time begins."""
        self._since = self._clock()

    def paused(self, seconds: float) -> None:
        """The target took so long from a reply to its next call."""
        self._pauses.append(seconds)

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Time a unit of work of that kind."""
        begin = self._clock()
        yield
        self._units.setdefault(kind, deque(maxlen=_KEPT)).append(self._clock() - begin)

    def saves(self, kind: str, odds: float, *, after: str | None = None) -> float:
        """Expected seconds saved, less those lost, by a unit of a kind whose result is used with probability ``odds``.

        If it is used, the part that is done before the call is saved. If not, the part that is left then is waited for
        in vain. ``after``: a unit of that kind comes first. Before the first calls, when nothing is known, a unit is
        assumed to take a second, and to fit.
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
_MEMORY = 512  # choices, after which older ones count half, since texts change
_MIN_ODDS = 0.01  # of an outcome; less likely ones are not worth the energy


@dataclass(frozen=True, slots=True)
class Candidate:
    """``tokens`` that the target may commit in every slot, and the ``odds`` (probability) of that."""

    odds: float
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DraftedSlot:
    """What was drafted for one slot.

    drafts   in order; a PAD ends them
    limit    how many of them may be accepted
    seconds  the second choices at the same places, or None
    gaps     how far the scores of these were below those of the drafts, or None
    """

    drafts: Sequence[int]
    limit: int
    seconds: Sequence[int] | None = None
    gaps: Sequence[float] | None = None

    def gap(self, place: int) -> float | None:
        return None if self.gaps is None else self.gaps[place]


class OutcomeModel:
    """How often the target's token was the draft's choice, and how often its second one, for every range of gaps.

    Some drafts are accepted, and one token of the target's own follows. Where that is not the drafter's choice, it
    is most often the drafter's second one: so an outcome is some of the drafts, and the first or the second choice
    after them. How likely it is depends on how far apart the two scores were.
    """

    def __init__(self) -> None:
        # Per range of gaps: choices, first was right, second was right; with a small prior. The last is for any gap.
        self._counts = [[1.0, 0.5, 0.25] for _ in range(len(_EDGES) + 2)]

    def of(self, gap: float | None) -> tuple[float, float]:
        """Odds of the first and of the second choice if everything before was right; None = the gap is not known."""
        times, first, second = self._counts[-1 if gap is None else bisect(_EDGES, gap)]
        return first / times, second / times

    def learn(self, slot: DraftedSlot, committed: Sequence[int]) -> None:
        """What the target committed where this was drafted."""
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
        """All drafts are accepted, and the target's own token is the next draft; None where there is no such draft."""
        texts = [_first(slot) for slot in slots]
        if any(PAD in tokens for tokens in texts):
            return None
        odds = [self.of(slot.gap(place))[0] for slot, t in zip(slots, texts, strict=True) for place in range(len(t))]
        return Candidate(math.prod(odds), tuple(texts))

    def outcomes(self, slots: Sequence[DraftedSlot]) -> Iterator[Candidate]:
        """Outcomes of all slots together, likeliest first. ``slots`` have second choices."""
        return _jointly([self._of_slot(slot) for slot in slots])

    def _of_slot(self, slot: DraftedSlot) -> list[Candidate]:
        """Outcomes of one slot, likeliest first."""
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
    """The drafts that may be accepted, and one more."""
    return tuple(slot.drafts[: slot.limit + 1])


def _jointly(slots: Sequence[Sequence[Candidate]]) -> Iterator[Candidate]:
    """Combinations of one outcome of every slot (each list is sorted), likeliest first, down to `_MIN_ODDS`."""
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


class LookaheadDrafter(Drafter):
    """A drafter that works in its idle time. ``hit``: the last proposal was ready when it was asked for.

    ``second_choices``: without it only the outcome is drafted in which everything is right.
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
