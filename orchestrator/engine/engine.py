"""The loop: requests in, events out. Seats requests in free slots, runs rounds, hands out what was committed.

Requests come through a door, which is asked between rows of rounds: for those that come, and those that were given up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from paceline.core.sampling import sampling_tensors
from paceline.core.types import Commit, PrefillResult, RoundLimits, RoundResult, SamplingTensors
from paceline.engine.batch import Batch
from paceline.engine.request import Request
from paceline.outputs import RequestOutput, Statistics


class TimedRound(Protocol):
    """A `paceline.core.protocols.Round` that says where its time went, and the depth it chose, if it chooses."""

    draft_length: int | None

    @property
    def prefill_seconds(self) -> float: ...

    @property
    def draft_seconds(self) -> float: ...

    @property
    def verify_seconds(self) -> float: ...

    def start(self, slot: int, prompt: Sequence[int], sampling: SamplingTensors) -> PrefillResult: ...

    def finish_request(self, slot: int) -> None: ...

    def __call__(self, commit: Commit, sampling: SamplingTensors, bounds: RoundLimits) -> RoundResult: ...


class RequestQueue(Protocol):
    """Where requests come from and go. Asked between rows of rounds, in the thread that runs them."""

    def pop(self) -> Request | None:
        """The next request that waits for a slot; None: nobody waits. Its index is like no other's in this run."""

    def take_aborted(self) -> Collection[int]:
        """Requests, by index, that nobody wants any more since this was last asked."""


class ListQueue:
    """A door for requests that are all there from the beginning."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting = deque(requests)

    def pop(self) -> Request | None:
        """In their order."""
        return self._waiting.popleft() if self._waiting else None

    def take_aborted(self) -> Collection[int]:
        """None of them."""
        return ()


class Scored(Protocol):
    """Where the log-probabilities of the last tokens of every slot are found."""

    logprobs: list[list[float]]


class StopDecider(Protocol):
    """Goes from token to token on the host, and is told by ``ends`` (slot, tokens of this round) where a text ends."""

    ends: Callable[[int, Sequence[int]], bool]


@dataclass(frozen=True, slots=True)
class Engine:
    """A round and what the loop must know of it.

    depth    most proposed tokens a round can accept
    width    most tokens a round commits
    max_positions    positions the drafter follows; None = all
    kv_buckets  borders of the target's cache lengths, ascending; a window crosses none
    scores   log-probabilities, if they are asked for
    stop_decider   what decides on the host, if something does
    """

    round: TimedRound
    slots: int
    depth: int
    width: int
    max_positions: int | None
    kv_buckets: tuple[int, ...]
    scores: Scored | None = None
    stop_decider: StopDecider | None = None


def run(engine: Engine, door: RequestQueue, statistics: Statistics) -> Iterator[RequestOutput]:
    """Serve until nobody waits and no slot is taken; yields at most one event for a request and round."""
    begin = perf_counter()
    batch = Batch(
        engine.slots,
        engine.width,
        statistics,
        depth=engine.depth,
        reach=engine.max_positions,
        buckets=engine.kv_buckets,
    )
    if engine.stop_decider is not None:
        engine.stop_decider.ends = batch.ends
    away = 0.0  # time the consumer of the events spent
    held: set[int] = set()  # slots that the round knows a request in
    try:
        while True:
            if gone := door.take_aborted():
                batch.drop(gone)
                _release(engine.round, held, batch.active)
            events = []
            for _ in range(engine.slots):  # no more: where texts end at once there is always room, and others wait
                if (slot := batch.free) is None or (request := door.pop()) is None:
                    break
                held.add(slot)
                row = sampling_tensors([request.sampling])
                first = engine.round.start(slot, request.prompt, row)
                scores = list(engine.scores.logprobs[slot]) if engine.scores else None
                events.append(batch.join(slot, request, row, first=first, logprobs=scores))
                _release(engine.round, held, batch.active)
            if not events and not batch.active:
                break
            if batch.active:
                done = engine.round(batch.commit, batch.sampling, batch.bounds())
                if engine.round.draft_length is not None:
                    statistics.draft_lengths += [engine.round.draft_length] * len(done.reports)
                events += batch.apply(done, engine.scores.logprobs if engine.scores else None)
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
    if len(held) == len(active):  # nobody is seated without being held
        return
    for slot in sorted(held.difference(active)):
        held.discard(slot)
        known.finish_request(slot)


def _book(done: TimedRound, statistics: Statistics, wall: float) -> None:
    statistics.prefill_seconds += done.prefill_seconds
    statistics.draft_seconds += done.draft_seconds
    statistics.verify_seconds += done.verify_seconds
    busy = done.prefill_seconds + done.draft_seconds + done.verify_seconds
    statistics.host_seconds += max(0.0, wall - busy)
