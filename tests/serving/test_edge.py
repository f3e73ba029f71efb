"""OpenAI's API as its own client sees it: answers, streams, tools, reasoning, responses. The engine is scripted."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from paceline.serving.model_server import sampling_params
from paceline.serving.openai.requests import ChatRequest
from tests.serving.edge import ScriptedEngine, chat_tokenizer, client_of, messages_of, scripted, texts
from tests.waiting import until

CALLS = (
    'Let me see. <tool_call>\n{"name": "weather", "arguments": {"city": "Z\u00fcrich {x}", "days": 2}}\n'
    '</tool_call>\n<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>'
)
SAYS = {
    "plain": "Caf\u00e9 \u65e5\u672c\u8a9e, we go up!",
    "tool": CALLS,
    "called": "<think>one <tool_call> or two?</think>" + CALLS,
    "think": "<think>\nhmm, 2 < 3\n</think>\n\nTwo.",
    "opened": "so it is\n</think>\n\nYes.",
    "broken": "<tool_call>no json</tool_call> sorry",
    "stops": "one two three four",
}
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("weather", "add")
]
WEATHER = {"city": "Z\u00fcrich {x}", "days": 2}


def say(prompt: str) -> str:
    """By the name that was said last, or is the whole prompt."""
    return SAYS[(re.findall(r"\[(?:user|tool)\](\w+)", prompt) or [prompt])[-1]]


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[openai.OpenAI, ScriptedEngine]]:
    app, engine, _ = scripted(say, spec_metrics="detailed")
    with client_of(app) as client:
        yield client, engine


@pytest.fixture
def client(served: tuple[openai.OpenAI, ScriptedEngine]) -> openai.OpenAI:
    return served[0]


def ask(client: openai.OpenAI, content: str, **fields: Any) -> Any:
    return client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}], **fields)


def test_models_report_their_metadata(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, client.models.retrieve("m").id) == ("m", "m")
    about: Any = model.model_extra
    assert about["max_model_len"] == 4096
    assert about["paceline"]["drafters"] == ["draft", "ngram"]
    assert [one["cores"] for one in about["paceline"]["placement"]] == [[0, 1], [2]]
    assert (about["paceline"]["tools"], about["paceline"]["reasoning"]) == ("hermes", "deepseek_r1")


def test_a_response_equals_its_stream(client: openai.OpenAI) -> None:
    whole = ask(client, "plain", n=2)
    assert [choice.message.content for choice in whole.choices] == [SAYS["plain"]] * 2
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    chunks = list(ask(client, "plain", stream=True, stream_options={"include_usage": True}))
    assert texts(chunks) == SAYS["plain"]
    assert (chunks[0].choices[0].delta.role, chunks[-2].choices[0].finish_reason) == ("assistant", "stop")
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens * 2 == whole.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_acceptance_is_reported_as_vllm_does(client: openai.OpenAI) -> None:
    found = ask(client, "plain").model_extra["metrics"]["speculative_decoding"]
    drafted, accepted = found["per_step_drafted"], found["per_step_accepted"]
    assert found["num_spec_steps"] == len(drafted) == sum(found["acceptance_histogram"]) > 3
    assert found["num_draft_tokens"] == sum(drafted) and found["num_accepted_draft_tokens"] == sum(accepted)
    assert found["mean_acceptance_length"] == 1 + sum(accepted) / len(drafted)
    assert found["num_spec_tokens"] == 3
    rows = found["acceptance_histogram_by_draft_length"]
    assert {int(k): sum(row) for k, row in rows.items()} == {k: drafted.count(k) for k in set(drafted)}
    last = list(ask(client, "plain", stream=True, stream_options={"include_usage": True}))[-1]
    assert last.model_extra["metrics"]["speculative_decoding"] == found
    assert "metrics" not in ask(client, "plain", n=2).model_extra
    short = ask(client, "plain", extra_body={"speculative": {"metrics": "summary"}}).model_extra["metrics"]
    assert "per_step_drafted" not in short["speculative_decoding"]
    assert "metrics" not in ask(client, "plain", extra_body={"speculative": {"enabled": False}}).model_extra


def test_origins_of_tokens_add_up_to_the_text(client: openai.OpenAI) -> None:
    chunks = list(ask(client, "plain", stream=True, extra_body={"return_token_origins": True}))
    tokens = [one for chunk in chunks for one in chunk.choices[0].model_extra["token_origins"]]
    assert "".join(one["text"] for one in tokens) == SAYS["plain"]
    assert {one["origin"] for one in tokens} == {"draft", "corrected", "target"}
    whole = client.completions.create(model="m", prompt="plain", extra_body={"return_token_ids": True}, max_tokens=5)
    assert len(whole.choices[0].model_extra["token_ids"]) == 5  # type: ignore[index]


def test_tool_calls_are_parsed(client: openai.OpenAI, served: tuple[openai.OpenAI, ScriptedEngine]) -> None:
    (choice,) = ask(client, "tool", tools=TOOLS).choices
    assert (choice.message.content, choice.finish_reason) == ("Let me see. ", "tool_calls")
    first, second = choice.message.tool_calls
    assert (first.function.name, json.loads(first.function.arguments)) == ("weather", WEATHER)
    assert (second.function.name, json.loads(second.function.arguments)) == ("add", {"a": 1})
    assert first.id != second.id
    assert ask(client, "tool").choices[0].message.content == SAYS["tool"]  # nobody asked for tools
    (broken,) = ask(client, "broken", tools=TOOLS).choices  # an invalid call stays text
    assert (broken.message.content, broken.message.tool_calls, broken.finish_reason) == (SAYS["broken"], None, "stop")
    back = [{"role": "user", "content": "?"}, choice.message.model_dump(exclude_none=True)]
    back.append({"role": "tool", "tool_call_id": first.id, "content": "plain"})
    answer = client.chat.completions.create(model="m", messages=back, tools=TOOLS)
    assert answer.choices[0].message.content == SAYS["plain"]
    prompt = served[1].tokenizer.decode(list(served[1].calls[-1].requests[0].prompt))
    assert prompt.startswith("[tools]weather add") and 'weather {"city"' in prompt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["tool", "called"])
def test_a_response_of_one_tool_call_ends_with_it(
    served: tuple[openai.OpenAI, ScriptedEngine], said: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that the model would write after it are neither waited for nor counted, and its slots are free."""
    (client, engine), asked = served, {"tools": TOOLS, "parallel_tool_calls": False, "n": 2, "stream": stream}
    monkeypatch.setattr(engine, "in_turn", True)
    before = len(engine.ended)
    options = {"stream_options": {"include_usage": True}} if stream else {}
    found = ask(client, said, **asked, **options)
    parts = list(found) if stream else [found]
    reasons = [choice.finish_reason for part in parts for choice in part.choices if choice.finish_reason]
    assert reasons == ["tool_calls"] * 2
    first = SAYS[said].index("</tool_call>") + len("</tool_call>")
    assert parts[-1].usage.completion_tokens == 2 * len(engine.tokenizer.encode(SAYS[said][:first]))
    ticket = engine.calls[-1].ticket
    assert (ticket, 0) in engine.left  # while the other choice was written
    # Its generator is closed after the last byte of the answer.
    until(lambda: ticket in engine.ended[before:], what="the engine still writes")


