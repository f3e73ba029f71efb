"""Draft-ahead: while the target verifies, the drafter already drafts for the likeliest outcomes.

The likeliest one is often that everything is accepted and the target's own token is what the drafter would have drafted
next: so the drafter underneath proposes one token more than is sent. The others end with a second choice of the
drafter's, earlier, if it can tell those (`SecondChoiceModel`). Outcomes are followed one after the other as long as
time allows (`idle`). If the next commit is one of them, its proposal is ready; if not, all is dropped: by its base
position the work belongs to another text.

All outcomes are read into the same cache rows. Where one comes true that was not the last to be read, its rows are read
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
        """Put the commit's rows right. ``rows`` as of `RoundLimits`."""

    def seconds(
        self, commit: Commit, drafts: Tensor, sampling: SamplingTensors, *, rows: int
    ) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[float]]]:
        """The second choice at the place of every draft [B, N], and by how much its score fell behind."""


@dataclass(frozen=True, slots=True)
class _Guess:
    """A commit that may come, as texts, and the proposal that follows it."""

    texts: _Texts
    tokens: Tensor


@dataclass(slots=True)
class _Round:
    """A round from its proposal on. ``tokens`` [B, N + 1] is the whole proposal, ``texts`` the commit as lists."""

    commit: Commit
    texts: _Texts
    tokens: Tensor
    sampling: SamplingTensors
    bounds: RoundLimits
    chains: list[DraftedSlot] = field(default_factory=list)
    ready: list[_Guess] = field(default_factory=list)


