"""How much a request may ask for, how many a key may have, and how a server may be used. The engine is scripted."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest

from paceline.core.errors import EventLoopError
from paceline.serving.openai.requests import CompletionRequest
from paceline.serving.router import Item, RequestContext, StreamChunk
from tests.serving.edge import client_of, running, scripted
from tests.serving.test_edge_errors import CHAT, COMPLETION, refused


def test_requests_of_a_key_are_limited() -> None:
    app, engine, _ = scripted(lambda _: "words and words " * 20, api_keys=("a", "b"), max_requests_per_key=2)
    engine.pause_s = 0.02
    body = COMPLETION | {"stream": True, "max_tokens": 300}
    with running(app) as address, httpx.Client(timeout=60) as client:

        def ask(key: str) -> Any:
            return client.stream(
                "POST", f"{address}/v1/completions", json=body, headers={"authorization": f"Bearer {key}"}
            )

        with ask("a") as first, ask("a") as second, ask("a") as third, ask("b") as other:
            assert [one.status_code for one in (first, second, third, other)] == [200, 200, 429, 200]
            assert third.headers["retry-after"] == "1"
            assert json.loads(third.read())["error"]["code"] == "queue_full"
            first.read(), second.read()
        with ask("a") as again:
            assert again.status_code == 200, "those that ended count no more"


def test_total_tokens_of_a_request_are_limited() -> None:
    app, engine, _ = scripted(lambda _: "words and words " * 40, max_sequence_tokens=20)
    with running(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        fits = client.post("/v1/completions", json=COMPLETION | {"prompt": [5] * 4, "max_tokens": 16})
        assert fits.json()["usage"]["completion_tokens"] == 16
        over = client.post("/v1/completions", json=COMPLETION | {"prompt": [5] * 5, "max_tokens": 16})
        error = refused(over)
        assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded") and "20" in error["message"]
        assert client.post("/v1/completions", json=COMPLETION | {"prompt": [5] * 20}).status_code == 400
        chat = client.post("/v1/chat/completions", json=CHAT).json()  # it does not say how many
        assert chat["usage"]["total_tokens"] == 20
        assert len(engine.calls) == 2


def test_a_deadline_ends_an_answer() -> None:
    app, engine, _ = scripted(lambda _: "words and words " * 40, request_timeout_s=0.3)
    engine.pause_s = 0.05
    with client_of(app) as client:
        with pytest.raises(openai.InternalServerError) as error:
            client.completions.create(model="m", prompt="x", max_tokens=500)
        assert (error.value.status_code, error.value.code) == (504, "deadline_exceeded")
        stream = client.completions.create(model="m", prompt="x", max_tokens=500, stream=True)
        with pytest.raises(openai.APIError, match="the response was not complete before the deadline; ask for"):
            list(stream)
        end = time.monotonic() + 20
        while len(engine.ended) < 2:  # the client hears of it first
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_server_is_used_from_one_event_loop_at_a_time() -> None:
    server = scripted(lambda _: "yes")[2]

    async def ask() -> list[Item]:
        request = CompletionRequest(model="m", prompt="x", seed=1)
        return [item async for item in server.stream(request, RequestContext.new())]

    async def two() -> None:
        assert isinstance((await ask())[-1], StreamChunk)
        with ThreadPoolExecutor(1) as pool, pytest.raises(EventLoopError, match="another event loop"):
            await asyncio.wrap_future(pool.submit(asyncio.run, ask()))

    asyncio.run(two())
    assert isinstance(asyncio.run(ask())[-1], StreamChunk), "the first one is closed"