@pytest.mark.parametrize(("parallel", "most"), [(False, 1), (True, None)])
def test_without_parallel_tool_calls_only_one_call_is_made(parallel: bool, most: int | None) -> None:
    """By their grammar, which functions with `strict` may count on."""
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    asked = {"tools": strict, "tool_choice": "required", "parallel_tool_calls": parallel}
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], **asked})
    structured = sampling_params(request, chat_tokenizer()).structured_outputs
    assert structured is not None and isinstance(structured.value, dict)
    assert (structured.value["minItems"], structured.value.get("maxItems")) == (1, most)


def test_tool_calls_are_streamed_incrementally(client: openai.OpenAI) -> None:
    chunks = list(ask(client, "tool", tools=TOOLS, stream=True))
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    written: dict[int, str] = {0: "", 1: ""}
    for piece in pieces:
        written[piece.index] += piece.function.arguments
    assert json.loads(written[0]) == WEATHER and json.loads(written[1]) == {"a": 1}
    assert [piece.function.name for piece in pieces if piece.function.name] == ["weather", "add"]
    assert len([piece for piece in pieces if piece.index == 0]) > 5
    assert texts(chunks) == "Let me see. " and chunks[-1].choices[0].finish_reason == "tool_calls"


def test_markers_that_are_special_tokens_are_found() -> None:
    """Mistral's markers are not text for a tokenizer that leaves out special tokens, as responses do with all
    others.
    """
    weather = '{"city": "Z\u00fcrich {x}", "days": 2}'
    text = f"[THINK]2 < 3[/THINK]Well.[TOOL_CALLS]weather[ARGS]{weather}[TOOL_CALLS]add[ARGS]{{}}<x>"
    template = "{% if tools %}[TOOL_CALLS]{% endif %}{{ messages[-1].content }}{# [THINK] [/THINK] #}"
    special = ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "<x>"]
    app, _, _ = scripted(lambda _: text, template, special)
    with client_of(app) as client:
        (choice,) = ask(client, "?", tools=TOOLS).choices
        chunks = list(ask(client, "?", tools=TOOLS, stream=True))
        not_asked = ask(client, "?")
        plain = client.completions.create(model="m", prompt="?", max_tokens=200).choices[0].text
        about: Any = client.models.list().data[0].model_extra
    assert (choice.message.reasoning, choice.message.content) == ("2 < 3", "Well.")
    found = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert found == [("weather", WEATHER), ("add", {})] and texts(chunks) == "Well."
    assert plain == f"2 < 3Well.weather{weather}add{{}}"
    assert not_asked.choices[0].message.content == plain.removeprefix("2 < 3")
    assert (about["paceline"]["tools"], about["paceline"]["reasoning"]) == ("mistral", "mistral")


