"""What OpenAI's format means here: requests field by field, answers, and text that ends before a stop string."""

from __future__ import annotations

import json

import pytest

from paceline.serving.answers import DONE, Answer, TextPiece, failure_event
from paceline.serving.asks import Ask, Message, RefusedError, read
from paceline.serving.text import Writer
from tests.fakes import Pieces

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def test_defaults_are_those_of_the_format() -> None:
    ask = read("completion", {"model": "m", "prompt": "x", "user": "me", "n": 1, "logprobs": None})
    assert (ask.limit, ask.temperature, ask.prompts, ask.stream, ask.stop) == (16, 1.0, ("x",), False, ())
    assert read("chat", CHAT).limit is None
    assert (
        read("completion", {"model": "m", "prompt": "x"}).seed != read("completion", {"model": "m", "prompt": "x"}).seed
    )


def test_all_forms_of_a_prompt_and_of_a_message() -> None:
    def prompts(value: object) -> object:
        return read("completion", {"model": "m", "prompt": value}).prompts

    assert prompts(["a", "b"]) == ("a", "b")
    assert prompts([1, 2]) == ((1, 2),)
    assert prompts([[1], [2, 3]]) == ((1,), (2, 3))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read("chat", {"model": "m", "messages": [{"role": "user", "content": parts}]}).messages == (
        Message("user", "ab"),
    )


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": [True]}, "prompt"),
        ({"model": 3}, "model"),
        ({"n": 2}, "n"), ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"logprobs": 5}, "logprobs"),
        ({"temperature": "hot"}, "temperature"), ({"max_tokens": True}, "max_tokens"), ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"), ({"stream": "yes"}, "stream"), ({"beams": 3}, "beams"), ({"echo": True}, "echo"),
        ({"stream_options": 3}, "stream_options"), ({"logprobs": 0}, "logprobs"), ({"logprobs": False}, "logprobs"),
        ({"messages": CHAT["messages"]}, "messages"), ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"stop": "\ud800"}, "stop"), ({"stop": ["a", "\udfffb"]}, "stop"), ({"prompt": "x\ud83d"}, "prompt"),
        ({"temperature": 10**400}, "temperature"), ({"top_p": -(10**400)}, "top_p"),
        ({"model": "\ud800"}, "model"), ({"user": "\ud800"}, "user"), ({"\ud800": 1}, None),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(change: dict, param: str | None) -> None:
    with pytest.raises(RefusedError) as refused:
        read("completion", {"model": "m", "prompt": "x", **change})
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert json.dumps(refused.value.body, ensure_ascii=False).encode()  # as the answer is written


@pytest.mark.parametrize("change", [{"prompt": "x"}, {"logprobs": True}, {"echo": False}, {"tools": [{}]}], ids=str)
def test_a_chat_has_other_fields_than_a_completion(change: dict) -> None:
    with pytest.raises(RefusedError) as refused:
        read("chat", {**CHAT, **change})
    assert (refused.value.status, refused.value.param) == (400, *change)
    assert read("chat", {**CHAT, "logprobs": False, "top_logprobs": 0, "tools": []}).limit is None


def test_a_limit_of_none_at_all_is_not_no_limit() -> None:
    """The worker refuses it; it was taken for a missing one, and the answer went on to the end of the context."""
    assert read("chat", {**CHAT, "max_completion_tokens": 0}).limit == 0
    assert read("chat", {**CHAT, "max_completion_tokens": 0, "max_tokens": 9}).limit == 0
    assert read("chat", {**CHAT, "max_tokens": 9}).limit == 9


@pytest.mark.parametrize(
    "messages", [None, [], [{}], [{"role": "user"}], [{"role": "user", "content": [{"type": "x"}]}]]
)
def test_messages_that_are_none(messages: object) -> None:
    with pytest.raises(RefusedError):
        read("chat", {"model": "m", "messages": messages})
    with pytest.raises(RefusedError):
        read("chat", [])


def events(data: bytes) -> list[dict]:
    return [
        json.loads(line.removeprefix("data: ")) for line in data.decode().split("\n\n") if line and "[DONE]" not in line
    ]


def streamed(ask: Ask) -> list[dict]:
    answer = Answer(ask, 3)
    data = b"".join(map(answer.event, [TextPiece(0, "a", 1), TextPiece(0, "", 1), TextPiece(0, "b", 2, "stop")]))
    data += answer.last()
    assert data.endswith(DONE)
    return events(data)


def test_a_chat_begins_with_its_role_and_ends_with_a_reason() -> None:
    found = streamed(read("chat", {**CHAT, "stream": True, "stream_options": {"include_usage": True}}))
    deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
    assert deltas == [{"role": "assistant", "content": "a"}, {}, {"content": "b"}]
    assert [e["choices"][0]["finish_reason"] for e in found[:-1]] == [None, None, "stop"]
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 4
    assert len({(e["id"], e["created"], e["object"]) for e in found}) == 1
    assert all(e["usage"] is None for e in found[:-1])


def test_a_completion_counts_and_joins() -> None:
    ask = read("completion", {"model": "m", "prompt": ["x", "y"]})
    answer = Answer(ask, 5)
    for piece in (TextPiece(1, "b", 1), TextPiece(0, "a", 2, "length"), TextPiece(1, "c", 1, "stop")):
        answer.add(piece)
    whole = answer.whole()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in whole["choices"]] == [  # type: ignore[attr-defined]
        (0, "a", "length"), (1, "bc", "stop"),
    ]  # fmt: skip
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    (error,) = events(failure_event(RefusedError(503, "gone")))
    assert error["error"]["type"] == "server_error"


@pytest.mark.parametrize("split", [1, 2, 7])
@pytest.mark.parametrize(
    ("text", "stops", "says"),
    [
        ("one END two", ["END"], "one "),
        ("one EN", ["END"], "one EN"),
        ("aEbEND", ["ENX", "END"], "aEb"),
        ("x", [], "x"),
    ],
)
def test_text_ends_before_a_stop_string(text: str, stops: list[str], says: str, split: int) -> None:
    writer = Writer(Pieces([bytes([b]) for b in range(256)]), [], stops)  # type: ignore[arg-type]
    ids = list(text.encode())
    parts = [writer.push(ids[at : at + split]) for at in range(0, len(ids), split)]
    assert not any(stop[:2] in part for stop in stops for part in parts if "END" in text)
    assert "".join(parts) + writer.end() == says
