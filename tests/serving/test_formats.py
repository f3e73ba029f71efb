"""What OpenAI's format means here: requests field by field, answers, and text that ends before a stop string."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.core.errors import SamplingError
from paceline.engine.stopping import StopChecker, Stopping
from paceline.serving.protocol import ChatRequest, CompletionRequest, RefusedError, read_request
from paceline.serving.responses import DONE, ResponseBuilder, TextDelta, error_event
from paceline.text.stop_strings import StopStringFilter, StopStrings
from paceline.text.tokenizer import IncrementalDetokenizer
from tests.draft.tokenizers_of_two import every_byte
from tests.fakes import Pieces

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: object) -> CompletionRequest:
    request = read_request("completion", {"model": "m", "prompt": "x", **fields})
    assert isinstance(request, CompletionRequest)
    return request


def chat(**fields: object) -> ChatRequest:
    request = read_request("chat", {**CHAT, **fields})
    assert isinstance(request, ChatRequest)
    return request


def test_defaults_are_those_of_the_format() -> None:
    request = completion(user="me", n=1, logprobs=None)
    assert (request.prompts, request.stream, request.num_choices) == (["x"], False, 1)
    params = request.sampling_params
    assert (params.max_new_tokens, params.temperature, params.do_sample, params.stop_strings) == (16, 1.0, True, None)
    assert chat().sampling_params.max_new_tokens is None
    assert completion().sampling_params.seed != completion().sampling_params.seed


def test_fields_that_change_nothing_are_passed_over() -> None:
    nothing = {"presence_penalty": 0, "frequency_penalty": 0.0, "echo": False, "best_of": 1, "logit_bias": {},
               "metadata": {"a": "b"}, "store": False, "stream_options": {"include_usage": True}}  # fmt: skip
    assert completion(**nothing).stream_options.include_usage
    assert chat(response_format={"type": "text"}, modalities=["text"], tool_choice="none")


def test_all_forms_of_a_prompt_and_of_a_message() -> None:
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (message,) = chat(messages=[{"role": "user", "content": parts}]).messages
    assert (message.role, message.text) == ("user", "ab")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": None}, "prompt"), ({"prompt": []}, "prompt"), ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"model": 3}, "model"),
        ({"n": 2}, "n"), ({"frequency_penalty": 0.5}, "frequency_penalty"), ({"logprobs": 5}, "logprobs"),
        ({"temperature": "hot"}, "temperature"), ({"max_tokens": True}, "max_tokens"), ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 5}, "stop"), ({"stream": "yes"}, "stream"), ({"beams": 3}, "beams"), ({"echo": True}, "echo"),
        ({"stream_options": 3}, "stream_options"), ({"logprobs": 0}, "logprobs"), ({"logprobs": False}, "logprobs"),
        ({"messages": CHAT["messages"]}, "messages"), ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"stop": "\ud800"}, "stop"), ({"stop": ["a", "\udfffb"]}, "stop"), ({"prompt": "x\ud83d"}, "prompt"),
        ({"temperature": "9" * 10**6}, "temperature"), ({"suffix": "9" * 10**6}, "suffix"),
        ({"temperature": 10**400}, "temperature"), ({"top_p": -(10**400)}, "top_p"),
        ({"n": True}, "n"), ({"n": 1.0}, "n"), ({"echo": 0}, "echo"), ({"echo": 0.0}, "echo"),
        ({"best_of": True}, "best_of"), ({"presence_penalty": False}, "presence_penalty"),
        ({"logit_bias": []}, "logit_bias"), ({"user": 3}, "user"),
        ({"store": 1}, "store"), ({"metadata": "x"}, "metadata"), ({"stream": 1}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options"),
        ({"model": "\ud800"}, "model"), ({"user": "\ud800"}, "user"), ({"\ud800": 1}, None),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(change: dict, param: str | None) -> None:
    with pytest.raises(RefusedError) as refused:
        completion(**change)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    assert len(json.dumps(refused.value.body, ensure_ascii=False).encode()) < 1000  # as the answer is written


@pytest.mark.parametrize(
    "change",
    [{"prompt": "x"}, {"logprobs": True}, {"echo": False}, {"tools": [{}]}, {"logprobs": 0}, {"top_logprobs": False}],
    ids=str,
)
def test_a_chat_has_other_fields_than_a_completion(change: dict) -> None:
    with pytest.raises(RefusedError) as refused:
        chat(**change)
    assert (refused.value.status, refused.value.param) == (400, *change)
    assert chat(logprobs=False, top_logprobs=0, tools=[]).max_new_tokens is None


@pytest.mark.parametrize(
    ("limits", "param"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 9}, "max_completion_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
    ],
    ids=str,
)
def test_a_limit_of_none_at_all_is_not_no_limit(limits: dict, param: str) -> None:
    """It was taken for a missing one, and the answer went on to the end of the context."""
    with pytest.raises(RefusedError, match=f"{param} must be at least 1, not") as refused:
        chat(**limits)
    assert refused.value.param == param


def test_the_newer_name_of_the_limit_goes_first() -> None:
    assert chat(max_tokens=9).max_new_tokens == 9
    assert chat(max_tokens=9, max_completion_tokens=4).max_new_tokens == 4


def test_greedy_requests_too_are_checked_in_full() -> None:
    for name, value in (("top_p", 2), ("top_k", -5), ("min_p", 3)):
        params = completion(temperature=0, **{name: value}).sampling_params
        assert getattr(params, name) == value and params.do_sample is False
        with pytest.raises(SamplingError, match=name):
            params.sampling_of(0)


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    "change",
    [{"content": [{"type": "text", "text": None}]}, {"content": [{"type": "text"}]}, {"name": "Ann"},
     {"content": [{"type": "text", "text": {"a": 1}}]}, {"tool_calls": [{"id": "1"}]}, {"tool_call_id": "1"}],
    ids=str,
)  # fmt: skip
def test_nothing_of_a_message_is_passed_over(change: dict) -> None:
    """Such parts became "None" or nothing at all in the prompt."""
    with pytest.raises(RefusedError) as refused:
        chat(messages=[HI, {**HI, **change}])
    assert (refused.value.status, refused.value.param) == (400, "messages")
    assert next(iter(change)) in refused.value.message


def test_a_message_comes_back_as_clients_keep_it() -> None:
    said = {"role": "assistant", "content": "a", "refusal": None, "tool_calls": None, "annotations": []}
    message = chat(messages=[HI, said]).messages[1]
    assert (message.role, message.text) == ("assistant", "a")


@pytest.mark.parametrize(
    "messages", [None, [], [{}], [{"role": "user"}], [{"role": "user", "content": [{"type": "x"}]}]]
)
def test_messages_that_are_none(messages: object) -> None:
    with pytest.raises(RefusedError):
        chat(messages=messages)
    with pytest.raises(RefusedError):
        read_request("chat", [])


def events(data: bytes) -> list[dict]:
    return [
        json.loads(line.removeprefix("data: ")) for line in data.decode().split("\n\n") if line and "[DONE]" not in line
    ]


def streamed(request: CompletionRequest | ChatRequest) -> list[dict]:
    builder = ResponseBuilder(request, 3)
    data = b"".join(map(builder.event, [TextDelta(0, "a", 1), TextDelta(0, "", 1), TextDelta(0, "b", 2, "stop")]))
    data += builder.last_event()
    assert data.endswith(DONE)
    return events(data)


def test_a_chat_begins_with_its_role_and_ends_with_a_reason() -> None:
    found = streamed(chat(stream=True, stream_options={"include_usage": True}))
    deltas = [event["choices"][0]["delta"] for event in found if event["choices"]]
    assert deltas == [{"role": "assistant", "content": "a"}, {}, {"content": "b"}]
    assert [e["choices"][0]["finish_reason"] for e in found[:-1]] == [None, None, "stop"]
    assert found[-1]["choices"] == [] and found[-1]["usage"]["completion_tokens"] == 4
    assert len({(e["id"], e["created"], e["object"]) for e in found}) == 1
    assert all(e["usage"] is None for e in found[:-1])


def test_a_completion_counts_and_joins() -> None:
    builder = ResponseBuilder(completion(prompt=["x", "y"]), 5)
    for delta in (TextDelta(1, "b", 1), TextDelta(0, "a", 2, "length"), TextDelta(1, "c", 1, "stop")):
        builder.add(delta)
    whole = builder.response()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in whole["choices"]] == [  # type: ignore[attr-defined]
        (0, "a", "length"), (1, "bc", "stop"),
    ]  # fmt: skip
    assert whole["usage"] == {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}
    (error,) = events(error_event(RefusedError(503, "gone")))
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
    stop = StopStrings.of(StopStrings(tuple(stops), scope="output"))
    filter_ = StopStringFilter(stop, Pieces([bytes([b]) for b in range(256)]))
    ids = list(text.encode())
    parts = ["".join(map(filter_.push, ids[at : at + split])) for at in range(0, len(ids), split)]
    assert not any(stop[:2] in part for stop in stops for part in parts if "END" in text)
    assert "".join(parts) + filter_.flush() == says


TOKENIZER = every_byte()
A, B = (TOKENIZER.encode(letter)[0] for letter in "ab")
PART = TOKENIZER.encode("\u00ff")[0]


@settings(deadline=None, max_examples=200)
@example(tokens=[A, *[0] * 12, B], stops=["ab"], split=1)
@example(tokens=[PART, PART, A], stops=["\ufffda"], split=2)
@given(
    tokens=st.lists(st.sampled_from([0, A, B, PART, PART + 1, *TOKENIZER.encode("\u65e5")]), max_size=12),
    stops=st.lists(st.sampled_from(["ab", "a", "b\ufffd", "\u65e5a", "\ufffda", "ba<e>"]), min_size=1, max_size=3),
    split=st.integers(0, 3),
)
def test_a_text_is_cut_where_it_was_stopped(tokens: list[int], stops: list[str], split: int) -> None:
    """The model's worker stops, and the server cuts: in the same text, without special tokens."""
    prompt, new = tokens[:split], tokens[split:]
    stop = StopStrings(tuple(stops), scope="output")
    checker = StopChecker(Stopping(10**6, stop_strings=stop, tokenizer=TOKENIZER), prompt)
    filter_, detokenizer = StopStringFilter(stop, TOKENIZER, prompt), IncrementalDetokenizer(TOKENIZER, prompt)
    said, whole, stopped = "", "", False
    for token in new:
        said, whole = said + filter_.push(token), whole + detokenizer.push(token)
        stopped = checker.append(token) == "stop"
        if stopped:
            break
    said, whole = said + filter_.flush(), whole + detokenizer.flush()
    found = [at for stop in stops if (at := whole.find(stop)) >= 0]
    assert said == whole[: min(found, default=len(whole))]
    assert found or not stopped
    assert stopped or not found or whole.endswith("\ufffd")  # an unfinished character at the end may yet be another


def test_a_special_token_ends_a_text_by_its_name() -> None:
    stop = StopStrings(("<e>",), scope="output")
    stopping = Stopping(100, stop_strings=stop, tokenizer=TOKENIZER)
    checker = StopChecker(stopping, [A])
    assert [checker.append(token) for token in (A, 0)] == [None, "stop"]
    spelled = StopChecker(stopping, [A])
    assert [spelled.append(token) for token in TOKENIZER.encode("<e")] == [None] * len(TOKENIZER.encode("<e"))
