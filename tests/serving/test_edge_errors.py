"""Rejections by the HTTP edge: OpenAI's error objects for everything; keys, limits, queues, deadlines, clients that
disconnect. The engine is scripted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import openai
import pytest

from paceline.core.errors import ConfigurationError, EventLoopError, WorkerError
from paceline.serving.api import create_app
from paceline.serving.middleware import JsonFormatter
from paceline.serving.model_server import LocalRouter
from paceline.serving.openai.requests import CompletionRequest
from paceline.serving.router import Health, Item, RequestContext, StreamChunk
from paceline.serving.settings import ApiSettings
from paceline.workers.calls import Call, CallUpdate, Sink
from tests.serving.edge import ScriptedEngine, client_of, messages_of, running, scripted
from tests.waiting import until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "m", "prompt": "x"}
TOOL = {"type": "function", "function": {"name": "f"}}
STRICT: dict[str, Any] = {"type": "function", "function": {"name": "g", "strict": True}}
RESPONSE = {"model": "m", "input": "x"}


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx.Client, ScriptedEngine]]:
    app, engine, _ = scripted(lambda _: "some words that go on for a while", max_body_bytes=100_000)
    with running(app) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client, engine


@pytest.fixture
def client(served: tuple[httpx.Client, ScriptedEngine]) -> httpx.Client:
    return served[0]


def refused(response: httpx.Response) -> dict[str, Any]:
    assert set(response.json()) == {"error"}, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and len(error["message"]) > 10
    return error


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", COMPLETION | {"best_of": 3}, "best_of"),
        ("completions", COMPLETION | {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("completions", COMPLETION | {"beams": 3}, "beams"),
        ("completions", COMPLETION | {"n": True}, "n"),
        ("completions", COMPLETION | {"seed": 1 << 70}, "seed"),
        ("completions", COMPLETION | {"stop": ["a"] * 5}, "stop"),
        ("completions", COMPLETION | {"prompt": []}, "prompt"),
        ("completions", COMPLETION | {"prompt": ""}, "prompt"),
        ("completions", COMPLETION | {"prompt": [1, 99999]}, "prompt"),
        ("completions", COMPLETION | {"prompt": [5] * 5000}, "prompt"),
        ("completions", COMPLETION | {"prompt": [[1], [1 << 40]], "echo": True}, "prompt"),
        ("completions", COMPLETION | {"guided_choice": ["a"]}, "guided_choice"),
        ("completions", COMPLETION | {"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs"),
        ("completions", COMPLETION | {"logit_bias": {"a": 1}}, None),
        ("chat/completions", CHAT | {"messages": []}, "messages"),
        ("chat/completions", CHAT | {"top_logprobs": 3}, None),
        ("chat/completions", CHAT | {"functions": [{}]}, "functions"),
        ("chat/completions", CHAT | {"modalities": ["audio"]}, "modalities"),
        ("chat/completions", CHAT | {"tool_choice": "required"}, None),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ("chat/completions", CHAT | {"response_format": {"type": "json_schema"}}, "response_format"),
        ("chat/completions", CHAT | {"tools": [TOOL, STRICT], "tool_choice": "auto"}, "tools"),
        ("responses", RESPONSE | {"tools": [{"type": "function", **STRICT["function"]}]}, "tools"),
        ("responses", RESPONSE | {"max_tool_calls": 3}, "max_tool_calls"),
        ("responses", RESPONSE | {"tool_choice": "auto"}, None),
        ("responses", RESPONSE | {"tool_choice": {"type": "function", "name": "f"}}, None),
        ("responses", RESPONSE | {"text": {"verbosity": "low"}}, "text"),
        ("responses", RESPONSE | {"reasoning": {"summary": "auto"}}, "reasoning"),
        ("responses", {"model": "m", "input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ("responses", {"model": "m", "input": [{"type": "function_call"}]}, "input"),
    ],
)  # fmt: skip
def test_invalid_requests_are_rejected_by_field(client: httpx.Client, path: str, body: object, param: object) -> None:
    response = client.post(f"/v1/{path}", json=body)
    assert (response.status_code, refused(response)["param"]) == (400, param), response.text


JSON = "application/json"
NOT_OBJECTS = b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"model":"\\ud800"}', b"[" * 90000


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [*((one, JSON, 400) for one in NOT_OBJECTS), (b"{}", "text/plain", 415), (b" " * 100_001, JSON, 413)],
)
def test_only_short_json_objects_are_read(client: httpx.Client, content: bytes, kind: str, status: int) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize"):
        response = client.post(path, content=content, headers={"content-type": kind})
        assert response.status_code == status, response.text
        refused(response)


PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
CACHED = {"type": "text", "text": "x", "cache_control": {}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
GUIDED = {"structured_outputs": {"regex": "a"}}
FORMAT = {"response_format": {"type": "json_object"}}
USAGE: dict[str, Any] = {"stream": True, "stream_options": {"continuous_usage_stats": True}}


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("chat/completions", {"messages": [{"role": "user", "content": [PICTURE]}]},
         "messages[0].content[0]: images are not served; send text alone"),
        ("chat/completions", {"messages": [{"role": "user", "content": [CACHED | {"type": "input_audio"}]}]},
         "messages[0].content[0]: audio is not served; send text alone"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
         "input[0].content[0]: images are not served; send text alone"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
         "input[0].content[0]: files are not served; send text alone"),
        ("chat/completions", CHAT | {"continue_final_message": True, "add_generation_prompt": True},
         "continue_final_message: expected add_generation_prompt: false with it, got true; omit one of them"),
        ("completions", COMPLETION | {"max_tokens": 0},
         "max_tokens: expected at least 1 unless echo is true, got 0; raise it"),
        ("completions", COMPLETION | {"suffix": "x"},
         "suffix: expected an empty string (insertion before a suffix is not supported), got 'x'; correct it"),
        ("chat/completions", {"messages": [{"role": "user", "content": [CACHED]}]},
         "messages[0].content[0]: 'cache_control' is not a field; omit it"),
        ("chat/completions", {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
         "messages[0].tool_calls[0].function.arguments: expected a string, got {'a': 1}; correct it"),
        ("chat/completions", {"messages": [{"role": "user", "content": 5}]},
         "messages[0].content: expected a string or a list, got 5; correct it"),
        ("chat/completions", {"messages": [{"content": "x"}]},
         "messages[0].role: expected a value, got nothing; add it"),
        ("chat/completions", {"messages": [{"role": "user"}]},
         "messages[0]: content: expected a value unless the message has tool_calls, got none; add it"),
        ("chat/completions", CHAT | {"tools": [{"type": "function", "function": {}}]},
         "tools[0].function.name: expected a value, got nothing; add it"),
        ("completions", COMPLETION | {"speculative": {"k": -1}},
         "speculative.k: expected greater than or equal to 0, got -1; correct it"),
        ("completions", COMPLETION | {"n": 0}, "n: expected a whole number from 1 to 128, got 0; correct it"),
        *((path, body | {"stream_options": {}}, "stream_options: expected stream")
          for path, body in (("completions", COMPLETION), ("chat/completions", CHAT), ("responses", RESPONSE))),
        ("responses", RESPONSE | USAGE, "is not a field"),
        ("completions", COMPLETION | USAGE, "continuous_usage_stats: expected include_usage: true with"),
        ("completions", COMPLETION | GUIDED | FORMAT, "omit one of them"),
        ("chat/completions", CHAT | GUIDED | FORMAT, "omit one of them"),
        ("responses", RESPONSE | GUIDED | {"text": {"format": {"type": "json_object"}}}, "omit one of them"),
        ("chat/completions", CHAT | GUIDED | {"tools": [TOOL], "tool_choice": "required"},
         "expected none with a tool_choice"),
        ("completions", COMPLETION | {"stop": ""}, "none of them empty"),
        ("completions", COMPLETION | {"stop": [""]}, "stop"),
        ("../tokenize", COMPLETION | {"tools": [TOOL]}, "tools: has no effect"),
    ],
)  # fmt: skip
def test_an_error_names_field_and_reason(client: httpx.Client, path: str, body: dict[str, Any], says: str) -> None:
    response = client.post(f"/v1/{path}", json={"model": "m", **body})
    assert response.status_code == 400 and says in refused(response)["message"], response.text


@pytest.mark.parametrize(("path", "body"), [("completions", COMPLETION), ("chat/completions", CHAT)])
def test_tokens_beyond_the_context_are_rejected(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    """A server with --max-sequence-tokens. A request without a number gets the tokens that fit."""
    for over in ({"max_tokens": 4096}, *([{"prompt": [5] * 5000}] if path == "completions" else [])):
        response = client.post(f"/v1/{path}", json=body | over)
        assert (response.status_code, refused(response)["code"]) == (400, "context_length_exceeded")
    assert client.post(f"/v1/{path}", json=body | {"max_tokens": 4000}).status_code == 200
    long = {"prompt": [5] * 4090} if path == "completions" else {}
    assert client.post(f"/v1/{path}", json=body | long).status_code == 200


def test_unknown_paths_methods_and_models_are_rejected(client: httpx.Client) -> None:
    missing = ("/nothing", "/v1/embeddings", "/v1/models/nobody", "/v1/models/")
    for method, path in (*(("GET", one) for one in missing), ("PUT", "/v1/models"), ("GET", "/v1/completions")):
        response = client.request(method, path)
        assert response.status_code == (404 if path in missing else 405), path
        refused(response)
    for path in ("/v1/completions", "/tokenize"):
        response = client.post(path, json=COMPLETION | {"model": "nobody"})
        assert (response.status_code, refused(response)["code"]) == (404, "model_not_found")


def test_a_body_without_a_length_is_read_up_to_the_limit() -> None:
    app, _, _ = scripted(lambda _: "yes", max_body_bytes=50_000)
    reads = 0

    async def receive() -> dict[str, Any]:
        nonlocal reads
        reads += 1
        return {"type": "http.request", "body": b" " * 10_000, "more_body": True}

    assert messages_of(app, receive)[0]["status"] == 413 and reads == 6


def test_a_full_queue_sends_retry_after(client: httpx.Client, served: tuple[httpx.Client, ScriptedEngine]) -> None:
    served[1].full = True
    try:
        for stream in (False, True):
            response = client.post("/v1/completions", json=COMPLETION | {"stream": stream})
            assert (response.status_code, response.headers["retry-after"]) == (429, "7")
            refused(response)
    finally:
        served[1].full = False


def test_api_keys_are_required_except_for_health() -> None:
    app, engine, _ = scripted(lambda _: "yes", api_keys=("first", "second"))
    with running(app) as address:
        for key, status in (("", 401), ("wrong", 401), ("firs", 401), ("first", 200), ("second", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            response = httpx.post(f"{address}/v1/completions", json=COMPLETION, headers=headers, timeout=60)
            assert response.status_code == status
            if status == 401:
                assert response.headers["www-authenticate"] == "Bearer"
                refused(response)
        for status, paths in (
            (200, ("/health/live", "/health/ready", "/")),
            (401, ("/v1/models", "/metrics", "/openapi.json")),
        ):
            assert [httpx.get(address + path, timeout=60).status_code for path in paths] == [status] * len(paths)
    first, second = (call.key for call in engine.calls)
    assert first and second and first != second and "first" not in first


def test_idle_streams_send_pings() -> None:
    app, engine, _ = scripted(lambda _: "yes", ping_s=0.05)
    engine.pause_s = 0.4
    with running(app) as address:
        lines = httpx.post(f"{address}/v1/completions", json=COMPLETION | {"stream": True}).text.split("\n\n")
        assert lines.count(": ping") >= 2 and lines[-2] == "data: [DONE]"
        engine.pause_s = 0.2
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60) as client:  # which passes over them
            stream = client.completions.create(model="m", prompt="x", stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == "yes"


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_frees_its_slot(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    app, engine, _ = scripted(lambda _: "words and words " * 200)
    engine.pause_s = 0.05
    with caplog.at_level(logging.INFO, "paceline.access"), running(app) as address:
        body = COMPLETION | {"stream": stream, "max_tokens": 2000}
        try:
            with httpx.Client(timeout=0.3) as client, client.stream("POST", f"{address}/v1/completions", json=body):
                time.sleep(0.2)  # and the connection is closed in the middle of the stream
        except httpx.TimeoutException:
            assert not stream
        until(lambda: engine.ended)
        until(lambda: any(one.name == "paceline.access" for one in caplog.records))
    lines = [JsonFormatter().format(one) for one in caplog.records if one.name == "paceline.access"]
    assert [json.loads(line)["status"] for line in lines] == [499]


def test_the_access_log_has_a_line_of_json_for_every_request(caplog: pytest.LogCaptureFixture) -> None:
    app, _, _ = scripted(lambda _: "yes")
    with caplog.at_level(logging.INFO, "paceline.access"), running(app) as address:
        answered = httpx.post(f"{address}/v1/completions", json=COMPLETION, headers={"x-request-id": "mine-7"})
        httpx.get(f"{address}/nothing", headers={"x-request-id": 'bad "id"'})
    records = [record for record in caplog.records if record.name == "paceline.access"]
    lines = [json.loads(JsonFormatter().format(record)) for record in records]
    assert answered.headers["x-request-id"] == lines[0]["request_id"] == "mine-7"
    assert (lines[0]["model"], lines[0]["status"], lines[0]["completion_tokens"]) == ("m", 200, 3)
    assert (lines[1]["path"], lines[1]["status"]) == ("/nothing", 404) and lines[1]["request_id"].startswith("req-")
    assert lines[0]["message"] == "POST /v1/completions 200" and "prompt" not in lines[0]


def test_a_missing_model_makes_the_service_unready() -> None:
    class Loading(LocalRouter):
        async def health(self) -> Any:
            return Health(False, {"m": "loading"})

    with running(create_app(Loading({}), ApiSettings())) as address:
        ready = httpx.get(f"{address}/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"ready": False, "models": {"m": "loading"}})
        assert httpx.get(f"{address}/health/live").status_code == 200
        assert httpx.get(f"{address}/v1/models").json()["data"] == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("api_keys", ("",)), ("max_body_bytes", 0), ("max_requests_per_key", 0), ("max_sequence_tokens", -1)),
        *(("ping_s", 0), ("request_timeout_s", 0), ("stream_interval_ms", -1), ("stream_interval_ms", 5000)),
        ("spec_metrics", "all"),
    ],
)
def test_contradictory_settings_are_rejected(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"{name}: expected"):
        ApiSettings(**{name: value})


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
        until(lambda: len(engine.ended) >= 2)  # the client hears of it first


def test_a_lost_answer_ends_with_an_error_object() -> None:
    """The response's before the first token; the last event after it, and the stream ends as others do."""
    app, engine, _ = scripted(lambda _: "words and words " * 40)
    engine.pause_s, say = 0.05, engine.submit

    def lost(call: Call, sink: Sink) -> None:
        end = CallUpdate(call.ticket, ended=True, error=WorkerError("a part was lost"))
        if streamed:
            say(call, lambda updates: (sink(updates), sink([end]))[0])
        else:
            sink([end])

    engine.submit = lost  # type: ignore[method-assign]
    with running(app) as address:
        for streamed in (False, True):
            asked = COMPLETION | {"stream": streamed, "max_tokens": 500}
            response = httpx.post(f"{address}/v1/completions", json=asked, timeout=60)
            error = json.loads(response.text.split("\n\n")[-3][6:]) if streamed else response.json()
            assert (error["error"]["code"], error["error"]["type"]) == ("model_unavailable", "server_error")
            assert response.text.endswith("data: [DONE]\n\n") if streamed else response.headers["retry-after"]
            assert response.status_code == (200 if streamed else 503)


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
