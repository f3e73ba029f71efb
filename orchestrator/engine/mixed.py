"""Rounds for requests of different kinds: each round runs as fast as the rows in it let it.

A row may have to be decided on the host, or bring a prediction to draft from. A round in which no row does goes through
the graphs of a generator without such requests, untouched; any other goes through two graphs. All have the same
decoders and the same drafter, so that they follow each other at will, and no row's tokens depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from torch import nn

from paceline.core.protocols import Drafter, Reading, Round, Verifier, movable, move_request
from paceline.core.types import PAD, Commit, RoundLimits, RoundResult, SamplingTensors, TokenScore
from paceline.engine.batch import Slot
from paceline.engine.rounds import TwoGraphRound


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
