"""Rounds: how a drafter and a verifier are put in sequence. Knows the protocols of `core`, and slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Protocol

from torch import nn

from paceline.core import tree
from paceline.core.protocols import (
    AutoregressiveTarget,
    Drafter,
    FusedVerifier,
    Reading,
    ReadsInChunks,
    Round,
    TraceableDrafter,
    Verifier,
    movable,
    move_request,
)
from paceline.core.types import PAD, Commit, Proposal, RoundLimits, RoundResult, SamplingTensors, TokenScore
from paceline.engine.batch import Slot

MULTI_ROUND_BUDGET_S = 1 / 30
"""Time budget for consecutive fused rounds. Each return to Python costs about 100 us, because a pass over the weights
evicts its code and data from the caches. A larger budget delays streaming and admission.
"""


class RoundBase:
    """What rounds with a drafter have: reading a prompt on both sides."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        self._sides = (drafter, verifier)
        self._reader = drafter if isinstance(drafter, ReadsInChunks) else None

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt on both sides. The last piece of the target's and the drafter's first are one."""
        first = yield from self._sides[1].prefill(slot, prompt, sampling)
        if self._reader is not None:
            yield from self._reader.read_request(slot, prompt, first.features)
        else:
            self._sides[0].add_request(slot, prompt, first.features)
        return first

    def finish_request(self, slot: int) -> None:
        """A request has left its slot: tell both sides."""
        for side in self._sides:
            side.finish_request(slot)

    @property
    def movable(self) -> bool:
        """See `paceline.core.protocols.MovesRequests`."""
        return all(map(movable, self._sides))

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """See `paceline.core.protocols.MovesRequests`."""
        move_request(self._sides, slot, to, rows=rows)


class TwoGraphRound(RoundBase):
    """Draft, then verify: two calls a round."""

    def __init__(self, drafter: Drafter, verifier: Verifier) -> None:
        super().__init__(drafter, verifier)
        self.drafter, self.verifier = drafter, verifier

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round."""
        begin = perf_counter()
        self.drafter.update(commit)
        max_accept = limits.max_accept.tolist()
        proposal = self.drafter.propose(commit, sampling, limits) if any(max_accept) else None
        drafted = [0] * len(max_accept) if proposal is None else drafted_depths(proposal, max_accept)
        if not any(drafted):
            proposal = None
        middle = perf_counter()
        next_commit = self.verifier(commit, proposal, sampling, limits)
        return RoundResult.single(
            next_commit, drafted, draft_seconds=middle - begin, verify_seconds=perf_counter() - middle
        )


class FusedRound(RoundBase):
    """Draft and verify in one graph: one call a round, and only ids and counts come back.

    ``alone``: where no slot can accept anything, the verifier runs without the drafter's step. Not so where features
    stay on the device: the verifier's own graph would bring them to the host.
    """

    def __init__(self, drafter: TraceableDrafter, verifier: FusedVerifier, *, alone: bool = True) -> None:
        super().__init__(drafter, verifier)
        self.drafter, self.verifier, self._alone = drafter, verifier, alone

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round, or several consecutive ones."""
        begin = perf_counter()
        max_accept = limits.max_accept.tolist()
        too_long = self.drafter.max_positions is not None and limits.max_rows > self.drafter.max_positions
        if not any(max_accept) and (self._alone or too_long):
            self.drafter.update(commit)
            next_commit = self.verifier(commit, None, sampling, limits)
            return RoundResult.single(next_commit, [0] * len(max_accept), verify_seconds=perf_counter() - begin)
        self.drafter.catch_up()
        middle = perf_counter()
        rounds = self.verifier.fused(
            self.drafter, commit, sampling=sampling, limits=limits, seconds=MULTI_ROUND_BUDGET_S
        )
        return RoundResult(rounds.commit, rounds.reports, middle - begin, perf_counter() - middle)


class MultiTokenRound:
    """Nothing is drafted: several plain steps in one graph."""

    def __init__(self, target: AutoregressiveTarget) -> None:
        self._target = target

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt."""
        return self._target.prefill(slot, prompt, sampling)

    def finish_request(self, slot: int) -> None:
        """A request has left its slot."""
        self._target.finish_request(slot)

    @property
    def movable(self) -> bool:
        """See `paceline.core.protocols.MovesRequests`."""
        return movable(self._target)

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """See `paceline.core.protocols.MovesRequests`."""
        move_request([self._target], slot, to, rows=rows)

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round."""
        begin = perf_counter()
        next_commit = self._target(commit, sampling, limits)
        drafted = [0] * len(next_commit.count)
        return RoundResult.single(next_commit, drafted, verify_seconds=perf_counter() - begin)


class UndraftedRound(MultiTokenRound):
    """The same with a drafter that proposes nothing meanwhile: it sees every commit, so that it can go on later."""

    def __init__(self, drafter: Drafter, target: AutoregressiveTarget) -> None:
        super().__init__(target)
        self._drafter = drafter

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round."""
        self._drafter.update(commit)
        return super().__call__(commit, sampling, limits)


