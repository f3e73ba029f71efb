"""Bodies as chat programs and editors send them, written after their shapes: each is accepted, plain and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.serving.edge import running, scripted

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "x"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}

CHATS: dict[str, dict[str, Any]] = {
    "Open WebUI": {
        **STREAM, "messages": [SYSTEM, USER], "temperature": 0.8, "top_p": 0.9, "max_tokens": 128,
        "frequency_penalty": 0.1, "seed": 1, "stop": ["###"],
    },
    "Open WebUI, goes on": {
        **STREAM, "messages": [USER, {"role": "assistant", "content": "Well", "reasoning_content": "hm"}, USER],
        "reasoning_effort": "low",
    },
    "LangChain, streamed": {
        **STREAM, "messages": [PARTS], "max_completion_tokens": 64, "logprobs": True, "top_logprobs": 2,
    },
    "LangChain, tools": {"messages": [USER], "tools": [TOOL], "parallel_tool_calls": False, "tool_choice": "auto"},
    "LangChain, results": {
        "messages": [
            USER, {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "12", "tool_call_id": "call_1"},
        ],
        "tools": [TOOL],
    },
    "LlamaIndex, tools": {
        "messages": [
            USER, {"role": "assistant", "content": "", "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "name": "weather", "content": [{"type": "text", "text": "12"}], "tool_call_id": "call_1"},
        ],
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": None}}], "tool_choice": "auto",
        "parallel_tool_calls": True, "temperature": 0.1, "stream": True,
    },
    "aider, whole": {
        "messages": [SYSTEM, PARTS], "temperature": 0, "stream": False, "max_tokens": 64, "extra_body": None,
        "user": "aider",
    },
    "Continue, an edit": {
        "messages": [USER], "stream": True, "max_tokens": 512,
        "prediction": {"type": "content", "content": "def f():\n    return 1\n"},
    },
    "client's own message": {
        "messages": [
            USER, {"role": "assistant", "content": "y", "refusal": None, "annotations": [], "audio": None,
                   "function_call": None, "tool_calls": None}, USER,
        ]
    },
}  # fmt: skip
COMPLETIONS: dict[str, dict[str, Any]] = {
    "LangChain": {
        "prompt": ["x"], "temperature": 0.7, "top_p": 1, "frequency_penalty": 0, "presence_penalty": 0, "n": 1,
        "max_tokens": 256, "seed": None, "logprobs": None,
    },
    "lm-eval": {
        "prompt": [[5, 6, 7], [8, 9]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "seed": 1234, "echo": True,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    app, _, _ = scripted(lambda _: "some words")
    with running(app) as address, httpx.Client(base_url=f"{address}/v1", timeout=60) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat/completions", one) for one in CHATS.values()] + [("completions", one) for one in COMPLETIONS.values()],
    ids=[*CHATS, *(f"{name}: completion" for name in COMPLETIONS)],
)
def test_bodies_of_real_clients_are_accepted(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(f"/{path}", json={"model": "m", **body})
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        usages = [json.loads(one).get("usage") for one in events[:-1]]
        assert bool(usages[-1]) is ("stream_options" in body), "usage where it is asked for"
    else:
        assert answer.json()["choices"] and answer.json()["usage"]["completion_tokens"] > 0
