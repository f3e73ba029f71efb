"""Guards of Ray: only actors that do not respond are killed; health checks; a stream ends when its reader has taken it,
or is gone. On real Ray: `test_serving`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from starlette.types import Message, Receive, Scope, Send

from paceline.core.errors import BackendError, RankError, WorkerError
from paceline.serving import replica as module
from paceline.serving.ray_guard import Readers, UntilTaken, WatchedActor, pause_s
from paceline.serving.replica import ModelReplica
from tests.waiting import in_loop

BODY: Message = {"type": "http.response.body", "body": b"x"}
GONE: Message = {"type": "http.disconnect"}
READ: Message = {"type": "http.request", "body": b""}


@in_loop
async def test_streams_that_end_together_poll_their_reader_once() -> None:
    asked, answer = list[str](), asyncio.Event()

    class Asking(Readers):
        async def _ask(self, reader: str) -> bool:
            asked.append(reader)
            await answer.wait()
            return reader != "b"

    readers = Asking()
    await readers.taken("")
    assert not asked, "this process is not asked"
    first = asyncio.ensure_future(readers.taken("a"))
    await asyncio.sleep(0.01)
    later = [asyncio.ensure_future(readers.taken("a")) for _ in range(5)]  # after the question was sent
    other = asyncio.ensure_future(readers.taken("b"))
    await asyncio.sleep(0.01)
    assert asked == ["a", "b"], "one reader that is silent holds up nobody else's streams"
    assert not any(stream.done() for stream in (first, *later, other)), "not before it answers"
    answer.set()
    await asyncio.gather(first, *later, other)
    assert asked == ["a", "b", "a"], "an answer to an earlier question says nothing of what was sent since"
    assert list(readers._lines) == ["a"], "who is gone is forgotten"


def call(messages: list[Message | Exception], *, more: bool = False) -> list[Message | Exception]:
    """Messages of the server left when a call has ended."""

    async def app(_: Scope, __: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200})
        await send({**BODY, "more_body": True})
        if not more:
            await send(BODY)

    async def receive() -> Message:
        message = messages.pop(0)
        if isinstance(message, Exception):
            raise message
        return message

    async def send(_: Message) -> None:
        return None

    run: Callable[[Scope, Receive, Send], Awaitable[None]] = UntilTaken(app)
    asyncio.run(run({"type": "http"}, receive, send))  # type: ignore[arg-type]
    return messages


def test_a_call_ends_with_the_servers_report_or_its_death_and_an_incomplete_one_does_not_wait() -> None:
    assert call([READ, GONE, READ]) == call([OSError("gone"), READ]) == [READ]
    assert call([READ, GONE], more=True) == [READ, GONE]


# ---- responses of a replica to health checks: Serve replaces one that raises


class Bare(ModelReplica):
    """Without workers. ``engine``: what stands for the target's."""

    def __init__(self, *, failure: Exception | None = None, running: int = 0, timeout_s: float = 0.0) -> None:
        figures = SimpleNamespace(running=running, waiting=0)
        self.engine = SimpleNamespace(failure=failure, figures=lambda: figures, heartbeat=0)
        self._engine = self.engine  # type: ignore[assignment]
        self._beat = module._Heartbeat(timeout_s)


def check(replica: ModelReplica) -> None:
    asyncio.run(replica.check_health())


def test_a_device_that_fails_every_round_is_reported_and_a_lost_rank_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(code: int) -> None:
        raise SystemExit(code)

    with pytest.raises(WorkerError, match="the model's rounds fail repeatedly"):
        check(Bare(failure=BackendError("the device is gone")))
    monkeypatch.setattr(module.os, "_exit", end)
    with pytest.raises(SystemExit):
        check(Bare(failure=RankError("rank 1 is gone")))


def test_a_stalled_engine_with_requests_is_reported_and_an_idle_one_is_not() -> None:
    busy, idle = Bare(running=1), Bare()
    for replica in (busy, idle, idle):
        check(replica)
    with pytest.raises(WorkerError, match="has done nothing"):
        check(busy)
    busy.engine.heartbeat += 1
    check(busy)


class Actor(WatchedActor):
    """``answers``: to each check; ``processes``: the pid after each check without an answer, the last one from
    then on.
    """

    def __init__(self, answers: str, processes: list[int | None]) -> None:
        super().__init__("a", "b")
        self._answers, self._processes, self.killed = list(answers), processes, list[int | None]()

    def process(self) -> int | None:
        return self._processes.pop(0) if self._processes[1:] else self._processes[0]

    def answers(self) -> bool:
        return self._answers.pop(0) == "y"

    def kill(self) -> None:
        self.killed.append(self._processes[0])


@pytest.mark.parametrize(
    ("answers", "processes", "killed"),
    [
        ("nnn", [1], [1]),
        ("nnnnnn", [1], [1, 1]),  # it still runs, so it is killed again
        ("nnynn", [1], []),  # a slow answer, and then one
        ("nnn", [1, 1, 2], []),  # somebody else has replaced it
        ("nnnnn", [None], []),  # it is being started
        ("nnnn", [1, None, 2, 2], []),
    ],
)
def test_an_actor_is_killed_after_three_misses(answers: str, processes: list[int | None], killed: list[int]) -> None:
    actor = Actor(answers, processes)
    for _ in answers:
        actor.look()
    assert actor.killed == killed


def test_the_number_of_checks_does_not_grow_with_the_nodes_and_a_missed_one_is_repeated_soon() -> None:
    assert pause_s(1) == pause_s(4) == 2
    small, large = (4 * count / pause_s(count) for count in (4, 100))  # of four replicas on each node
    assert small == large
    watch, pauses = Actor("ny", [1]), list[float]()
    for _ in range(2):
        watch.look()
        pauses.append(pause_s(100, suspects=watch.suspects))
    assert pauses == [pause_s(1), pause_s(100)]
