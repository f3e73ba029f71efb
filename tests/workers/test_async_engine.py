"""The asynchronous face of a shared engine, its turns, limits and failures; rounds continue when a test lets them. And
updates that wait: what goes at once, and how long the others wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from paceline.core.errors import DeadlineError, QueueFullError
from paceline.engine.request import Request, SamplingParams
from paceline.outputs import RequestOutput
from paceline.workers.calls import Call, CallState, CallUpdate
from paceline.workers.shared_engine import CROWD, AsyncEngine, FairQueue, OutputCoalescer, SharedEngine
from tests.fakes import TableDecoder
from tests.workers.heard import updates_of
from tests.workers.test_shared_engine import PROMPTS, TARGET, Gate, shared, wanted

Made = tuple[SharedEngine, Gate, TableDecoder]
Result = TypeVar("Result")


def made_for(slots: int, max_waiting: int | None = None) -> Made:
    made = shared(slots)
    made[0]._max_waiting = max_waiting
    return made


def call(made: Made, ticket: str, *prompts: Sequence[int], key: str = "", **asked: object) -> Call:
    requests = Request.batch([list(p) for p in prompts], SamplingParams.merge(None, asked), made[2].generator.limits)
    return Call(ticket, requests, key=key)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(asyncio.wait_for(work, 60))


async def listen(engine: AsyncEngine, asked: Call) -> list[CallUpdate]:
    return [update async for update in updates_of(engine, asked)]


def text(updates: Sequence[CallUpdate], index: int = 0) -> list[int]:
    return [token for update in updates for one in update.outputs if one.index == index for token in one.tokens]


async def until(true: Any) -> None:
    while not true():
        await asyncio.sleep(0.002)


def test_a_step_is_delivered_once_for_all_streams() -> None:
    made, handed = made_for(4), list[list[str]]()

    async def work() -> list[list[CallUpdate]]:
        engine = AsyncEngine(made[0])
        deliver = engine._deliver
        engine._deliver = lambda updates: (handed.append([one.ticket for one in updates]), deliver(updates))[1]  # type: ignore[method-assign, assignment, func-returns-value]
        asks = [call(made, str(i), PROMPTS[i], max_new_tokens=20 + i) for i in range(4)]
        streams = [asyncio.create_task(listen(engine, ask)) for ask in asks]
        await until(lambda: len(made[0]._calls) == 4)
        made[1].let(1000)
        return list(await asyncio.gather(*streams))

    found = run(work())
    for number, updates in enumerate(found):
        assert text(updates) == wanted(PROMPTS[number], max_new_tokens=20 + number)
        assert updates[-1].ended and not any(one.ended for one in updates[:-1])
    assert ["0", "1", "2", "3"] in [sorted(tickets) for tickets in handed]
    assert len(handed) <= made[0].heartbeat
    figures = made[0].figures()
    timings = made[0].take_timings()
    assert (figures.running, figures.waiting, len(timings)) == (0, 0, 4)
    assert all(min(one.queue, one.prefill, one.decode) >= 0 for one in timings)
    assert not made[0].take_timings() and not made[0].end("not here")
    assert figures.engine.new_tokens == sum(20 + i for i in range(4))
    assert figures.engine.num_accepted_tokens == sum(figures.engine.num_accepted_tokens_per_pos) > 0


def test_a_slow_reader_gets_several_steps_as_one_update() -> None:
    """Work for every update, such as an item through Ray, is done once for all waiting steps."""
    made = made_for(2)

    async def work() -> tuple[list[CallUpdate], list[CallUpdate]]:
        engine = AsyncEngine(made[0])
        asks = [call(made, ticket, PROMPTS[0], max_new_tokens=40) for ticket in ("slow", "quick")]
        quick = asyncio.create_task(listen(engine, asks[1]))
        stream = updates_of(engine, asks[0])
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: len(made[0]._calls) == 2)
        made[1].let(1000)
        taken = [await first]
        everything = await quick
        await until(lambda: not made[0]._calls)
        return [*taken, *[update async for update in stream]], everything

    slow, quick = run(work())
    assert text(slow) == text(quick) == wanted(PROMPTS[0], max_new_tokens=40)
    assert len(slow) <= 3 < len(quick) and slow[-1].ended


def test_a_cancelled_stream_frees_its_slot_after_the_step_that_runs() -> None:
    made = made_for(1)

    async def work() -> list[CallUpdate]:
        engine = AsyncEngine(made[0])
        first = asyncio.create_task(listen(engine, call(made, "first", PROMPTS[0], max_new_tokens=200)))
        await until(lambda: made[0].heartbeat)  # its prompt is read, and a round waits at the gate
        second = asyncio.create_task(listen(engine, call(made, "second", PROMPTS[1], max_new_tokens=3)))
        await until(lambda: len(made[0]._calls) == 2)
        first.cancel()
        await until(lambda: "first" not in made[0]._calls)
        made[1].let(1)
        await until(lambda: made[0].figures().running == 1)  # after that one round
        made[1].let(100)
        return await second

    assert text(run(work())) == wanted(PROMPTS[1], max_new_tokens=3)


def test_a_finished_answer_ends_with_its_last_token() -> None:
    """An abort used to wait for the next output of any request, which may be another's long prompt away."""
    made = made_for(2)

    async def work() -> None:
        engine = AsyncEngine(made[0])
        other = asyncio.create_task(listen(engine, call(made, "other", PROMPTS[0], max_new_tokens=60)))
        await until(lambda: made[0].heartbeat)
        short = asyncio.create_task(listen(engine, call(made, "short", PROMPTS[1], max_new_tokens=2)))
        await until(lambda: len(made[0]._calls) == 2)
        made[1].let(2)  # and no more: rounds stand still
        assert text(await short) == wanted(PROMPTS[1], max_new_tokens=2)
        assert not other.done()
        made[1].let(1000)
        assert text(await other) == wanted(PROMPTS[0], max_new_tokens=60)

    run(work())


