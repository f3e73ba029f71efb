"""The loop: requests in, events out. Seats requests in free slots, runs rounds, hands out what was committed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from paceline.batch import Batch
from paceline.core.types import Bounds, Commit, Reading, SamplingBatch
from paceline.request import Request
from paceline.result import Event, Statistics


class TimedRound(Protocol):
    """A `paceline.core.protocols.Round` that says what it did."""

    rung: int | None
    drafted: list[int]

    @property
    def prefill_seconds(self) -> float: ...

    @property
    def draft_seconds(self) -> float: ...

    @property
    def verify_seconds(self) -> float: ...

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingBatch) -> Reading: ...

    def release(self, slot: int) -> None: ...

    def __call__(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Commit: ...


class Scored(Protocol):
    """Where the log-probabilities of the last tokens of every slot are found."""

    logprobs: list[list[float]]


@dataclass(frozen=True, slots=True)
class Engine:
    """A round and what the loop must know of it.

    depth    most proposed tokens a round can accept
    width    most tokens a round commits
    reach    positions the drafter follows; None = all
    buckets  borders of the target's cache lengths, ascending; a window crosses none
    scores   log-probabilities, if they are asked for
    """

    round: TimedRound
    slots: int
    depth: int
    width: int
    reach: int | None
    buckets: tuple[int, ...]
    scores: Scored | None = None


def run(engine: Engine, requests: Sequence[Request], statistics: Statistics) -> Iterator[Event]:
    """Serve the requests in order; yields at most one event for a request and round."""
    begin = perf_counter()
    waiting = deque(requests)
    batch = Batch(engine.slots, engine.width, statistics)
    away = 0.0  # time the consumer of the events spent
    held: set[int] = set()  # slots that the round knows a request in
    try:
        while waiting or batch.active:
            events = []
            while waiting and (slot := batch.free) is not None:
                request = waiting.popleft()
                held.add(slot)
                first = engine.round.start(slot, request.prompt, batch.one(request))
                scores = list(engine.scores.logprobs[slot]) if engine.scores else None
                events.append(batch.join(slot, request, first, logprobs=scores))
                _release(engine.round, held, batch.active)
            if batch.active:
                bounds = batch.bounds(engine.depth, engine.reach, _border(engine.buckets, batch.longest))
                commit = engine.round(batch.commit, batch.sampling, bounds)
                if engine.round.rung is not None:
                    statistics.rungs.append(engine.round.rung)
                events += batch.apply(commit, engine.round.drafted, engine.scores.logprobs if engine.scores else None)
                _release(engine.round, held, batch.active)
            for event in events:
                left = perf_counter()
                yield event
                away += perf_counter() - left
    finally:
        _release(engine.round, held, [])
    _book(engine.round, statistics, perf_counter() - begin - away)


def _release(known: TimedRound, held: set[int], active: Sequence[int]) -> None:
    """Tell the round which requests have left their slots."""
    for slot in sorted(held.difference(active)):
        held.discard(slot)
        known.release(slot)


def _border(buckets: tuple[int, ...], rows: int) -> int:
    return next((bucket for bucket in buckets if bucket >= rows), buckets[-1])


def _book(done: TimedRound, statistics: Statistics, wall: float) -> None:
    statistics.prefill_seconds += done.prefill_seconds
    statistics.draft_seconds += done.draft_seconds
    statistics.verify_seconds += done.verify_seconds
    busy = done.prefill_seconds + done.draft_seconds + done.verify_seconds
    statistics.host_seconds += max(0.0, wall - busy)
