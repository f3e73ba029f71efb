"""`SharedEngine`: calls of many callers share the rounds of one generator; `AsyncEngine`: its interface for an event
loop.

Requests take free slots between rounds, in turns, and release them when they are finished or aborted.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING

import torch

from paceline.core.drafter_statistics import DrafterCounts
from paceline.core.errors import DeadlineError, EventLoopError, PacelineError, QueueFullError, RankError
from paceline.core.sampling import Sampling
from paceline.engine.engine import ListQueue
from paceline.engine.request import Request
from paceline.generator import SpeculativeGenerator
from paceline.outputs import RequestOutput, Statistics
from paceline.workers.calls import Call, CallState, CallUpdate, RequestTiming, Sink

if TYPE_CHECKING:
    from paceline.eagle.learning import LearningProgress

log = logging.getLogger("paceline")


_RECENT = 1 << 16  # timings kept until they are taken; they may never be


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Snapshot of the engine's metrics.

    running, waiting  requests in slots, and requests without one
    engine            counts and seconds of the engine, over all calls since it was built
    draft_lengths     number of rounds for each draft length, if the length is chosen per round
    drafters          counts of each drafter, by name, if several are chosen from
    misfit            why the drafter does not fit the target; "" = it does, or is not judged yet
    heads, learning   with ``learn``: heads taken over from the process that learns, and its progress
    """

    running: int
    waiting: int
    engine: Statistics
    draft_lengths: Mapping[int, int]
    drafters: Mapping[str, DrafterCounts]
    misfit: str = ""
    heads: int = 0
    learning: LearningProgress | None = None


class _Totals:
    """Sums over ended runs of the engine."""

    def __init__(self) -> None:
        self._sum, self._lengths = Statistics(), Counter[int]()
        self._added: Statistics | None = None  # the last run, which is part of the sums

    def plus(self, run: Statistics) -> tuple[Statistics, Counter[int]]:
        """Return counts and draft lengths, with those of the engine's last run, which may be under way."""
        if run is self._added:
            return self._sum, self._lengths
        return self._sum.plus(run), self._lengths + Counter(run.draft_lengths)

    def add(self, run: Statistics) -> None:
        self._sum, self._lengths = self.plus(run)
        self._added = run