def test_a_full_queue_and_a_deadline_raise_named_errors() -> None:
    made = made_for(1, max_waiting=2)

    async def work() -> None:
        engine = AsyncEngine(made[0])
        first = asyncio.create_task(listen(engine, call(made, "first", PROMPTS[0], max_new_tokens=9)))
        await until(lambda: made[0].heartbeat)
        late = call(made, "late", PROMPTS[2], max_new_tokens=9)
        waiting = asyncio.create_task(listen(engine, replace(late, deadline=time.monotonic() + 0.01)))
        await until(lambda: made[0].figures().waiting == 1)
        with pytest.raises(QueueFullError, match="1 requests wait, 2 are allowed"):
            await listen(engine, call(made, "more", PROMPTS[1], PROMPTS[1], max_new_tokens=9))
        made[1].let(1)
        await asyncio.sleep(0.02)
        made[1].let(1000)
        with pytest.raises(DeadlineError, match="no slot was free"):
            await waiting
        assert text(await first) == wanted(PROMPTS[0], max_new_tokens=9)
        assert text(await listen(engine, call(made, "next", PROMPTS[2], max_new_tokens=4))) == wanted(
            PROMPTS[2], max_new_tokens=4
        )

    run(work())


def test_a_failed_round_fails_only_seated_requests() -> None:
    made = made_for(1)

    async def work() -> None:
        engine = AsyncEngine(made[0])
        first = asyncio.create_task(listen(engine, call(made, "first", PROMPTS[0], max_new_tokens=9)))
        await until(lambda: made[0].heartbeat)
        second = asyncio.create_task(listen(engine, call(made, "second", PROMPTS[1], max_new_tokens=5)))
        await until(lambda: len(made[0]._calls) == 2)
        made[1].fail_next = 1
        made[1].let(1000)
        with pytest.raises(RuntimeError, match="asked for"):
            await first
        assert text(await second) == wanted(PROMPTS[1], max_new_tokens=5)
        assert made[0].failure is None

    run(work())


