"""Draft-ahead: while the target verifies, the drafter already drafts for the likeliest outcome.

That outcome is: everything is accepted and the target's own token is what the drafter would have drafted next. So the
drafter underneath proposes one token more than is sent. If the next commit is the expected one, its proposal is ready;
if not, it is dropped and made anew: by its base position the work belongs to another text.

Only for drafters whose proposal depends on the commit and on cache rows before it (a model): one that keeps a history,
as n-grams do, would remember what never happened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.protocols import Drafter
from paceline.core.types import PAD, Bounds, Commit, Outline, Proposal, Reads, SamplingBatch


@dataclass(frozen=True, slots=True)
class _Round:
    """What is known of a round: ``tokens`` [B, N + 1] is the whole proposal."""

    commit: Commit
    tokens: Tensor
    sampling: SamplingBatch
    bounds: Bounds


class Ahead:
    """A drafter that works in its idle time. ``hit``: the last proposal was ready when it was asked for."""

    reads: Reads | None = None

    def __init__(self, inner: Drafter) -> None:
        assert inner.outline.is_chain and inner.outline.nodes > 1, "one token more is proposed than is sent"
        self._inner, self._nodes, self.reach = inner, inner.outline.nodes - 1, inner.reach
        self.outline = Outline.chain(self._nodes)
        self._last: _Round | None = None
        self._guess: _Round | None = None
        self._noted: Commit | None = None
        self.hit = False

    def admit(self, slot: int, prompt: Sequence[int], features: Tensor | None = None) -> None:
        """A text is read: nothing that was expected can happen."""
        self._last = self._guess = None
        self._pass_on()
        self._inner.admit(slot, prompt)

    def release(self, slot: int) -> None:
        """What was expected may still happen in the other slots."""
        self._inner.release(slot)

    def observe(self, commit: Commit) -> None:
        """Only noted: a commit that was expected has been read already, and need not be read again."""
        self._pass_on()
        self._noted = commit

    def propose(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Proposal:
        """The proposal that is ready, or one made now."""
        guess, self._guess = self._guess, None
        self.hit = guess is not None and _same(guess.commit, commit)
        if guess is not None and self.hit:
            self._noted = None
            tokens = guess.tokens
        else:
            self._pass_on()
            tokens = self._inner.propose(commit, sampling, bounds).tokens
        self._last = _Round(commit, tokens, sampling, bounds)
        return Proposal(tokens[:, : self._nodes])

    def _pass_on(self) -> None:
        if self._noted is not None:
            self._inner.observe(self._noted)
        self._noted = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do before the next commit."""
        return self._last is None

    def work(self) -> None:
        """Draft for the expected outcome of the last round."""
        last, self._last = self._last, None
        if last is None:
            return
        width = last.commit.tokens.shape[1]
        gained = self._nodes + 1
        rows = last.bounds.rows + gained
        # Past its reach nothing is asked of a drafter; and a token that was not drafted cannot be expected.
        if gained > width or (self.reach is not None and rows + gained > self.reach):
            return
        tokens = torch.nn.functional.pad(last.tokens, (0, width - gained), value=PAD)
        count = torch.full_like(last.commit.count, gained)
        expected = Commit(tokens, count, last.commit.start + last.commit.count)
        bounds = Bounds(last.bounds.limit, rows)
        made = self._inner.propose(expected, last.sampling, bounds)
        self._guess = _Round(expected, made.tokens, last.sampling, bounds)


def _same(expected: Commit, commit: Commit) -> bool:
    """Whether the commits agree in every slot that holds a request (an idle one is at row 0)."""
    live = commit.start > 0
    agree = (expected.start == commit.start) & (expected.count == commit.count)
    agree &= (expected.tokens == commit.tokens).all(1)
    return bool((agree | ~live).all())
