"""How an answer is sent: what goes together, and what goes when nothing comes. The model's side is a queue of items."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from paceline.serving.api import EventStream, answer
from paceline.serving.openai.requests import CompletionRequest
from paceline.serving.router import Item, RequestContext, StreamChunk, StreamStart
from tests.waiting import in_loop

GENERATION = CompletionRequest(model="m", prompt="x", stream=True)


class Slowly:
    """A source of items that a test lets through one by one."""

    def __init__(self, *items: Item) -> None:
        self.let, self.taken = asyncio.Queue[Item](), 0
        for item in items:
            self.let.put_nowait(item)

    def __aiter__(self) -> Slowly:
        return self

    async def __anext__(self) -> Item:
        item = await self.let.get()
        self.taken += 1
        return item


class Client:
    """Waits for its answer. ``sent``: kind of each message, its bytes, and how many items were taken by then."""

    def __init__(self, source: Slowly) -> None:
        self._source, self.sent = source, list[tuple[str, bytes, int]]()
        self.scope: dict[str, Any] = {"type": "http", "state": {"access": {}}}

    async def receive(self) -> dict[str, Any]:
        await asyncio.sleep(600)
        raise AssertionError

    async def send(self, message: Any) -> None:
        kind = message["type"].rpartition(".")[2]
        self.sent.append((kind, message.get("body", b""), self._source.taken))

    async def answer(self) -> EventStream:
        context = RequestContext("a", 0)
        made = await answer(Request(self.scope, self.receive), GENERATION, self._source, ping_s=600.0, context=context)
        assert isinstance(made, EventStream)
        return made


@pytest.mark.parametrize("soon", [True, False])
@in_loop
async def test_the_response_head_is_sent_with_early_first_events(soon: bool) -> None:
    """Ray Serve makes one message of items sent without a pause. If nothing follows, the head is sent separately."""
    source = Slowly(StreamStart(1), *([StreamChunk(b"a", (1,))] if soon else []))
    client = Client(source)
    made = await client.answer()
    running = asyncio.create_task(made(client.scope, client.receive, client.send))
    while not client.sent:
        await asyncio.sleep(0.002)
    source.let.put_nowait(StreamChunk(b"b", (2,), last=True))
    await running
    sent = client.sent
    assert sent == ([("start", b"", 2), ("body", b"a", 2)] if soon else [("start", b"", 1)]) + [
        ("body", b"b", 3 if soon else 2)
    ]


@in_loop
async def test_a_failure_before_the_first_event_has_a_head() -> None:
    client = Client(Slowly(StreamStart(1)))
    made = await client.answer()
    made._source._deadline = 0.0  # it is over when the first event could go
    await made(client.scope, client.receive, client.send)
    head, failure = client.sent
    assert head[0] == "start" and failure[0] == "body" and b"deadline_exceeded" in failure[1]
