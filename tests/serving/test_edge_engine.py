"""The HTTP edge over a real engine with a small model: same tokens in every mode, resumed at any token, structured."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest
from fastapi import FastAPI

from paceline import SpeculativeGenerator
from paceline.draft_spec import DraftSpec, parse_draft
from paceline.engine.request import Request
from paceline.serving.api import create_app
from paceline.serving.metrics import MetricSet
from paceline.serving.model_server import ChatFormat, LocalRouter, ModelServer, chat_prompts, sampling_params
from paceline.serving.openai.fields import read_body
from paceline.serving.openai.requests import ChatRequest, CompletionRequest, ResponsesRequest
from paceline.serving.router import Failed, GenerationRequest, RequestContext, StreamChunk, StreamStart
from paceline.serving.settings import ApiSettings
from paceline.text.tokenizer import TokenBytes
from paceline.workers.shared_engine import SharedEngine
from tests.decoder.tiny import CHUNK, Workshop, fresh
from tests.fakes import TableDecoder, near, table
from tests.serving.edge import TEMPLATE, card, client_of
from tests.serving.replicas import BareReplica
from tests.serving.small_vocabulary import letters
from tests.waiting import in_loop

TOKENIZER = letters(TEMPLATE)
V = len(TOKENIZER)
TARGET = table(V, seed=0, spread=1.5)
DRAFT = near(TARGET, seed=1, spread=0.6)
CONTEXT = RequestContext("abc", 1_700_000_000, spec_metrics="detailed")


def generator(positions: int = 512) -> SpeculativeGenerator:
    target, draft = (TableDecoder(logits, slots=4, kv_buckets=(positions,), eos=(0,)) for logits in (TARGET, DRAFT))
    return SpeculativeGenerator(draft, target, k=3)


def server(engine: SharedEngine | None = None) -> ModelServer:
    engine = engine or SharedEngine(generator())
    return ModelServer(TOKENIZER, engine, engine.generator.limits, card=card())


def application(engine: SharedEngine | None = None, **settings: Any) -> FastAPI:
    return create_app(LocalRouter({"m": server(engine)}), ApiSettings(**settings))


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with client_of(application(spec_metrics="detailed")) as made:
        yield made


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    extra = fields.pop("extra_body", {"ignore_eos": True})
    base = {"model": "m", "prompt": "abc", "max_tokens": 60, "seed": 5, "extra_body": extra}
    return client.completions.create(**base | fields)


def test_a_request_names_a_drafter_of_the_choice() -> None:
    """The text is the same with each of them; another name is rejected by its field."""
    target = TableDecoder(TARGET, slots=2, kv_buckets=(512,), eos=(0,))
    engine = SharedEngine(
        SpeculativeGenerator(DraftSpec("choice", parts=parse_draft(["ngram", "suffix"])), target, k=3)
    )
    with client_of(application(engine)) as client:
        modes: list[dict[str, object]] = [{"drafter": "ngram"}, {"drafter": "suffix", "k": 2}, {}, {"enabled": False}]
        found = [complete(client, extra_body={"speculative": mode, "ignore_eos": True}) for mode in modes]
        assert len({one.choices[0].text for one in found}) == 1 and found[0].usage.completion_tokens == 60
        for mode, words in (
            ({"drafter": "model"}, "expected one of 'ngram', 'suffix', got 'model'"),
            ({"drafter": "ngram", "k": 0}, "expected none where nothing is drafted"),
        ):
            with pytest.raises(openai.BadRequestError, match=words) as refused:
                complete(client, extra_body={"speculative": mode})
            assert "drafter" in str(refused.value.body)


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_text_is_the_same_in_every_mode(client: openai.OpenAI, temperature: float) -> None:
    asked = [{"speculative": one, "ignore_eos": True} for one in ({}, {"enabled": False}, {"k": 0}, {"k": 1}, {"k": 2})]
    found = [complete(client, temperature=temperature, extra_body=one) for one in asked]
    assert len({one.choices[0].text for one in found}) == 1 and found[0].usage.completion_tokens == 60
    drafted = [((one.model_extra.get("metrics") or {}).get("speculative_decoding") or {}) for one in found]
    assert [max(one.get("per_step_drafted", [0])) for one in drafted] == [3, 0, 0, 1, 2]
    params = {"max_new_tokens": 60, "seed": 5, "do_sample": temperature > 0, "temperature": 1.0, "ignore_eos": True}
    offline: Any = generator().sample([TOKENIZER.encode("abc")], return_dict=True, **params)
    assert found[0].choices[0].text == TOKENIZER.decode(offline.sequences[0, 3:], skip_special_tokens=True)
    own, names = offline.statistics, ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps")
    assert [drafted[0][name] for name in names] == [own.num_draft_tokens, own.num_accepted_tokens, own.num_drafts]
    assert own.num_accepted_tokens > 0


def test_n_samples_of_one_seed_differ(client: openai.OpenAI) -> None:
    drawn = complete(client, n=4, logprobs=0)
    texts = [choice.text for choice in drawn.choices]
    assert len(set(texts)) == 4 and texts[0] == complete(client).choices[0].text
    assert drawn.usage.completion_tokens == 240


def test_a_corrected_token_names_the_rejected_draft(client: openai.OpenAI) -> None:
    extra: dict[str, Any] = {"ignore_eos": True, "return_token_origins": True, "return_token_ids": True}
    asked: dict[str, Any] = {"temperature": 0, "logprobs": 0, "extra_body": extra}
    (choice,) = complete(client, **asked).choices
    ids, origins = choice.model_extra["token_ids"], choice.model_extra["token_origins"]
    corrected = [place for place, one in enumerate(origins) if one["origin"] == "corrected"]
    assert corrected and [place for place, one in enumerate(origins) if "drafted" in one] == corrected
    for place in corrected[1:]:
        proposed = int(DRAFT[ids[place - 2], ids[place - 1]].argmax())
        assert origins[place]["drafted"] == [TokenBytes(TOKENIZER)(proposed).decode()] and proposed != ids[place]
    (plain,) = complete(client, **asked | {"logprobs": None}).choices
    assert all("drafted" not in one for one in plain.model_extra["token_origins"])
    assert plain.model_extra["token_ids"] == ids


def test_bias_and_penalties_reach_the_engine(client: openai.OpenAI) -> None:
    (letter,) = TOKENIZER.encode("q")
    assert complete(client, logit_bias={str(letter): 100}, max_tokens=9).choices[0].text == "q" * 9
    plain = complete(client, temperature=0).choices[0].text
    varied = complete(client, temperature=0, frequency_penalty=2.0).choices[0].text
    assert len(set(varied)) > len(set(plain))


FIELDS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of a request, and of the engine
    ({"top_p": 0.4}, {"top_p": 0.4}),
    ({"extra_body": {"top_k": 2}}, {"top_k": 2}),
    ({"extra_body": {"min_p": 0.3}}, {"min_p": 0.3}),
    ({"temperature": 0.4}, {"temperature": 0.4}),
    ({"presence_penalty": 2.0}, {"presence_penalty": 2.0}),
    ({"frequency_penalty": 2.0}, {"frequency_penalty": 2.0}),
    ({"extra_body": {"repetition_penalty": 3.0}}, {"repetition_penalty": 3.0}),
    ({"seed": 6}, {"seed": 6}),
    ({"stop": "x"}, {"stop_strings": "x", "tokenizer": TOKENIZER}),
]


@pytest.mark.parametrize(("fields", "params"), FIELDS, ids=lambda one: next(iter(one.get("extra_body", one))))
def test_request_fields_reach_the_engine(client: openai.OpenAI, fields: dict[str, Any], params: dict[str, Any]) -> None:
    extra = {"ignore_eos": True, **fields.get("extra_body", {})}
    text = complete(client, **{**fields, "extra_body": extra}).choices[0].text
    assert text != complete(client).choices[0].text
    base = {"max_new_tokens": 60, "seed": 5, "do_sample": True, "ignore_eos": True}
    (row,) = generator().sample([TOKENIZER.encode("abc")], **base | params).tolist()
    wanted = TOKENIZER.decode(row[3:], skip_special_tokens=True)
    assert text == (wanted.partition("x")[0] if "stop" in fields else wanted)


def test_every_name_of_the_length_limit_is_accepted(client: openai.OpenAI) -> None:
    chat: Any = {"model": "m", "messages": [{"role": "user", "content": "a"}], "extra_body": {"ignore_eos": True}}
    for fields in ({"max_tokens": 5}, {"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 9}):
        assert client.chat.completions.create(**chat, **fields).usage.completion_tokens == 5
    least = complete(client, extra_body={"min_tokens": 50}, logit_bias={"0": 100}, max_tokens=60)
    assert least.usage.completion_tokens in (50, 51), "its end is as likely as can be, and may not come earlier"


NO_REASONING = {"chat_template_kwargs": {"no_reasoning": True}}
SCHEMA = {
    "type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]


@pytest.mark.parametrize("temperature", [0, 1])
def test_structured_responses_are_valid_and_equal_plain_decoding(client: openai.OpenAI, temperature: float) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    texts = set()
    for mode in ({}, {"enabled": False}):
        chat = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "a"}], response_format=form, max_tokens=300, seed=3,
            temperature=temperature, extra_body={"speculative": mode, **NO_REASONING},
        )  # fmt: skip
        texts.add(chat.choices[0].message.content)
        assert chat.choices[0].finish_reason == "stop"
    (text,) = texts
    assert json.loads(text or "")["a"] in ("x", "yy")
    choice = complete(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}).choices[0]
    assert choice.text in ("yes", "no")
    regex = {"structured_outputs": {"regex": "[ab]{3}"}}
    assert complete(client, extra_body=regex).choices[0].text.strip("ab") == ""
    grammar = {"structured_outputs": {"grammar": 'start: "a" tail\ntail: "b" | "c"'}}
    assert complete(client, extra_body=grammar, temperature=temperature).choices[0].text in ("ab", "ac")


ANSWER = '{"a":"x"}'


@pytest.mark.parametrize(
    ("kwargs", "said", "possible"),
    [
        ({}, f"<think>so<a></think>{ANSWER}", True),
        ({}, ANSWER, True),
        ({}, f"so</think>{ANSWER}", False),
        ({"open_reasoning": True}, f"so</think>{ANSWER}", True),
        ({"open_reasoning": True}, ANSWER, False),
        ({"no_reasoning": True}, f"<think>so</think>{ANSWER}", False),
        ({"no_reasoning": True}, ANSWER, True),
    ],
)
def test_reasoning_may_precede_a_structured_response(kwargs: object, said: str, possible: bool) -> None:
    """The template marks the reasoning: the structured part begins after it."""
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "response_format": form}
    request = read_body(ChatRequest, json.dumps({**body, "chat_template_kwargs": kwargs}).encode())
    prompts = chat_prompts(TOKENIZER, request, ChatFormat.of(TOKENIZER))
    params = sampling_params(request, TOKENIZER, prompts.reasoning)
    (asked,) = Request.batch(prompts.ids, params, generator().limits)
    assert asked.rules is not None and asked.rules.grammar is not None
    ids = [*TOKENIZER.encode(said), 0]
    assert (asked.rules.grammar.state().accepts([], ids) == len(ids)) == possible


def test_required_tool_calls_are_made(client: openai.OpenAI) -> None:
    fields: Any = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "max_tokens": 400}
    for choice, names in (("required", {"f", "g"}), ({"type": "function", "function": {"name": "g"}}, {"g"})):
        chat = client.chat.completions.create(**fields, tool_choice=choice, extra_body=NO_REASONING)
        calls = chat.choices[0].message.tool_calls
        assert calls and {call.function.name for call in calls} <= names
        if chat.choices[0].finish_reason != "length":
            assert all(json.loads(call.function.arguments)["a"] in ("x", "yy") for call in calls)


def test_a_model_whose_template_has_no_tools_calls_by_a_grammar() -> None:
    """Text stays free; a list of calls is one that the functions admit, whole or streamed, and the answer says so."""
    tokenizer = letters("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]")
    engine = SharedEngine(generator(2048))
    made = ModelServer(tokenizer, engine, engine.generator.limits, card=card())
    bracket = tokenizer.convert_tokens_to_ids("[")
    with client_of(create_app(LocalRouter({"m": made}), ApiSettings())) as client:
        for bias in (100, -100):
            fields: Any = {"model": "m", "messages": [{"role": "user", "content": "a"}], "tools": TOOLS, "seed": 5,
                           "logit_bias": {bracket: bias}, "max_tokens": 300}  # fmt: skip
            ask: Any = client.chat.completions.create
            whole = ask(**fields)
            assert whole.model_extra["tool_call_format"] == "generic"
            (choice,) = whole.choices
            chunks = list(ask(**fields, stream=True))
            assert {chunk.model_extra["tool_call_format"] for chunk in chunks} == {"generic"}
            pieces = [chunk.choices[0].delta for chunk in chunks]
            streamed = "".join(call.function.arguments for piece in pieces for call in piece.tool_calls or [])
            if bias < 0:
                assert choice.message.content and not choice.message.tool_calls and not streamed
                continue
            calls = choice.message.tool_calls
            assert calls and {call.function.name for call in calls} <= {"f", "g"} and not choice.message.content
            assert "".join(call.function.arguments for call in calls) == streamed
            assert json.loads(calls[0].function.arguments)["a"] in ("x", "yy")
            response: Any = client.responses.create(
                model="m", input="a", tools=[{"type": "function", **TOOLS[0]["function"]}], max_output_tokens=9
            )
            assert response.model_extra["tool_call_format"] == "generic"
        nested = {"properties": {"a": {"$ref": "#/$defs/X"}}, "required": ["a"], "$defs": {"X": {"const": "x"}}}
        function = {"name": "f", "parameters": {"type": "object", "additionalProperties": False, **nested}}
        named = {"tools": [{"type": "function", "function": function}], "logit_bias": {bracket: 100}}
        for choice in ("auto", "required"):
            made = ask(**fields | named | {"tool_choice": choice})
            assert json.loads(made.choices[0].message.tool_calls[0].function.arguments) == {"a": "x"}
        structure = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"const": [1]}}}
        (choice,) = ask(**fields, response_format=structure).choices
        assert json.loads(choice.message.content) == [1] and not choice.message.tool_calls


def test_a_prediction_changes_no_token(client: openai.OpenAI) -> None:
    fields: Any = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 30, "seed": 5}
    plain = client.chat.completions.create(**fields)
    text = plain.choices[0].message.content or ""
    again = client.chat.completions.create(**fields, prediction={"type": "content", "content": text})
    assert again.choices[0].message.content == text
    drafted = again.model_extra["metrics"]["speculative_decoding"]  # type: ignore[index]
    assert drafted["num_accepted_draft_tokens"] == drafted["num_draft_tokens"] > 20, "the text itself is drafted"


# ---- resumed by another server


BODIES: list[tuple[type[Any], dict[str, object]]] = [
    (CompletionRequest, {"prompt": "abc", "n": 2, "max_tokens": 9, "echo": True, "ignore_eos": True}),
    (ChatRequest, {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 12, "stop": ["k"]}),
    (ResponsesRequest, {"input": "abc", "max_output_tokens": 12}),
]


async def items(
    made: ModelServer, request: GenerationRequest, skip: Sequence[int] = (), *, interval_s: float = 0.0
) -> list[StreamChunk]:
    found = [item async for item in made.stream(request, replace(CONTEXT, interval_s=interval_s), skip)]
    assert not any(isinstance(item, Failed) for item in found), found
    assert isinstance(found[0], StreamStart)
    return [item for item in found if isinstance(item, StreamChunk)]


@pytest.mark.parametrize("interval_s", [0.0, float("inf")], ids=["every round", "held"])
@pytest.mark.parametrize(("kind", "fields"), BODIES)
@in_loop
async def test_another_server_continues(kind: type[Any], fields: dict[str, object], interval_s: float) -> None:
    """After any chunk: what was sent and what the other sends are the same stream, but for its cuts into events. What
    waited for its chunk when the first was lost was not sent, and comes from the other.
    """
    body = {"model": "m", "stream": True, "seed": 5, "stream_options": {"include_usage": True}, **fields}
    request = read_body(kind, json.dumps(body).encode())
    first, second = server(), server()
    chunks = await items(first, request, interval_s=interval_s)
    whole = contents(b"".join(chunk.data for chunk in chunks))
    for cut in range(1, len(chunks)):
        sent = b"".join(chunk.data for chunk in chunks[:cut])
        rest = await items(second, request, chunks[cut - 1].sent)
        assert contents(sent + b"".join(chunk.data for chunk in rest)) == whole
        assert rest[-1].sent == chunks[-1].sent


def test_a_stream_with_an_interval_has_the_same_text() -> None:
    """Text, log-probabilities, acceptance and usage."""
    body = {"model": "m", "stream": True, "seed": 5, "prompt": "abc", "max_tokens": 80, "ignore_eos": True}
    body |= {"logprobs": 1, "return_token_ids": True, "stream_options": {"include_usage": True}}
    request = read_body(CompletionRequest, json.dumps(body).encode())
    at_once, waited = (asyncio.run(items(server(), request, interval_s=wait)) for wait in (0.0, float("inf")))
    assert len(waited) == 2, "the first events, and all others with the last"
    assert len(at_once) > 10 and (at_once[0].sent, at_once[-1].sent) == (waited[0].sent, waited[-1].sent)
    found = [contents(b"".join(one.data for one in chunks)) for chunks in (at_once, waited)]
    assert found[0] == found[1] and len(found[0]["ids", 0]) == len(found[0]["logprobs", 0]) == 80
    assert found[0]["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0


def test_a_response_without_streaming_is_one_chunk() -> None:
    request = read_body(CompletionRequest, b'{"model": "m", "seed": 5, "prompt": "abc", "max_tokens": 80}')
    (chunk,) = asyncio.run(items(server(), request))
    assert chunk.last and json.loads(chunk.data)["usage"]["completion_tokens"] == sum(chunk.sent)


@in_loop
async def test_a_draining_replica_accepts_no_requests() -> None:
    body = b'{"model": "m", "seed": 5, "prompt": "abc", "max_tokens": 8, "stream": true}'
    request = read_body(CompletionRequest, body)
    made = BareReplica(server())
    assert (await made.usage()).running == 1, "whoever had it loaded is about to use it"
    stream = made.stream(request, CONTEXT)
    await anext(stream)
    assert (await made.usage()).running == 1 and not await made.leave(unless_used=True)
    assert await made.leave(unless_used=False)
    assert [one async for one in stream], "what is under way is answered"
    assert (await made.usage()).running == 0 and await made.leave(unless_used=True)
    (refused,) = [one async for one in made.stream(request, CONTEXT)]
    assert isinstance(refused, Failed) and refused.lost, "another replica is asked, when there is one"
    await made.stay()
    begun, *rest = [one async for one in made.stream(request, CONTEXT)]
    assert isinstance(begun, tuple) and [type(one) for one in begun] == [StreamStart, StreamChunk], "in one message"
    assert begun[0].followed and rest and all(isinstance(one, StreamChunk) for one in rest)


def contents(data: bytes) -> dict[object, Any]:
    """A client's view of a stream: text by choice, roles, finish reasons, usage, numbers of events."""
    found: dict[object, Any] = {}
    for part in data.decode().split("\n\n"):
        line = part.rpartition("data: ")[2]
        if not line or line == "[DONE]":
            continue
        event = json.loads(line)
        if "type" in event:  # of responses: each event is the same
            found.setdefault("events", []).append(event)
        for choice in event.get("choices", []):
            delta = choice.get("delta", choice)
            found[choice["index"]] = found.get(choice["index"], "") + (delta.get("content") or delta.get("text") or "")
            found["role", choice["index"]] = found.get(("role", choice["index"]), 0) + ("role" in delta)
            found["finish", choice["index"]] = choice["finish_reason"]
            found.setdefault(("ids", choice["index"]), []).extend(choice.get("token_ids", []))
            logprobs = (choice.get("logprobs") or {}).get("token_logprobs", [])
            found.setdefault(("logprobs", choice["index"]), []).extend(logprobs)
        found["usage"], found["metrics"] = event.get("usage"), event.get("metrics")
    return found


