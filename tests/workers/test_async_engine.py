"""The asynchronous face of a shared engine, its turns, limits and failures; rounds continue when a test lets them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from paceline.core.errors import DeadlineError, QueueFullError
from paceline.engine.request import Request, SamplingParams
from paceline.workers.calls import Call, CallState, CallUpdate
from paceline.workers.shared_engine import AsyncEngine, FairQueue, SharedEngine
from tests.fakes import TableDecoder
from tests.workers.heard import updates_of
from tests.workers.test_shared_engine import PROMPTS, Gate, shared, wanted

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
