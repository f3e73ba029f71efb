"""The asynchronous face of a shared engine, its turns, limits and failures; rounds continue when a test lets them. And
updates that wait: what goes at once, and how long the others wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.core.errors import DeadlineError, QueueFullError
from paceline.engine.request import Request, SamplingParams
from paceline.outputs import RequestOutput
from paceline.workers.calls import Call, CallState, CallUpdate
from paceline.workers.shared_engine import CROWD, AsyncEngine, FairQueue, OutputCoalescer
from tests.fakes import TableDecoder
from tests.workers.heard import updates_of
from tests.workers.test_shared_engine import PROMPTS, TARGET, shared, wanted

Test = Callable[["Served"], Coroutine[Any, Any, None]]


class Served:
    """A shared engine whose rounds continue when a test lets them, in the event loop that runs."""

    def __init__(self, slots: int, max_waiting: int | None) -> None:
        self.shared, self.gate, self.target = shared(slots)
        self.shared._max_waiting = max_waiting
        self.engine = AsyncEngine(self.shared)

    def call(self, ticket: str, *prompts: Sequence[int], key: str = "", **asked: object) -> Call:
        params = SamplingParams.merge(None, asked)
        return Call(
            ticket, Request.batch([list(one) for one in prompts], params, self.target.generator.limits), key=key
        )

    async def listen(self, asked: Call) -> list[CallUpdate]:
        return [update async for update in updates_of(self.engine, asked)]

    def start(self, ticket: str, prompt: Sequence[int], count: int) -> asyncio.Task[list[CallUpdate]]:
        """Begin a caller that wants ``count`` tokens."""
        return asyncio.create_task(self.listen(self.call(ticket, prompt, max_new_tokens=count)))

    async def in_round(self) -> None:
        """Wait until a prompt is read, and a round waits at the gate."""
        await until(lambda: self.shared.heartbeat)

    async def callers(self, count: int) -> None:
        await until(lambda: len(self.shared._calls) == count)


def served(slots: int, max_waiting: int | None = None) -> Callable[[Test], Callable[[], None]]:
    """Run a test in an event loop, over an engine with this number of slots."""

    def over(test: Test) -> Callable[[], None]:
        async def work() -> None:
            await asyncio.wait_for(test(Served(slots, max_waiting)), 60)

        return lambda: asyncio.run(work())

    return over


def text(updates: Sequence[CallUpdate], index: int = 0) -> list[int]:
    return [token for update in updates for one in update.outputs if one.index == index for token in one.tokens]


async def until(true: Any) -> None:
    while not true():
        await asyncio.sleep(0.002)


@served(4)
async def test_a_step_is_delivered_once_for_all_streams(made: Served) -> None:
    handed, deliver = list[list[str]](), made.engine._deliver
    made.engine._deliver = lambda updates: (handed.append([one.ticket for one in updates]), deliver(updates))[1]  # type: ignore[method-assign, assignment, func-returns-value]
    streams = [made.start(str(i), PROMPTS[i], 20 + i) for i in range(4)]
    await made.callers(4)
    made.gate.let(1000)
    for number, updates in enumerate(await asyncio.gather(*streams)):
        assert text(updates) == wanted(PROMPTS[number], max_new_tokens=20 + number)
        assert updates[-1].ended and not any(one.ended for one in updates[:-1])
    assert ["0", "1", "2", "3"] in [sorted(tickets) for tickets in handed]
    assert len(handed) <= made.shared.heartbeat
    figures, timings = made.shared.figures(), made.shared.take_timings()
    assert (figures.running, figures.waiting, len(timings)) == (0, 0, 4)
    assert all(min(one.queue, one.prefill, one.decode) >= 0 for one in timings)
    assert not made.shared.take_timings() and not made.shared.end("not here")
    assert figures.engine.new_tokens == sum(20 + i for i in range(4))
    assert figures.engine.num_accepted_tokens == sum(figures.engine.num_accepted_tokens_per_pos) > 0


@served(2)
async def test_a_slow_reader_gets_several_steps_as_one_update(made: Served) -> None:
    """Work for every update, such as an item through Ray, is done once for all waiting steps."""
    quick = made.start("quick", PROMPTS[0], 40)
    stream = updates_of(made.engine, made.call("slow", PROMPTS[0], max_new_tokens=40))
    first = asyncio.ensure_future(anext(stream))
    await made.callers(2)
    made.gate.let(1000)
    slow = [await first]
    everything = await quick
    await made.callers(0)
    slow += [update async for update in stream]
    assert text(slow) == text(everything) == wanted(PROMPTS[0], max_new_tokens=40)
    assert len(slow) <= 3 < len(everything) and slow[-1].ended


@served(1)
async def test_a_cancelled_stream_frees_its_slot_after_the_step_that_runs(made: Served) -> None:
    first = made.start("first", PROMPTS[0], 200)
    await made.in_round()
    second = made.start("second", PROMPTS[1], 3)
    await made.callers(2)
    first.cancel()
    await until(lambda: "first" not in made.shared._calls)
    made.gate.let(1)
    await until(lambda: made.shared.figures().running == 1)  # after that one round
    made.gate.let(100)
    assert text(await second) == wanted(PROMPTS[1], max_new_tokens=3)


@served(2)
async def test_a_finished_answer_ends_with_its_last_token(made: Served) -> None:
    """An abort used to wait for the next output of any request, which may be another's long prompt away."""
    other = made.start("other", PROMPTS[0], 60)
    await made.in_round()
    short = made.start("short", PROMPTS[1], 2)
    await made.callers(2)
    made.gate.let(2)  # and no more: rounds stand still
    assert text(await short) == wanted(PROMPTS[1], max_new_tokens=2)
    assert not other.done()
    made.gate.let(1000)
    assert text(await other) == wanted(PROMPTS[0], max_new_tokens=60)


