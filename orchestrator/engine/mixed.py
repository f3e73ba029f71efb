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

from paceline.core.protocols import Drafter, Reading
from paceline.core.types import (
    PAD,
    Commit,
    RoundLimits,
    RoundResult,
    SamplingTensors,
    TokenScore,
)
from paceline.engine.batch import Slot
from paceline.engine.engine import HasLogprobs, TimedRound
from paceline.engine.rounds import TwoGraphRound


class CountsPredicted(Drafter, Protocol):
    """A drafter that says how many tokens of its last proposal are from the prediction of each slot."""

    predicted: list[int]


class RowRound(TwoGraphRound):
    """Draft, then verify, in rounds with rows that bring something of their own; reports count their predictions."""

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round."""
        drafter: CountsPredicted = self.drafter  # type: ignore[assignment]  # built with one
        drafter.predicted = [0] * len(commit.count)
        result = super().__call__(commit, sampling, limits)
        return replace(result, reports=[replace(report, predicted=drafter.predicted) for report in result.reports])


class MixedRound:
    """A `paceline.engine.engine.TimedRound` that is one of three, by the requests in ``slots``.

    fast       the round for requests that ask for nothing of the kind
    predicted  makes the round for some with a prediction
    on_host    makes the round for some that are decided on the host, with its verifier
    width      W of the commits of all of them
    """

    def __init__(
        self,
        fast: TimedRound,
        slots: Sequence[Slot | None],
        *,
        predicted: Callable[[], TimedRound],
        on_host: Callable[[], tuple[TimedRound, HasLogprobs]],
        width: int,
    ) -> None:
        self.fast, self._slots, self._width = fast, slots, width
        self._make_predicted, self._make_on_host = predicted, on_host
        self._predicted: TimedRound | None = None
        self._on_host: tuple[TimedRound, HasLogprobs] | None = None
        self._started: dict[int, TimedRound] = {}
        self._last = fast
        self._nothing: list[list[TokenScore]] = [[] for _ in slots]

    @property
    def draft_length(self) -> int | None:
        """Of the last round, where it is chosen."""
        return self._last.draft_length

    @property
    def logprobs(self) -> list[list[TokenScore]]:
        """Scores of the last tokens of every slot whose request asks for them."""
        return self._nothing if self._on_host is None else self._on_host[1].logprobs

    @property
    def prefill_seconds(self) -> float:
        return sum(one.prefill_seconds for one in self._rounds())

    @property
    def draft_seconds(self) -> float:
        return sum(one.draft_seconds for one in self._rounds())

    @property
    def verify_seconds(self) -> float:
        return sum(one.verify_seconds for one in self._rounds())

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> Reading:
        """Read a prompt, as its request needs it."""
        started = self._started[slot] = self._for([self._slots[slot]])
        return started.start(slot, prompt, sampling)

    def finish_request(self, slot: int) -> None:
        """A request has left its slot."""
        self._started.pop(slot, self.fast).finish_request(slot)

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        """One round, or several consecutive ones."""
        chosen = self._for(self._slots)
        if chosen is not self._last or chosen is not self.fast:
            commit = _padded(commit, self._width)
        self._last = chosen
        return chosen(commit, sampling, limits)

    def _for(self, texts: Sequence[Slot | None]) -> TimedRound:
        """The fastest round that these requests can take part in."""
        if any(text is not None and text.request.on_host for text in texts):
            if self._on_host is None:
                self._on_host = self._make_on_host()
            return self._on_host[0]
        if any(text is not None and text.request.prediction for text in texts):
            if self._predicted is None:
                self._predicted = self._make_predicted()
            return self._predicted
        return self.fast

    def _rounds(self) -> list[TimedRound]:
        others = [self._predicted, None if self._on_host is None else self._on_host[0]]
        return [self.fast, *(one for one in others if one is not None)]


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