def drafted_depths(proposal: Proposal, max_accept: list[int]) -> list[int]:
    """How deep a proposal goes in every slot, without a gap and within the limits."""
    parents = proposal.parents
    static = None if parents is None else parents if isinstance(parents, tuple) else parents.tolist()
    depths = []
    for slot, (row, limit) in enumerate(zip(proposal.tokens.tolist(), max_accept, strict=True)):
        own = tree.chain(len(row)) if static is None else static if isinstance(static, tuple) else static[slot]
        depth_of: list[int] = []  # of every node; 0 = cut off
        for token, parent in zip(row, own, strict=True):
            above = 0 if parent == tree.ROOT else depth_of[parent]
            cut = token < 0 or above >= limit or (parent != tree.ROOT and not above)
            depth_of.append(0 if cut else above + 1)
        depths.append(max(depth_of, default=0))
    return depths


class CountsPredicted(Drafter, Protocol):
    """A drafter that says how many tokens of its last proposal are from the prediction of each slot."""

    predicted: list[int]


class ScoresTokens(Verifier, Protocol):
    """A verifier that can say what it thinks of the tokens it commits."""

    def take_scores(self) -> list[list[TokenScore]]:
        """Scores of the tokens of the last call, of every slot whose request asks for them. Then they are forgotten."""


class RowRound(TwoGraphRound):
    """Draft, then verify, in rounds with rows that bring something of their own; reports count their predictions.

    ``scorer``: the verifier, if it has scores for the reports.
    """

    def __init__(self, drafter: CountsPredicted, verifier: Verifier, *, scorer: ScoresTokens | None = None) -> None:
        super().__init__(drafter, verifier)
        self._counter, self._scorer = drafter, scorer

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round."""
        self._counter.predicted = [0] * len(commit.count)
        result = super().__call__(commit, sampling, limits)
        scores = None if self._scorer is None else self._scorer.take_scores()
        reports = [replace(one, predicted=self._counter.predicted, scores=scores) for one in result.reports]
        return replace(result, reports=reports)


class MixedRound:
    """A `paceline.core.protocols.Round` that is one of three, by the requests in ``slots``: chosen when one of them
    comes or goes.

    A row may have to be decided on the host, or bring a prediction to draft from. A round in which no row does goes
    through the graphs of a generator without such requests, untouched; any other goes through two graphs. All have the
    same decoders and the same drafter, so that they follow each other at will, and no row's tokens depend on its
    neighbours.

    fast       the round for requests that ask for nothing of the kind
    predicted  makes the round for some with a prediction; None = none has one
    on_host    makes the round for some that are decided on the host
    width      W of the commits of all of them
    """

    def __init__(
        self,
        fast: Round,
        slots: Sequence[Slot | None],
        *,
        predicted: Callable[[], Round] | None,
        on_host: Callable[[], Round],
        width: int,
    ) -> None:
        self.fast, self._slots, self._width = fast, slots, width
        self._make_predicted, self._make_on_host = predicted, on_host
        self._predicted: Round | None = None
        self._on_host: Round | None = None
        self._started: dict[int, Round] = {}
        self._chosen = self._last = fast

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt, as its request needs it."""
        started = self._started[slot] = self._for([self._slots[slot]])
        self._chosen = self._for(self._slots)
        return started.start(slot, prompt, sampling)

    def finish_request(self, slot: int) -> None:
        """A request has left its slot."""
        self._chosen = self._for(self._slots)
        self._started.pop(slot, self.fast).finish_request(slot)

    @property
    def movable(self) -> bool:
        """See `paceline.core.protocols.MovesRequests`; the other rounds have the same decoders and drafter."""
        return movable(self.fast)

    def move_request(self, slot: int, to: int, rows: int) -> None:
        """See `paceline.core.protocols.MovesRequests`."""
        started = self._started[to] = self._started.pop(slot, self.fast)
        move_request([started], slot, to, rows=rows)

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round, or several consecutive ones."""
        chosen = self._chosen
        if chosen is not self._last or chosen is not self.fast:
            commit = _padded(commit, self._width)
        self._last = chosen
        return chosen(commit, sampling, limits)

    def predicted(self) -> Round | None:
        """The round for requests that bring a prediction, where they may."""
        if self._predicted is None and self._make_predicted is not None:
            self._predicted = self._make_predicted()
        return self._predicted

    def on_host(self) -> Round:
        """The round for requests that are decided on the host."""
        self._on_host = self._on_host or self._make_on_host()
        return self._on_host

    def _for(self, texts: Sequence[Slot | None]) -> Round:
        """The fastest round that these requests can take part in."""
        requests = [text.request for text in texts if text is not None]
        if any(request.on_host for request in requests):
            return self.on_host()
        if any(request.prediction for request in requests):
            predicted = self.predicted()
            assert predicted is not None, "refused before"
            return predicted
        return self.fast


def _padded(commit: Commit, width: int) -> Commit:
    """The commit with room for ``width`` tokens, and its features on the host, where no other round overwrites them."""
    missing = width - commit.tokens.shape[1]
    assert missing >= 0, "no round commits more than the widest"
    states = commit.states
    if not missing and states is commit.features:
        return commit
    if states is not None:
        states = nn.functional.pad(states, (0, 0, 0, missing))
    tokens = nn.functional.pad(commit.tokens, (0, missing), value=PAD)
    return Commit(tokens, commit.count, commit.first_row, states)
