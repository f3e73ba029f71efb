"""Guards of Ray: only actors that do not respond are killed; a stream ends when its reader has taken it, or is gone. On
real Ray: `test_serving`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

pytest.importorskip("ray")

from starlette.types import Message, Receive, Scope, Send

from paceline.serving.ray_guard import Readers, UntilTaken, WatchedActor, pause_s

BODY: Message = {"type": "http.response.body", "body": b"x"}
GONE: Message = {"type": "http.disconnect"}
READ: Message = {"type": "http.request", "body": b""}


def test_streams_that_end_together_poll_their_reader_once() -> None:
    async def end() -> None:
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

    asyncio.run(end())


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


def test_a_call_ends_when_the_server_reports_completion() -> None:
    assert call([READ, GONE, READ]) == [READ]


def test_a_call_to_a_dead_server_ends() -> None:
    assert call([OSError("gone"), READ]) == [READ]


def test_a_call_without_completion_does_not_wait_for_its_reader() -> None:
    assert call([READ, GONE], more=True) == [READ, GONE]


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


def killed_after(answers: str, processes: list[int | None]) -> list[int | None]:
    actor = Actor(answers, processes)
    for _ in range(len(answers)):
        actor.look()
    return actor.killed


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
def test_an_actor_is_killed_after_three_missed_checks(
    answers: str, processes: list[int | None], killed: list[int]
) -> None:
    assert killed_after(answers, processes) == killed


def test_the_number_of_checks_does_not_grow_with_the_nodes() -> None:
    assert pause_s(1) == pause_s(4) == 2
    small, large = (4 * count / pause_s(count) for count in (4, 100))  # of four replicas on each node
    assert small == large


def test_a_missed_check_is_repeated_without_the_large_cluster_delay() -> None:
    watch = Actor("ny", [1])
    pauses = []
    for _ in range(2):
        watch.look()
        pauses.append(pause_s(100, suspects=watch.suspects))
    assert pauses == [pause_s(1), pause_s(100)]
