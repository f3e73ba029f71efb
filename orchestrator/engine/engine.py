"""The engine: requests in, outputs out. Assigns requests to free slots, runs rounds, returns the committed tokens.

It is built once for a generator; the options of a request are properties of its row. It does not depend on a model, a
drafter or a backend.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from paceline.core.types import PrefillResult
from paceline.engine.batch import Batch, RoundShape, Slot
from paceline.engine.request import Request
from paceline.engine.rounds import Rounds
from paceline.outputs import RequestOutput, Statistics

PASS_TOKENS = 16
"""Tokens that a shorter prompt counts for: it reads all weights."""


class RequestQueue(Protocol):
    """Waiting requests. Asked between rounds, in the thread that runs them."""

    @property
    def online(self) -> bool:
        """Whether a caller waits for every token, and may abort: at most a chunk is prefilled between two rounds."""

    def pop(self, longest: int | None = None) -> Request | None:
        """The next request that waits for a slot, or None, also if its prompt is longer than ``longest`` tokens.

        Its index is like no other's in this run.
        """

    def take_aborted(self) -> Collection[int]:
        """Return the indices of the requests that were aborted since the last call; only of online queues."""


class ListQueue:
    """A queue of requests that are all known from the beginning."""

    online = False

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting = deque(requests)

    def pop(self, longest: int | None = None) -> Request | None:
        """Return the next request in order, whatever its length: no caller waits between rounds."""
        return self._waiting.popleft() if self._waiting else None

    def take_aborted(self) -> Collection[int]:
        return ()


class CachedPrefixes(Protocol):
    """Prompts that stay in their slots, for requests with a shared prefix (prefix caching)."""

    def choose(self, prompt: Sequence[int], free: Sequence[int]) -> int:
        """Return the best free slot for a prompt."""

    def rows(self, slot: int) -> int:
        """Return how many rows of a free slot must stay unchanged."""

    def shared(self, slot: int) -> int:
        """Return how many prompt tokens of the request in a slot came from the prefix cache."""


@dataclass(slots=True)
class Engine:
    """Serves requests, one run at a time.

    slots   the request of every slot, or None, during a run; the rounds share the list
    rounds  runner of their rounds; ``shape``: its limits for a batch
    kept    prompts for prefix caching
    """

    slots: list[Slot | None]
    rounds: Rounds
    shape: RoundShape
    kept: CachedPrefixes | None = None

    def run(self, queue: RequestQueue, statistics: Statistics) -> Generator[list[RequestOutput], None, None]:
        """Run until the queue is empty and every request has finished. A step has the outputs of prefills, or of one
        call of the rounds, for all requests; at most one output per request and round.

        A step may be empty, after a chunk of a prompt. The queue is polled between any two steps. If it is ``online``,
        one chunk of one prompt is prefilled between two rounds, or short prompts of a chunk together, so that a request
        in a slot never waits longer than a chunk and a round; otherwise all free slots are filled first.

        ``statistics`` are up to date at every step. The consumer's time, between two steps, is not counted.
        """
        rounds, batch = self.rounds, Batch(self.slots, self.shape, statistics)
        if self.kept is not None:
            batch.keep_rows(self.kept.rows)
        # With prefix caching no request moves: its new slot would lose the prompt that is kept there.
        moves = len(self.shape.batch_buckets) > 1 and self.kept is None and rounds.movable
        resumed = perf_counter()
        try:
            while True:
                if queue.online and (aborted := queue.take_aborted()):
                    batch.abort(aborted)
                    self._finish_requests(batch)
                before, some_free = statistics.prefill_seconds, len(batch.active) < len(self.slots)
                read = self._read_prompts(queue, batch, statistics) if some_free else None
                if read is not None:
                    in_prefill = statistics.prefill_seconds - before
                    statistics.host_seconds += max(0.0, perf_counter() - resumed - in_prefill)
                    yield read
                    resumed = perf_counter()
                elif not batch.active:
                    break
                while moves and (move := batch.next_move()) is not None:
                    slot, to, length = move
                    rounds.move_request(slot, to, length)
                    batch.move(slot, to)
                if batch.active:
                    limits = batch.limits(single=read is not None and queue.online)
                    result = rounds(batch.commit, batch.sampling, limits)
                    outputs = batch.apply(result)
                    if batch.freed:
                        self._finish_requests(batch)
                    in_rounds = result.draft_seconds + result.verify_seconds
                    statistics.host_seconds += max(0.0, perf_counter() - resumed - in_rounds)
                    yield outputs
                    resumed = perf_counter()
        finally:
            batch.clear()
            self._finish_requests(batch)

    def _read_prompts(self, queue: RequestQueue, batch: Batch, statistics: Statistics) -> list[RequestOutput] | None:
        """Prefill a chunk of one prompt, or of several, if the queue is online; otherwise prompts for all free slots.

        -> outputs of the prompts that were read to their end; None: there is no prompt
        """
        outputs: list[RequestOutput] | None = None
        room = self.shape.chunk  # tokens that may still be read before the next round
        for _ in batch.slots:  # no more: if sequences finish at once there is always a free slot
            if batch.reading is None:
                if outputs and queue.online and room < PASS_TOKENS:
                    break
                longest = room if outputs and queue.online else None
                request = queue.pop(longest) if len(batch.active) < len(batch.slots) else None
                if request is None:
                    break
                free = [slot for slot, seated in enumerate(batch.slots) if seated is None]
                slot = free[0] if self.kept is None else self.kept.choose(request.prompt, free)
                seated = batch.seat(slot, request)  # before the round is selected by the needs of the request
                batch.reading = slot, self.rounds.start(slot, request.prompt, seated.sampling)
            (slot, reading), begin, outputs = batch.reading, perf_counter(), outputs or []
            first: PrefillResult | None = None
            try:
                next(reading)
                while not queue.online:
                    next(reading)
            except StopIteration as done:
                first = done.value
            statistics.prefill_seconds += perf_counter() - begin
            if first is not None:
                cached = None if self.kept is None else self.kept.shared(slot)
                room -= max(PASS_TOKENS, int(batch.commit.first_row[slot]))  # the rows of its prompt
                outputs.append(batch.join(slot, first, cached=cached))
                self._finish_requests(batch)  # the sequence may have finished with its first token
            if queue.online and first is None:
                break
        return outputs

    def _finish_requests(self, batch: Batch) -> None:
        while batch.freed:
            self.rounds.finish_request(batch.freed.pop(0))