class LookaheadDrafter:
    """A drafter that works in its idle time. ``hit``: the last proposal was ready when it was asked for.

    ``reviews`` tells second choices; without it only the first outcome is followed.
    """

    reads: FeatureSpec | None = None

    def __init__(
        self, inner: Drafter, reviews: SecondChoiceModel | None = None, *, clock: Callable[[], float] = perf_counter
    ) -> None:
        assert inner.draft_shape.is_chain and inner.draft_shape.num_draft_tokens > 1, (
            "one token more is proposed than is sent"
        )
        self._inner, self._nodes, self.max_positions = (
            inner,
            inner.draft_shape.num_draft_tokens - 1,
            inner.max_positions,
        )
        self.draft_shape = DraftShape.chain(self._nodes)
        self._reviews, self._odds, self._idle = reviews, OutcomeModel(), IdleBudget(clock)
        self._last: _Round | None = None
        self._units: Iterator[None] | None = None  # what is left to do before the next commit
        self._noted: Commit | None = None
        self._wrong: tuple[Commit, int] | None = None  # its rows hold another outcome's
        self.hit = False

    def add_request(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """A text is read: nothing that was expected can happen."""
        self._last = self._units = None
        self._put_right()
        self._pass_on()
        self._inner.add_request(slot, prompt)

    def finish_request(self, slot: int) -> None:
        """What was expected may still happen in the other slots."""
        self._inner.finish_request(slot)

    def update(self, commit: Commit) -> None:
        """Only noted: a commit that was expected has been read already, and need not be read again."""
        self._pass_on()
        self._noted = commit

    def propose(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> Proposal:
        """The proposal that is ready, or one made now."""
        before, texts = self._last, _texts(commit)
        ready = [] if before is None else before.ready
        made = next((guess for guess in ready if _same(guess.texts, texts)), None)
        self.hit = made is not None
        if made is not None:
            self._noted, tokens = None, made.tokens
            self._wrong = None if made is ready[-1] else (commit, bounds.max_rows)
        else:
            self._put_right()
            self._pass_on()
            tokens = self._inner.propose(commit, sampling, bounds).tokens
        self._last = _Round(commit, texts, tokens, sampling, bounds)
        self._units = self._plan(self._last, before)
        self._idle.begin()
        return Proposal(tokens[:, : self._nodes])

    def paused(self, seconds: float) -> None:
        """The target took so long from the last answer to its next call."""
        self._idle.paused(seconds)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do before the next commit."""
        return self._units is None

    def work(self) -> None:
        """One unit of work; afterwards the next commit may be there, and is to be looked for."""
        units, self._units = self._units, None
        if units is not None and next(units, _END) is not _END:
            self._units = units

    # ---- inside

    def _plan(self, last: _Round, before: _Round | None) -> Iterator[None]:
        """All there is to do after a round, unit by unit."""
        if before is not None:
            self._learn(before, last)
        if self._wrong is not None:
            self._put_right()
            yield
        limits = [min(limit, self._nodes) for limit in last.bounds.max_accept.tolist()]
        last.chains = [DraftedSlot(drafts, limit) for drafts, limit in zip(last.tokens.tolist(), limits, strict=True)]
        full, done = self._odds.full(_live(last)), None
        if full is not None and (now := self._idle.saves("draft", full.odds)) > self._promise(full.odds):
            if now <= 0:
                return
            self._draft(last, full)
            done = full.tokens
            yield
        if self._reviews is None or self._promise(0.0) <= 0:
            return
        self._review(last, self._reviews)
        yield
        for outcome in self._odds.outcomes(_live(last)):
            if outcome.tokens != done:
                if self._idle.saves("draft", outcome.odds) <= 0:
                    return
                self._draft(last, outcome)
                yield

    def _promise(self, full: float) -> float:
        """What it is expected to save to look for second choices, and then to draft for what is likeliest: everything
        right, if its odds ``full`` are not used up, or a second choice, by what is known before the look.
        """
        if self._reviews is None:
            return -math.inf
        return self._idle.saves("draft", max(full, self._odds.of(None)[1]), after="review")

    def _draft(self, last: _Round, outcome: Candidate) -> None:
        """Draft for an outcome, and keep what was drafted."""
        chosen = iter(outcome.tokens)
        rows = [list(chain.drafts[:1] if text is None else next(chosen)) for chain, text in _slots(last)]
        texts = [
            None if was is None else (was[0] + len(was[1]), row) for was, row in zip(last.texts, rows, strict=True)
        ]
        longest = max((at + len(row) for at, row in filter(None, texts)), default=1)
        width = last.commit.tokens.shape[1]
        # Past its reach nothing is asked of a drafter.
        if max(map(len, rows)) > width or (self.max_positions is not None and longest > self.max_positions):
            return
        tokens = torch.tensor([[*row, *[PAD] * (width - len(row))] for row in rows], dtype=torch.int32)
        count = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        commit = Commit(tokens, count, last.commit.first_row + last.commit.count)
        bounds = RoundLimits(last.bounds.max_accept, longest)
        with self._idle.timed("draft"):
            made = self._inner.propose(commit, last.sampling, bounds).tokens
        last.ready.append(_Guess(texts, made))

    def _review(self, last: _Round, reviews: SecondChoiceModel) -> None:
        """Look for the second choices behind what was drafted."""
        with self._idle.timed("review"):
            seconds, gaps = reviews.seconds(last.commit, last.tokens, last.sampling, rows=last.bounds.max_rows)
        told = zip(last.chains, seconds, gaps, strict=True)
        last.chains = [replace(chain, seconds=second, gaps=gap) for chain, second, gap in told]

    def _learn(self, before: _Round, last: _Round) -> None:
        """What came after a proposal, in every slot whose text went on."""
        for (chain, was), now in zip(_slots(before), last.texts, strict=False):
            if was is not None and now is not None and now[0] == was[0] + len(was[1]):
                self._odds.learn(chain, now[1])

    def _put_right(self) -> None:
        """Read a commit again whose rows were overwritten."""
        wrong, self._wrong = self._wrong, None
        if wrong is not None:
            assert self._reviews is not None, "only one outcome was followed"
            self._reviews.reread(*wrong)

    def _pass_on(self) -> None:
        if self._noted is not None:
            self._inner.update(self._noted)
        self._noted = None


def _texts(commit: Commit) -> _Texts:
    """Start and tokens of every slot that holds a request (an idle one is at row 0)."""
    rows, counts, starts = commit.tokens.tolist(), commit.count.tolist(), commit.first_row.tolist()
    return [(at, row[:size]) if at > 0 else None for at, row, size in zip(starts, rows, counts, strict=True)]


def _same(expected: _Texts, texts: _Texts) -> bool:
    """Whether the commits agree in every slot that still holds a request."""
    return all(text is None or text == guess for guess, text in zip(expected, texts, strict=True))


def _slots(one: _Round) -> Iterator[tuple[DraftedSlot, _Text | None]]:
    return zip(one.chains, one.texts, strict=False)


def _live(one: _Round) -> list[DraftedSlot]:
    """What was drafted for requests."""
    return [chain for chain, text in _slots(one) if text is not None]