class SharedEngine:
    """A `paceline.engine.engine.RequestQueue` of a generator that runs in a separate thread.

    ``max_waiting``: requests that may wait for a slot; None: no limit.

    heartbeat  grows with every prompt, chunk of a prompt and call of the rounds; it is constant only without requests,
               or if something hangs
    failure    why the last round failed, unless a request caused it; None again after a successful round
    """

    online = True

    def __init__(self, generator: SpeculativeGenerator, *, max_waiting: int | None = None) -> None:
        self.generator, self._max_waiting = generator, max_waiting
        self._changed = threading.Condition()
        self._calls: dict[str, CallState] = {}  # by ticket, in order of arrival
        self._turns = FairQueue()
        self._running: dict[int, CallState] = {}  # by the number of a request in a slot
        self._aborted: set[int] = set()  # requests in slots that the engine is to drop
        self._numbers = count()
        self._totals, self._holding = _Totals(), OutputCoalescer()
        self._timings = deque[RequestTiming](maxlen=_RECENT)
        self.heartbeat = 0
        self.failure: Exception | None = None
        threading.Thread(
            target=self._work, args=(torch.get_num_threads(),), daemon=True, name="paceline-engine"
        ).start()

    # ---- callers, from any thread

    def figures(self) -> EngineFigures:
        with self._changed:
            waiting = sum(len(state.waiting) for state in self._calls.values())
            made = self.generator
            total, lengths = self._totals.plus(made.statistics)
            misfit = "" if made.draft_fit is None else made.draft_fit.warning
            running = len(self._running)
            learner, counts = made.learner, made.choice_counts
            heads, learning = (0, None) if learner is None else (learner.heads, learner.progress)
            lengths_sorted = dict(sorted(lengths.items()))
            return EngineFigures(running, waiting, total, lengths_sorted, counts, misfit, heads, learning)

    def take_timings(self) -> Sequence[RequestTiming]:
        """Return the timings of the requests that finished since the last call."""
        with self._changed:
            taken = tuple(self._timings)
            self._timings.clear()
            return taken

    def submit(self, call: Call, sink: Sink) -> None:
        """Add a call; ``sink`` gets its updates, the last of which says that it ended. Raises QueueFullError if too
        many requests wait.
        """
        with self._changed:
            waiting, most = sum(len(state.waiting) for state in self._calls.values()), self._max_waiting
            if most is not None and waiting + len(call.requests) > most:
                raise QueueFullError(
                    f"the queue is full: {waiting} requests wait, {most} are allowed (max_waiting), and this call "
                    f"has {len(call.requests)} more; retry later, or send fewer prompts"
                )
            assert call.ticket not in self._calls, "a ticket names one call"
            numbers = [next(self._numbers) for _ in call.requests]
            state = self._calls[call.ticket] = CallState.of(call, sink, numbers)
            self._turns.add(state)
            self._changed.notify()

    def end(self, ticket: str) -> bool:
        """End the call if it is under way, and return whether it was; its slots are free after the current step."""
        with self._changed:
            state = self._calls.get(ticket)
            if state is not None:
                self._end(state, None)
            return state is not None

    def leave(self, ticket: str, indices: Collection[int]) -> None:
        """End those of the call's requests at ``indices`` that are in slots; the others continue."""
        with self._changed:
            state = self._calls.get(ticket)
            if state is None:
                return
            for number in state.leave(indices):
                del self._running[number]
                self._aborted.add(number)
            if not state.unfinished:
                self._end(state, None)

    # ---- the request queue, polled by the engine between steps

    def pop(self, longest: int | None = None) -> Request | None:
        with self._changed:
            state = self._turns.first()
            if state is None or (longest is not None and len(state.waiting[0].prompt) > longest):
                return None
            request = state.seat()
            self._turns.took()
            self._running[request.index] = state
            return request

    def take_aborted(self) -> Collection[int]:
        with self._changed:
            self._end_late()
            aborted, self._aborted = self._aborted, set()
            return aborted

    # ---- the thread that runs rounds

    def _work(self, threads: int) -> None:
        torch.set_num_threads(threads)  # each thread has its own setting
        while True:
            with self._changed:
                self._changed.wait_for(self._turns.first)
            try:
                for outputs in self.generator.steps(self):
                    self.heartbeat += 1
                    self.failure = None
                    self._hand_out(outputs)
                self._after_run()
            except Exception as error:  # any error; later calls may succeed
                self._after_run()
                self._fail(error)

    def _hand_out(self, outputs: Sequence[RequestOutput]) -> None:
        """Send the outputs of a step to every sink, or those of several steps if its calls ask for that."""
        with self._changed:
            gained: dict[int, tuple[CallState, list[RequestOutput]]] = {}
            for output in outputs:
                state = self._running.get(output.index)
                if state is None:
                    continue
                gained.setdefault(id(state), (state, []))[1].append(output)
                if output.finish_reason is not None:
                    del self._running[output.index]
            for state, own in gained.values():
                error: Exception | None = None if state.tokenizer is None else state.tokenizer.failed
                error = error or next((one.error for one in own if one.error is not None), None)
                if error is not None:
                    self._end(state, error)
                    continue
                update, finished, urgent = state.update(own)
                self._timings += finished
                if update.ended:
                    del self._calls[state.call.ticket]
                self._holding.add(state, update, urgent=urgent)
            for sink, updates in self._holding.due().items():
                sink(updates)

    def _after_run(self) -> None:
        with self._changed:
            self._totals.add(self.generator.statistics)
            self._aborted.clear()

    def _end(self, state: CallState, error: Exception | None) -> None:
        del self._calls[state.call.ticket]
        self._turns.remove(state)
        self._aborted.update(state.running)
        for number in state.running:
            self._running.pop(number, None)
        self._holding.end(state)
        state.sink([CallUpdate.joined([*state.held, CallUpdate(state.call.ticket, ended=True, error=error)])])

    def _end_late(self) -> None:
        now = monotonic()
        for state in list(self._calls.values()):
            if state.call.deadline is not None and now > state.call.deadline:
                seated = "the request was not finished" if state.running else "no slot was free for it"
                self._end(
                    state,
                    DeadlineError(
                        f"the deadline of this call has passed, and {seated}; raise it, or ask for fewer tokens"
                    ),
                )

    def _fail(self, error: Exception) -> None:
        """End the calls with requests in slots. Waiting calls continue if rounds still work."""
        with self._changed:
            for state in [state for state in self._calls.values() if state.running]:
                self._end(state, error)
            self._aborted.clear()
        log.warning("a round failed: %s: %s", type(error).__name__, error)
        if isinstance(error, PacelineError) and not isinstance(error, RankError):
            return  # caused by a request, such as logits processors that left no token
        try:
            self._probe()
        except Exception as again:
            self.failure = again
            with self._changed:
                for state in list(self._calls.values()):
                    self._end(state, again)
                self._aborted.clear()

    def _probe(self) -> None:
        prompt = (0,)
        request = Request(0, prompt, Sampling(), min(4, self.generator.limits.n_positions))
        for _ in self.generator.steps(ListQueue([request])):
            self.heartbeat += 1