@pytest.mark.parametrize(("asked", "thought", "answer"), [("think", "\nhmm, 2 < 3\n", "Two."), ("plain", None, None)])
def test_reasoning_is_separated(client: openai.OpenAI, asked: str, thought: str | None, answer: str | None) -> None:
    message = ask(client, asked).choices[0].message
    assert (message.model_extra.get("reasoning"), message.content) == (thought, answer or SAYS[asked])
    chunks = list(ask(client, asked, stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.model_extra.get("reasoning", "") for delta in deltas) == (thought or "")
    assert texts(chunks) == (answer or SAYS[asked])


def test_reasoning_opened_by_the_template_is_recognised(client: openai.OpenAI) -> None:
    kwargs = {"chat_template_kwargs": {"open_reasoning": True}}
    message = ask(client, "opened", extra_body=kwargs).choices[0].message
    assert (message.model_extra["reasoning"], message.content) == ("so it is\n", "Yes.")


def test_completions_stop_echo_and_count(client: openai.OpenAI) -> None:
    done = client.completions.create(model="m", prompt=["stops", "plain"], max_tokens=60, echo=True, stop=" three")
    assert [choice.text for choice in done.choices] == ["stopsone two", "plain" + SAYS["plain"]]
    cut = client.completions.create(model="m", prompt="stops", max_tokens=4)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 4)  # type: ignore[union-attr]


def test_responses_make_function_calls(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}]
    with client.responses.stream(model="m", input="tool", tools=tools) as stream:
        kinds = [event.type for event in stream]
        done: Any = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    calls = [item for item in done.output if item.type == "function_call"]
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", WEATHER), ("add", {"a": 1})]
    sent: Any = [*done.output, {"type": "function_call_output", "call_id": calls[0].call_id, "output": "plain"}]
    back = client.responses.create(
        model="m", input=[item if isinstance(item, dict) else item.to_dict() for item in sent], tools=tools
    )
    assert back.output_text == SAYS["plain"]


def test_tokenize_and_detokenize_round_trip(client: openai.OpenAI) -> None:
    def post(path: str, **body: Any) -> Any:
        return client.post(f"/../{path}", body={"model": "m", **body}, cast_to=object)

    found = post("tokenize", prompt="h\u00e9")
    assert found["count"] == len(found["tokens"]) == 2
    assert post("detokenize", tokens=found["tokens"]) == {"prompt": "h\u00e9"}
    chat = post("tokenize", messages=[{"role": "user", "content": "a"}])
    assert post("detokenize", tokens=chat["tokens"]) == {"prompt": "[user]a[assistant]"}


def test_the_finish_reason_is_sent_with_the_last_chunk() -> None:
    """Between Ray Serve's processes every piece is a message, and an empty one costs as much as any other."""
    app, _, _ = scripted(say)
    body = {"model": "m", "prompt": "plain", "stream": True}
    asked = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not asked:
            await asyncio.sleep(60)  # the client waits for its answer
        return asked.pop()

    sent = messages_of(app, receive)
    assert [one["type"] for one in sent] == ["http.response.start"] + ["http.response.body"] * (len(sent) - 1)
    assert [one["more_body"] for one in sent[1:]] == [True] * (len(sent) - 2) + [False]
    assert all(one["body"] for one in sent[1:]) and sent[-1]["body"].endswith(b"data: [DONE]\n\n")