def _law(ids: list[int]) -> list[float]:
    """Log-probabilities of ids from the second on. The table's row before a text is that of id 0."""
    pairs = zip([0, *ids], ids, ids[1:], strict=False)
    return [float(TARGET[before, last].log_softmax(-1)[token]) for before, last, token in pairs]


@pytest.mark.parametrize("max_tokens", [0, 1, 7])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "prompt",
    ["fox", ["the quick fox", "q", "abc" * 40], TOKENIZER.encode("fox"), list(map(TOKENIZER.encode, ("ab", "q")))],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_an_echoed_prompt_has_a_log_probability_for_each_token(
    client: openai.OpenAI, prompt: Any, stream: bool, max_tokens: int
) -> None:
    """One too few would make the last token of a scored text certain: the harness leaves out the generated one."""
    prompts: list[Any] = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    fields = {"prompt": prompt, "max_tokens": max_tokens, "echo": True, "logprobs": 1, "temperature": 0}
    found = complete(client, stream=stream, **fields)
    choices: dict[int, dict[str, Any]] = {}
    for part in found if stream else [found]:
        for choice in part.choices:
            told = choices.setdefault(choice.index, {"text": "", "logprob": [], "top": [], "tokens": [], "offset": []})
            told["text"] += choice.text
            if choice.logprobs is not None:
                told["logprob"] += choice.logprobs.token_logprobs
                told["top"] += choice.logprobs.top_logprobs
                told["tokens"] += choice.logprobs.tokens
                told["offset"] += choice.logprobs.text_offset
    assert len(choices) == len(prompts)
    for one, told in zip(prompts, (choices[index] for index in sorted(choices)), strict=True):
        ids = TOKENIZER.encode(one) if isinstance(one, str) else one
        counts = {len(told[name]) for name in ("logprob", "top", "tokens", "offset")}
        assert counts == {len(ids) + max_tokens} and told["logprob"][0] is told["top"][0] is None
        assert told["logprob"][1 : len(ids)] == pytest.approx(_law(ids), abs=1e-4)
        assert told["tokens"][: len(ids)] == list(TOKENIZER.decode(ids))
        assert all(len(top) == 1 for top in told["top"][1:])
        greedy = [own == max(top.values()) for own, top in zip(told["logprob"][1:], told["top"][1:], strict=True)]
        assert all(greedy[len(ids) - 1 :]), "what was generated is the likeliest"
        assert told["text"].startswith(TOKENIZER.decode(ids))
        assert told["offset"] == [len("".join(told["tokens"][:place])) for place in range(len(told["tokens"]))]
    if not stream:
        assert found.usage.completion_tokens == max_tokens * len(prompts)
        assert max_tokens or {choice.finish_reason for choice in found.choices} == {"length"}