@served(1, max_waiting=2)
async def test_a_full_queue_and_a_deadline_raise_named_errors(made: Served) -> None:
    first = made.start("first", PROMPTS[0], 9)
    await made.in_round()
    late = replace(made.call("late", PROMPTS[2], max_new_tokens=9), deadline=time.monotonic() + 0.01)
    waiting = asyncio.create_task(made.listen(late))
    await until(lambda: made.shared.figures().waiting == 1)
    with pytest.raises(QueueFullError, match="1 requests wait, 2 are allowed"):
        await made.listen(made.call("more", PROMPTS[1], PROMPTS[1], max_new_tokens=9))
    made.gate.let(1)
    await asyncio.sleep(0.02)
    made.gate.let(1000)
    with pytest.raises(DeadlineError, match="no slot was free"):
        await waiting
    assert text(await first) == wanted(PROMPTS[0], max_new_tokens=9)
    assert text(await made.start("next", PROMPTS[2], 4)) == wanted(PROMPTS[2], max_new_tokens=4)


@served(1)
async def test_a_failed_round_fails_only_seated_requests(made: Served) -> None:
    first = made.start("first", PROMPTS[0], 9)
    await made.in_round()
    second = made.start("second", PROMPTS[1], 5)
    await made.callers(2)
    made.gate.fail_next = 1
    made.gate.let(1000)
    with pytest.raises(RuntimeError, match="asked for"):
        await first
    assert text(await second) == wanted(PROMPTS[1], max_new_tokens=5)
    assert made.shared.failure is None


@served(1)
async def test_a_device_that_fails_again_is_reported_to_all_callers_and_health_checks(made: Served) -> None:
    made.gate.fails = True
    made.gate.let(1000)
    for one in [made.start(str(i), PROMPTS[i], 5) for i in (0, 1)]:
        with pytest.raises(RuntimeError, match="asked for"):
            await one
    assert "asked for" in str(made.shared.failure)
    made.gate.fails = False
    assert text(await made.start("next", PROMPTS[3], 7)) == wanted(PROMPTS[3], max_new_tokens=7)
    assert made.shared.failure is None


@served(1)
async def test_turns_rotate_over_keys_and_then_calls(made: Served) -> None:
    turns, states, order = FairQueue(), list[CallState](), list[str]()
    for ticket, key, prompts in (("a1", "a", 5), ("a2", "a", 2), ("b1", "b", 1), ("c1", "c", 2)):
        states.append(CallState.of(made.call(ticket, *[PROMPTS[0]] * prompts, key=key), print, range(prompts)))
        turns.add(states[-1])
    while (state := turns.first()) is not None:
        order.append(state.call.ticket)
        state.seat()
        turns.took()
        if len(order) == 3:
            turns.remove(states[1])
    assert order == ["a1", "b1", "c1", "a1", "c1", "a1", "a1", "a1"]


@served(2)
async def test_a_call_of_many_prompts_leaves_slots_to_others(made: Served) -> None:
    """With 40 prompts of one call and 2 of another, the latter are not at the end of the queue."""
    ended: list[str] = []

    async def said(asked: Call) -> None:
        async for update in updates_of(made.engine, asked):
            ended.extend(asked.ticket for one in update.outputs if one.finish_reason)

    many = asyncio.create_task(said(made.call("many", *[PROMPTS[0]] * 40, max_new_tokens=6)))
    await made.in_round()
    few = asyncio.create_task(said(made.call("few", PROMPTS[1], PROMPTS[2], max_new_tokens=6)))
    await made.callers(2)
    made.gate.let(10000)
    await asyncio.gather(many, few)
    assert ended.count("many") == 40 and max(i for i, ticket in enumerate(ended) if ticket == "few") < 12


# ---- updates that wait for those of later rounds: none is lost


