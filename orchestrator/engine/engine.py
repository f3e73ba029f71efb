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

from paceline.core.protocols import Reading, Round, finish
from paceline.core.sampling import sampling_tensors
from paceline.core.types import PrefillResult
from paceline.engine.batch import Batch, RoundShape, Slot
from paceline.engine.request import Request
from paceline.outputs import RequestOutput, Statistics


class RequestQueue(Protocol):
    """Waiting requests. Asked between rounds, in the thread that runs them."""

    @property
    def paced(self) -> bool:
        """Whether a caller waits for every token, and may abort. Then one chunk is prefilled between two rounds."""

    def pop(self) -> Request | None:
        """The next request that waits for a slot, or None. Its index is like no other's in this run."""

    def take_aborted(self) -> Collection[int]:
        """Return the indices of the requests that were aborted since the last call; only of paced queues."""


class ListQueue:
    """A queue of requests that are all known from the beginning."""

    paced = False

    def __init__(self, requests: Sequence[Request]) -> None:
        self._waiting = deque(requests)

    def pop(self) -> Request | None:
        """Return the next request in order."""
        return self._waiting.popleft() if self._waiting else None

    def take_aborted(self) -> Collection[int]:
        """Return no index: requests cannot be aborted."""
        return ()


class KeptPrompts(Protocol):
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
    rounds: Round
    shape: RoundShape
    kept: KeptPrompts | None = None

    def run(self, queue: RequestQueue, statistics: Statistics) -> Generator[list[RequestOutput], None, None]:
        """Run until the queue is empty and every request has finished. A step has the outputs of prefills, or of one
        call of the rounds, for all requests; at most one output per request and round.

        A step may be empty, after a chunk of a prompt. The queue is polled between any two steps. If it is ``paced``,
        one chunk of one prompt is prefilled between two rounds, so that a request in a slot never waits longer than a
        chunk and a round; otherwise all free slots are filled first.

        ``statistics`` are up to date at every step. The consumer's time, between two steps, is not counted.
        """
        rounds, batch = self.rounds, Batch(self.slots, self.shape, statistics)
        if self.kept is not None:
            batch.keep_rows(self.kept.rows)
        # With prefix caching no request moves: its new slot would lose the prompt that is kept there.
        moves = len(self.shape.batch_buckets) > 1 and self.kept is None and rounds.movable
        prompts, resumed = _Prompts(queue, batch, rounds, kept=self.kept), perf_counter()
        try:
            while True:
                if queue.paced and (aborted := queue.take_aborted()):
                    prompts.abort(aborted)
                read = len(batch.active) < len(self.slots) and prompts.read()
                if read:
                    statistics.prefill_seconds += prompts.seconds
                    statistics.host_seconds += max(0.0, perf_counter() - resumed - prompts.seconds)
                    yield prompts.outputs
                    resumed = perf_counter()
                elif not batch.active:
                    break
                while moves and (move := batch.next_move()) is not None:
                    slot, to, length = move
                    rounds.move_request(slot, to, length)
                    batch.move(slot, to)
                if batch.active:
                    result = rounds(batch.commit, batch.sampling, batch.limits(single=read and queue.paced))
                    outputs = batch.apply(result)
                    if batch.freed:
                        _finish_requests(rounds, batch)
                    in_rounds = result.draft_seconds + result.verify_seconds
                    statistics.host_seconds += max(0.0, perf_counter() - resumed - in_rounds)
                    yield outputs
                    resumed = perf_counter()
        finally:
            batch.clear()
            _finish_requests(rounds, batch)


class _Prompts:
    """Prefills the prompts of the requests that take the free slots of a batch.

    outputs  outputs of the last call of `read`
    seconds  prefill time in it
    """

    def __init__(self, queue: RequestQueue, batch: Batch, rounds: Round, *, kept: KeptPrompts | None) -> None:
        self._queue, self._batch, self._rounds, self._kept = queue, batch, rounds, kept
        self._slot = -1
        self._reading: Reading | None = None  # of the prompt in prefill, into that slot
        self.outputs: list[RequestOutput] = []
        self.seconds = 0.0

    def read(self) -> bool:
        """Prefill a chunk of one prompt if the queue is paced, otherwise prompts for all free slots. -> whether there
        was any
        """
        batch, paced = self._batch, self._queue.paced
        self.outputs, self.seconds, read = [], 0.0, False
        for _ in range(len(batch.slots)):  # no more: if sequences finish at once there is always a free slot
            if self._reading is None and (len(batch.active) == len(batch.slots) or not self._seat()):
                break
            read = True
            first = self._read_on(whole=not paced)
            if first is not None:
                cached = None if self._kept is None else self._kept.shared(self._slot)
                self.outputs.append(batch.join(self._slot, self._sampling, first, cached=cached))
                self._reading = None
                if batch.freed:  # the sequence finished with its first token
                    _finish_requests(self._rounds, batch)
            if paced:
                break
        return read

    def abort(self, indices: Collection[int]) -> None:
        """Free the slots of these requests, also that of the one whose prompt is being read."""
        self._batch.abort(indices)
        if self._reading is not None and self._batch.slots[self._slot] is None:
            self._reading = None
        _finish_requests(self._rounds, self._batch)

    def _seat(self) -> bool:
        """Give a free slot to the next request. -> whether one waits"""
        request = self._queue.pop()
        if request is None:
            return False
        free = [slot for slot, seated in enumerate(self._batch.slots) if seated is None]
        self._slot = free[0] if self._kept is None else self._kept.choose(request.prompt, free)
        self._batch.seat(self._slot, request)  # before the round is selected by the needs of the request
        self._sampling = sampling_tensors([request.sampling])
        self._reading = self._rounds.start(self._slot, request.prompt, self._sampling)
        return True

    def _read_on(self, *, whole: bool) -> PrefillResult | None:
        """Read the next chunk of the prompt, or all that is left. None: there is more to read."""
        assert self._reading is not None
        begin = perf_counter()
        try:
            if whole:
                return finish(self._reading)
            next(self._reading)
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]  # a generator of that type returns it
        finally:
            self.seconds += perf_counter() - begin
        return None


def _finish_requests(rounds: Round, batch: Batch) -> None:
    """Tell the rounds which requests have left their slots."""
    while batch.freed:
        rounds.finish_request(batch.freed.pop(0))
