"""Input of a chat template: contents as it reads them and roles that it knows, from HTTP and in this process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.serving.errors import RefusedError
from paceline.serving.model_server import ChatFormat, chat_prompts
from paceline.serving.openai.fields import read_body
from paceline.serving.openai.requests import ChatRequest, ResponsesRequest
from paceline.text.chat import chat_ids, roles_in_parts
from tests.serving.edge import TEMPLATE, chat_tokenizer

PARTS = (
    "{% for m in messages %}[{{ m['role'] }}]{% for c in m['content'] %}"
    "{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
PLACES = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}"
EITHER = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}]{% if m.content is string %}{{ raise_exception('parts') }}{% endif %}"
    "{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
)
USER_ALONE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}{% for c in m.content %}{{ c['text'] }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ALL = {"user", "system", "assistant", "tool"}


@pytest.mark.parametrize(
    ("template", "in_parts"),
    [
        (TEMPLATE, set()),
        (EITHER, set()),
        (PARTS, ALL),
        (PLACES, ALL),
        (STRICT, {"user", "tool"}),
        ("{{ 1 / 0 }}", set()),
    ],
)
def test_a_template_gets_what_it_reads(template: str, in_parts: set[str]) -> None:
    assert roles_in_parts(chat_tokenizer(template)) == in_parts


@pytest.mark.parametrize("template", [TEMPLATE, PARTS, PLACES, EITHER, STRICT, USER_ALONE])
@pytest.mark.parametrize(
    "content", ["our words", [{"type": "text", "text": "our "}, {"type": "text", "text": "words"}]]
)
def test_every_endpoint_keeps_all_content(template: str, content: Any) -> None:
    tokenizer = chat_tokenizer(template)
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": content}]})
    (ids,) = chat_prompts(tokenizer, request, ChatFormat.of(tokenizer)).ids
    assert "[user]our words" in tokenizer.decode(ids)
    assert chat_ids(tokenizer, [{"role": "user", "content": "our words"}]) == ids


def test_the_developer_role_is_the_system_role() -> None:
    tokenizer, said = chat_tokenizer(), [{"role": "developer", "content": "brief"}, {"role": "user", "content": "x"}]
    chat = ChatRequest.model_validate({"model": "m", "messages": said})
    responses = ResponsesRequest.model_validate({"model": "m", "input": said}).chat()
    form = ChatFormat.of(tokenizer)
    prompts = [tokenizer.decode(chat_prompts(tokenizer, one, form).ids[0]) for one in (chat, responses)]
    assert prompts == ["[system]brief[user]x[assistant]"] * 2


def test_a_model_without_a_template_has_no_chats() -> None:
    request = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    tokenizer = chat_tokenizer("")
    with pytest.raises(RefusedError, match="no chat template; use /v1/completions"):
        chat_prompts(tokenizer, request, ChatFormat.of(tokenizer))


def test_a_message_with_only_tool_calls_needs_no_content() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    request = read_body(ChatRequest, json.dumps({"model": "m", "messages": said}).encode())
    assert request.messages[0].text == ""


THINKS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
THINKS += "{# <think> ends with </think> #}"


@pytest.mark.parametrize(
    ("fields", "said", "shown", "in_reasoning"),
    [
        ({}, "One, two", "[user]x[assistant]One, two[a]", False),
        ({"add_generation_prompt": False}, "One, two", "[user]x[assistant]One, two", False),
        ({"continue_final_message": True}, "One, two", "[user]x[assistant]One, two", False),
        ({"continue_final_message": True, "add_generation_prompt": False}, "1", "[user]x[assistant]1", False),
        ({"continue_final_message": True}, "<think>so", "[user]x[assistant]<think>so", True),
        ({"continue_final_message": True}, "<think>so</think>2", "[user]x[assistant]<think>so</think>2", False),
    ],
)
def test_the_last_message_is_continued(fields: dict[str, bool], said: str, shown: str, in_reasoning: bool) -> None:
    tokenizer = chat_tokenizer(THINKS)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": said}]
    request = ChatRequest.model_validate({"model": "m", "messages": messages, **fields})
    prompts = chat_prompts(tokenizer, request, ChatFormat.of(tokenizer))
    assert tokenizer.decode(prompts.ids[0]) == shown and prompts.in_reasoning is in_reasoning


def test_reasoning_is_accepted_by_either_name() -> None:
    tokenizer = chat_tokenizer("{% for m in messages %}[{{ m.reasoning_content }}]{% endfor %}")
    said = [{"role": "assistant", "content": "x", name: "why"} for name in ("reasoning", "reasoning_content")]
    request = ChatRequest.model_validate({"model": "m", "messages": said})
    assert tokenizer.decode(chat_prompts(tokenizer, request, ChatFormat.of(tokenizer)).ids[0]) == "[why][why]"
