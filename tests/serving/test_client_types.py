"""Every body and every event is what OpenAI's own client says it is, and an answer is the same with and without events.

The client itself checks nothing: its types are asked here. The engine is scripted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx2 as httpx
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from paceline.text.structured_output import GrammarCompiler
from tests.serving.edge import running, scripted
from tests.serving.test_edge import SAYS, say

FUNCTION: Any = {"name": "weather", "parameters": {"type": "object"}}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
TOOL: Any = {"type": "function", **FUNCTION}
NAMED: Any = {"type": "function", "name": "weather"}
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SAYS |= {
    "parts": "n\u00e9 \u65e5 \U0001f600",
    "pure": "<think>" + "hm, " * 30,
    "arguments": '{"a": 1, "b": 22222222}',
    "list": '[{"name": "weather", ' * 2,
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    app, _, _ = scripted(say, spec_metrics="detailed")
    with running(app) as address, httpx.Client(base_url=f"{address}/v1", timeout=60) as made:
        yield made


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = client.post(path, json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()  # type: ignore[no-any-return]


def events(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = client.post(path, json={"model": "m", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


RESPONSES: list[dict[str, Any]] = [
    {"input": "plain"},
    {"input": "think", "instructions": "be brief", "temperature": 0.5, "top_p": 0.9, "metadata": {"a": "b"}},
    {"input": "think", "max_output_tokens": 12},
    {"input": "tool", "tools": [TOOL], "tool_choice": "auto"},
    {"input": "called", "tools": [TOOL], "parallel_tool_calls": False},
    {"input": "plain", "tools": [TOOL], "tool_choice": "none"},
]


@pytest.mark.parametrize("body", RESPONSES)
def test_responses_and_events_parse_with_client_types(client: httpx.Client, body: dict[str, Any]) -> None:
    whole, sent = post(client, "/responses", body), events(client, "/responses", body)
    for one in sent:
        _EVENT.validate_python(one)
    last = sent[-1]["response"]
    for answer in (whole, last):
        Response.model_validate(answer)
    assert [shape(item) for item in whole["output"]] == [shape(item) for item in last["output"]]
    assert (whole["usage"], whole["status"]) == (last["usage"], last["status"])
    done = [one["item"] for one in sent if one["type"] == "response.output_item.done"]
    assert done == last["output"] and [one["sequence_number"] for one in sent] == list(range(len(sent)))
    parts = [part["text"] for item in done if item["type"] == "message" for part in item["content"]]
    assert "".join(one["delta"] for one in sent if one["type"] == "response.output_text.delta") == "".join(parts)


def shape(item: dict[str, Any]) -> dict[str, Any]:
    """Without ids, which are those of one answer."""
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


CHATS: list[dict[str, Any]] = [
    {},
    {"n": 2, "logprobs": False, "stream_options": {"include_usage": True}},
    {"tools": [CHAT_TOOL]},
    {"max_tokens": 3},
]


@pytest.mark.parametrize("fields", CHATS)
@pytest.mark.parametrize("says", ["plain", "think", "tool"])
def test_chats_and_events_parse_with_client_types(client: httpx.Client, says: str, fields: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": says}], **fields}
    for one in events(client, "/chat/completions", body):
        ChatCompletionChunk.model_validate(one)
    body.pop("stream_options", None)
    ChatCompletion.model_validate(post(client, "/chat/completions", body))


def test_completions_and_models_parse_with_client_types(client: httpx.Client) -> None:
    for body in ({"prompt": "plain"}, {"prompt": ["plain", "stops"], "n": 2, "echo": True}):
        Completion.model_validate(post(client, "/completions", body))
        for one in events(client, "/completions", {**body, "stream_options": {"include_usage": True}}):
            for choice in one["choices"]:  # null before the last event, which the type leaves out and the API sends
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            Completion.model_validate(one)
    Model.model_validate(client.get("/models/m").json())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        ({"input": "arguments", "tool_choice": NAMED, "max_output_tokens": 9}, ["function_call"]),
        ({"input": "list", "tool_choice": "required", "max_output_tokens": 5}, []),
        ({"input": "plain", "max_output_tokens": 3}, ["message"]),
        ({"input": "pure", "max_output_tokens": 12}, ["reasoning"]),
        ({"input": "tool", "max_output_tokens": 80}, ["message", "function_call"]),
    ],
)
def test_items_cut_by_length_are_incomplete(
    body: dict[str, Any], kinds: list[str], stream: bool, grammarless: httpx.Client
) -> None:
    """Agents execute a call whose item is complete. An item exists as soon as a part of it is sent."""
    body = {"tools": [TOOL], **body}
    if not stream:
        answer = post(grammarless, "/responses", body)
    else:
        sent = events(grammarless, "/responses", body)
        assert sent[-1]["type"] == "response.incomplete"
        answer = sent[-1]["response"]
        assert [one["item"] for one in sent if one["type"] == "response.output_item.done"] == answer["output"]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["type"] for item in answer["output"]] == kinds
    wanted = ["completed"] * (len(kinds) - 1) + ["incomplete"] * bool(kinds)
    assert [item["status"] for item in answer["output"]] == wanted
    Response.model_validate(answer)
    if isinstance(body.get("tool_choice"), dict):
        assert answer["tool_choice"] == NAMED


@pytest.fixture(scope="module")
def grammarless() -> Iterator[httpx.Client]:
    """Demanded calls need a grammar, which the script takes as read."""
    app, engine, server = scripted(say)
    server._limits = replace(server._limits, grammars=GrammarCompiler(len(engine.tokenizer)))
    with running(app) as address, httpx.Client(base_url=f"{address}/v1", timeout=60) as made:
        yield made


def test_tokens_of_reasoning_are_counted(client: httpx.Client) -> None:
    asked = {"messages": [{"role": "user", "content": "pure"}], "max_completion_tokens": 12}
    answered = [post(client, "/responses", {"input": "pure", "max_output_tokens": 12})["usage"]]
    assert answered[0]["output_tokens_details"] == {"reasoning_tokens": 12}
    usage = post(client, "/chat/completions", asked)["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 12} and usage["completion_tokens"] == 12
    last = events(client, "/chat/completions", {**asked, "stream_options": {"include_usage": True}})[-1]
    assert last["usage"] == usage
    plain = post(client, "/responses", {"input": "plain"})["usage"]
    assert plain["output_tokens_details"] == {"reasoning_tokens": 0}
    thought = post(client, "/responses", {"input": "think"})["usage"]
    assert 0 < thought["output_tokens_details"]["reasoning_tokens"] < thought["output_tokens"]


def test_token_bytes_join_to_the_text(client: httpx.Client) -> None:
    """Also where it is a part of a character: three of these are not the mark that each shows."""
    asked = {"messages": [{"role": "user", "content": "parts"}], "logprobs": True, "top_logprobs": 3}
    body = post(client, "/chat/completions", asked)
    ChatCompletion.model_validate(body)
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for token in content for byte in token["bytes"]).decode() == SAYS["parts"]
    assert all(token["top_logprobs"][0]["bytes"] == token["bytes"] for token in content)
    assert {len(token["top_logprobs"]) for token in content} == {3}
    done = post(client, "/completions", {"prompt": "parts", "logprobs": 3, "max_tokens": 60})["choices"][0]["logprobs"]
    assert all(len(top) == 3 and name in top for name, top in zip(done["tokens"], done["top_logprobs"], strict=True))
    named = [token.startswith("bytes:") for token in done["tokens"]]
    assert any(named) and not all(named)
    for token, place, parted in zip(done["tokens"], done["text_offset"], named, strict=True):
        assert parted or SAYS["parts"][place:].startswith(token)