IDS = random.Random(0).choices(range(3, 60), k=3 * CHUNK)


def test_usage_reports_cached_tokens_and_responses_stay_the_same(workshop: Workshop) -> None:
    answers: dict[bool, list[Any]] = {}
    prompts = (IDS, 1), ([*IDS[:40], 5], 2), (IDS, 1)
    for caching in (False, True):
        target = fresh(workshop.checkpoint(), backend="eager", batch_size=2)
        engine = SharedEngine(SpeculativeGenerator("ngram", target, k=2, prefix_caching=caching))
        with client_of(application(engine)) as client:
            answers[caching] = [complete(client, prompt=ids, max_tokens=9, temperature=1, n=n) for ids, n in prompts]
    texts = {key: [[one.text for one in answer.choices] for answer in found] for key, found in answers.items()}
    assert texts[True] == texts[False]
    assert [answer.usage.prompt_tokens_details for answer in answers[False]] == [None] * 3
    details = [answer.usage.prompt_tokens_details.cached_tokens for answer in answers[True]]
    assert details == [0, 2 * CHUNK, 2 * CHUNK], "the second answer of a prompt took the slot of the first prompt"
    metrics = MetricSet("m", "0")
    metrics.update(engine.figures(), None, num_slots=2)
    lines = metrics.text().splitlines()
    queries, hits = 2 * len(IDS) + 2 * 41, 2 * CHUNK + 41 + 2 * CHUNK
    for name, count in (("queries", queries), ("hits", hits)):
        assert f'vllm:prefix_cache_{name}_total{{engine="0",model_name="m"}} {float(count)}' in lines
