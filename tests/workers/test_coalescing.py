"""Updates that wait for those of later rounds: what goes at once, how long the others wait, and that none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.engine.request import Request, SamplingParams
from paceline.outputs import RequestOutput
from paceline.workers.calls import Call, CallState, CallUpdate
from paceline.workers.shared_engine import CROWD, AsyncEngine, OutputCoalescer
from tests.fakes import TableDecoder
from tests.workers.heard import updates_of
from tests.workers.test_async_engine import call, made_for, run, text, until, wanted
from tests.workers.test_shared_engine import PROMPTS, TARGET


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