class AsyncEngine:
    """Calls of one event loop to a shared engine. Created and used in that loop only.

    The engine's thread calls `loop.call_soon_threadsafe` once per step, with the updates of all calls of this loop. A
    slow consumer delays no other one: its updates are stored until it takes them.
    """

    def __init__(self, engine: SharedEngine) -> None:
        self.engine, self.loop = engine, asyncio.get_running_loop()
        self.running: dict[str, AsyncCall] = {}  # by ticket

    def begin(self, call: Call) -> AsyncCall:
        """Add a call. To abort it, close the returned object: its slots are free after the step that is running then.

        Raises:
            EventLoopError: another event loop is running, where updates would never arrive.
            QueueFullError: too many requests wait.
        """
        if asyncio.get_running_loop() is not self.loop:
            raise EventLoopError(
                "this engine's streams belong to another event loop that still runs; use one loop for all calls, or "
                "create another AsyncEngine (or ModelServer) in this one"
            )
        begun = self.running[call.ticket] = AsyncCall(self, call.ticket)
        try:
            self.engine.submit(call, self._from_engine)
        except BaseException:
            begun.close()
            raise
        return begun

    def _from_engine(self, updates: list[CallUpdate]) -> None:
        with suppress(RuntimeError):  # the loop is closed: no consumer is left
            self.loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: list[CallUpdate]) -> None:
        for update in updates:
            call = self.running.get(update.ticket)
            if call is not None:
                call.updates.append(update)
                call.came.set()


class AsyncCall:
    """Call under way, for one consumer, with the ``updates`` that it has not taken yet."""

    def __init__(self, engine: AsyncEngine, ticket: str) -> None:
        self._engine, self._ticket = engine, ticket
        self.updates: deque[CallUpdate] = deque()
        self.came = asyncio.Event()  # set when there are more
        self._last: CallUpdate | None = None

    async def next(self) -> CallUpdate | None:
        """Return all outputs since the last call as one update, as soon as there are any; None at the end. Raises the
        error that ended the call.
        """
        while self._last is None:
            await self.came.wait()
            self.came.clear()
            taken, self.updates = self.updates, deque()
            update = CallUpdate.joined(taken)
            if update.ended or update.error is not None:
                self._last = update
            if update.outputs:
                return update
        if self._last.error is not None:
            raise self._last.error
        return None

    def close(self) -> None:
        self._engine.running.pop(self._ticket, None)
        self._engine.engine.end(self._ticket)


CROWD = 8
"""Number of calls with updates every ``Call.interval_s``. With more calls in slots the interval grows with their
number, so that the total messages per second stay the same.
"""


class OutputCoalescer:
    """Updates held back to be sent with those of the next rounds: several rounds, one delivery to the event loop. One
    object per engine, used under its lock. ``clock``: seconds.

    A message to a client passes four processes, each of which spends about the same time on it, whatever its size; with
    a fast engine that is longer than a round. There is no timer: the engine's thread checks the clock after every step,
    so an update waits at most its interval, a call of the rounds and a chunk of a prompt.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._states: dict[str, CallState] = {}  # by ticket
        self._urgent: set[str] = set()

    def add(self, state: CallState, update: CallUpdate, *, urgent: bool) -> None:
        """Add an update. ``urgent``: the next `due` returns it with all waiting updates of its call."""
        self._states[update.ticket] = state
        state.held.append(update)
        if urgent or not state.call.interval_s:
            self._urgent.add(update.ticket)

    def due(self) -> dict[Sink, list[CallUpdate]]:
        """Return the updates to deliver now. Once one call has waited for its interval, those of all others are
        included, so that their reader wakes once.
        """
        now = self._clock()
        crowd = max(1.0, len(self._states) / CROWD)
        urgent, self._urgent = self._urgent, set()
        waiting = [state for state in self._states.values() if state.held]
        is_time = any(
            now - state.sent_s >= crowd * state.call.interval_s for state in waiting if state.call.ticket not in urgent
        )
        told: dict[Sink, list[CallUpdate]] = {}
        for state in waiting:
            if is_time or state.call.ticket in urgent:
                update = CallUpdate.joined(state.held)
                state.held, state.sent_s = [], now
                told.setdefault(state.sink, []).append(update)
                if update.ended:
                    del self._states[update.ticket]
        return told

    def end(self, state: CallState) -> None:
        """Remove a call that is over; what waits for it is still in ``state.held``."""
        self._states.pop(state.call.ticket, None)
        self._urgent.discard(state.call.ticket)


class FairQueue:
    """Calls with waiting requests, in the order of their turns. Keys take turns, and so do the calls of a key, one
    request per turn. So neither a call of a thousand prompts nor a key with many calls delays the others.
    """

    def __init__(self) -> None:
        self._keys: deque[str] = deque()
        self._calls: dict[str, deque[CallState]] = {}  # of every key in `_keys`

    def add(self, state: CallState) -> None:
        key = state.call.key
        if key not in self._calls:
            self._calls[key] = deque()
            self._keys.append(key)
        self._calls[key].append(state)

    def first(self) -> CallState | None:
        return self._calls[self._keys[0]][0] if self._keys else None

    def took(self) -> None:
        """End the first call's turn; it moves to the end if more of its requests wait."""
        key = self._keys.popleft()
        calls = self._calls[key]
        state = calls.popleft()
        if state.waiting:
            calls.append(state)
        if calls:
            self._keys.append(key)
        else:
            del self._calls[key]

    def remove(self, state: CallState) -> None:
        calls = self._calls.get(state.call.key)
        if calls is None or state not in calls:
            return
        calls.remove(state)
        if not calls:
            del self._calls[state.call.key]
            self._keys.remove(state.call.key)