class Clock:
    """Says the time that it was told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Line:
    """Calls of one engine whose clock the test sets. Updates of each are in ``heard``, with the time."""

    def __init__(self, intervals: Sequence[float]) -> None:
        self.clock = Clock()
        self._holding = OutputCoalescer(self.clock)
        self.heard: dict[str, list[tuple[float, list[int]]]] = {}
        self.wakes = 0
        self._count = 0
        limits = TableDecoder(TARGET).generator.limits
        self._states = []
        for number, interval_s in enumerate(intervals):
            requests = Request.batch([PROMPTS[0]], SamplingParams(), limits)
            asked = Call(str(number), requests, interval_s=interval_s)
            self._states.append(CallState.of(asked, self._hear, [number]))
            self._states[-1].seat()

    def step(self, took_s: float, *calls: int, last: Sequence[int] = ()) -> None:
        """A step after which each of these calls has a token more."""
        self.clock.now += took_s
        for number in calls:
            reason = "length" if number in last else None
            output = RequestOutput(number, (self._count,), 0, reason)  # type: ignore[arg-type]
            update, _, urgent = self._states[number].update([output])
            self._holding.add(self._states[number], update, urgent=urgent)
            self._count += 1
        for sink, updates in self._holding.due().items():
            sink(updates)

    def _hear(self, updates: list[CallUpdate]) -> None:
        self.wakes += 1
        for update in updates:
            tokens = [token for output in update.outputs for token in output.tokens]
            self.heard.setdefault(update.ticket, []).append((self.clock.now, tokens))


def test_first_and_last_updates_are_sent_at_once_and_others_in_batches() -> None:
    line = Line([10.0])
    for took in (1.0, 1.0, 1.0, 9.0, 1.0):
        line.step(took, 0)
    line.step(1.0, 0, last=[0])
    assert line.heard["0"] == [(1.0, [0]), (12.0, [1, 2, 3]), (14.0, [4, 5])]


def test_without_an_interval_every_round_is_sent() -> None:
    line = Line([0.0, 100.0])
    for _ in range(4):
        line.step(1.0, 0, 1)
    assert [tokens for _, tokens in line.heard["0"]] == [[0], [2], [4], [6]]
    assert [tokens for _, tokens in line.heard["1"]] == [[1]], "another call's rounds do not hurry it"


@pytest.mark.parametrize("steps", [(1.0,), (1.0, 3.0), (0.3, 0.3, 3.0, 0.7), (25.0, 1.0)])
def test_no_token_waits_longer_than_the_interval_and_a_step(steps: Sequence[float]) -> None:
    line = Line([10.0, 10.0])
    made: list[float] = []
    for number in range(80):
        line.step(steps[number % len(steps)], 0, 1)
        made.append(line.clock.now)
    for heard in line.heard.values():
        for at, tokens in heard:
            assert all(at - made[token // 2] <= 10.0 + max(steps) for token in tokens)
        assert [token for _, tokens in heard for token in tokens] == sorted(t for _, tokens in heard for t in tokens)


def test_all_waiting_updates_are_sent_when_one_is_due() -> None:
    """Their reader is woken once for all of them."""
    line = Line([10.0, 10.0])
    line.step(1.0, 0)
    line.step(4.0, 0, 1)
    before = line.wakes
    for _ in range(30):
        line.step(1.0, 0, 1)
    assert line.wakes - before == 3
    assert [[at for at, _ in line.heard[name]] for name in "01"] == [[1.0, 11.0, 21.0, 31.0], [5.0, 11.0, 21.0, 31.0]]


def test_with_many_calls_each_gets_fewer_updates() -> None:
    """So that the messages of all of them together are no more."""
    few, many = Line([10.0] * CROWD), Line([10.0] * 3 * CROWD)
    for line, count in ((few, CROWD), (many, 3 * CROWD)):
        for _ in range(61):
            line.step(1.0, *range(count))
    assert len(few.heard["0"]) == 7 and len(many.heard["0"]) == 3


@pytest.mark.parametrize("fails", [True, False], ids=["error", "deadline"])
def test_held_updates_are_sent_with_the_error_that_ends_a_call(fails: bool) -> None:
    @served(2)
    async def over(made: Served) -> None:
        heard = list[CallUpdate]()
        asked = replace(made.call("one", PROMPTS[0], max_new_tokens=60), interval_s=float("inf"))
        made.gate.let(3)

        async def listen() -> None:
            async for update in updates_of(made.engine, asked):
                heard.append(update)

        listening = asyncio.create_task(listen())
        await until(lambda: made.shared.heartbeat >= 3 and heard)
        if fails:
            made.gate.fail_next = 1
        else:
            made.shared._calls["one"].call = replace(asked, deadline=0.0)
        made.gate.let(1)
        with pytest.raises(Exception, match="asked for" if fails else "the deadline of this call has passed"):
            await listening
        made.gate.let(1000)
        tokens = text(heard)
        assert len(heard) == 2 and len(heard[0].outputs) == 1 and len(heard[1].outputs) >= 2
        assert tokens == wanted(PROMPTS[0], max_new_tokens=60)[: len(tokens)]

    over()


@served(2)
async def test_the_engine_checks_the_clock_after_a_step_without_tokens(made: Served) -> None:
    """A step that was a chunk of a prompt."""
    heard: list[CallUpdate] = []
    asked = replace(made.call("one", PROMPTS[0]), interval_s=10.0)
    state = CallState.of(asked, heard.extend, [0])
    made.shared._holding.add(state, CallUpdate("one", (RequestOutput(0, (1,), 0),)), urgent=False)
    made.shared._hand_out([])
    assert text(heard) == [1]