def test_a_device_that_fails_again_is_reported_to_all_callers_and_health_checks() -> None:
    made = made_for(1)

    async def work() -> None:
        engine = AsyncEngine(made[0])
        made[1].fails = True
        made[1].let(1000)
        both = [asyncio.create_task(listen(engine, call(made, str(i), PROMPTS[i], max_new_tokens=5))) for i in (0, 1)]
        for one in both:
            with pytest.raises(RuntimeError, match="asked for"):
                await one
        assert "asked for" in str(made[0].failure)
        made[1].fails = False
        assert text(await listen(engine, call(made, "next", PROMPTS[3], max_new_tokens=7))) == wanted(
            PROMPTS[3], max_new_tokens=7
        )
        assert made[0].failure is None

    run(work())


def test_turns_rotate_over_keys_and_then_calls() -> None:
    made, turns, states = made_for(1), FairQueue(), list[CallState]()
    asks = [("a1", "a", 5), ("a2", "a", 2), ("b1", "b", 1), ("c1", "c", 2)]
    for ticket, key, prompts in asks:
        state = CallState.of(call(made, ticket, *[PROMPTS[0]] * prompts, key=key), print, range(prompts))
        states.append(state)
        turns.add(state)
    order = []
    while (state := turns.first()) is not None:
        order.append(state.call.ticket)
        state.seat()
        turns.took()
        if len(order) == 3:
            turns.remove(states[1])
    assert order == ["a1", "b1", "c1", "a1", "c1", "a1", "a1", "a1"]


def test_a_call_of_many_prompts_leaves_slots_to_others() -> None:
    """With 40 prompts of one call and 2 of another, the latter are not at the end of the queue."""
    made = made_for(2)

    async def work() -> list[str]:
        engine, ended = AsyncEngine(made[0]), list[str]()

        async def said(asked: Call) -> None:
            async for update in updates_of(engine, asked):
                ended.extend(asked.ticket for one in update.outputs if one.finish_reason)

        many = asyncio.create_task(said(call(made, "many", *[PROMPTS[0]] * 40, max_new_tokens=6)))
        await until(lambda: made[0].heartbeat)
        few = asyncio.create_task(said(call(made, "few", PROMPTS[1], PROMPTS[2], max_new_tokens=6)))
        await until(lambda: len(made[0]._calls) == 2)
        made[1].let(10000)
        await asyncio.gather(many, few)
        return ended

    ended = run(work())
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
    made = made_for(2)

    async def work() -> list[CallUpdate]:
        engine, heard = AsyncEngine(made[0]), list[CallUpdate]()
        asked = replace(call(made, "one", PROMPTS[0], max_new_tokens=60), interval_s=float("inf"))
        made[1].let(3)

        async def listen() -> None:
            async for update in updates_of(engine, asked):
                heard.append(update)

        listening = asyncio.create_task(listen())
        await until(lambda: made[0].heartbeat >= 3 and heard)
        if fails:
            made[1].fail_next = 1
        else:
            made[0]._calls["one"].call = replace(asked, deadline=0.0)
        made[1].let(1)
        with pytest.raises(
            RuntimeError if fails else Exception, match="asked for" if fails else "the deadline of this call has passed"
        ):
            await listening
        return heard

    heard = run(work())
    made[1].let(1000)
    assert [len(one.outputs) for one in heard][:1] == [1] and len(heard) == 2
    tokens = text(heard)
    assert len(heard[1].outputs) >= 2 and tokens == wanted(PROMPTS[0], max_new_tokens=60)[: len(tokens)]


def test_the_engine_checks_the_clock_after_a_step_without_tokens() -> None:
    """A step that was a chunk of a prompt."""
    engine, _, target = made_for(2)
    heard: list[CallUpdate] = []
    requests = Request.batch([PROMPTS[0]], SamplingParams(), target.generator.limits)
    state = CallState.of(Call("one", requests, interval_s=10.0), heard.extend, [0])
    engine._holding.add(state, CallUpdate("one", (RequestOutput(0, (1,), 0),)), urgent=False)
    engine._hand_out([])
    assert text(heard) == [1]
