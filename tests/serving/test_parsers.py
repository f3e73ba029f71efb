"""Tool calls and reasoning in a growing text: every form, cut anywhere, gives the same."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from paceline.serving.answer import AnswerStep, ChoiceText
from paceline.serving.parsers import (
    REASONING,
    Delta,
    HermesParser,
    JsonListParser,
    LlamaJsonParser,
    MistralParser,
    NamedCallParser,
    Parser,
    PythonicParser,
    ReasoningParser,
    ReasoningRow,
)
from paceline.serving.tool_formats import TOOL_FORMATS, tool_format

Calls = list[tuple[str, object]]

SCHEMAS = {
    "f": {
        "type": "object",
        "properties": {
            "text": {"type": "string"}, "n": {"type": "integer"}, "on": {"type": "boolean"},
            "list": {"type": "array"}, "maybe": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        },
    }
}  # fmt: skip


def of(name: str) -> Callable[[], Parser]:
    """Make the parser of a format."""
    return lambda: next(row for row in TOOL_FORMATS if row.name == name).make(SCHEMAS)


def tagged(name: str, **values: str) -> str:
    """A call as Qwen3-Coder's template shows it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


CASES: list[tuple[str, Callable[[], Parser], str, str, Calls]] = [
    ("hermes", HermesParser, 'a <tool_call>{"name": "f", "arguments": {"x": "}<"}}</tool_call>', "a ",
     [("f", {"x": "}<"})]),
    ("hermes, none", HermesParser, "a < b <tool_ca", "a < b <tool_ca", []),
    ("hermes, cut", HermesParser, '<tool_call>{"name": "f", "arguments": {"x": 1}}', "", [("f", {"x": 1})]),
    ("llama", LlamaJsonParser, '{"name": "f", "parameters": {"x": [1, {}]}}', "", [("f", {"x": [1, {}]})]),
    ("llama, two", LlamaJsonParser, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": "a;b"}}', "",
     [("f", {}), ("g", {"y": "a;b"})]),
    ("llama, tag", LlamaJsonParser, '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama, type", LlamaJsonParser, '{"type": "function", "name": "f", "parameters": {"x": 1}}', "",
     [("f", {"x": 1})]),
    ("llama, text", LlamaJsonParser, "No call: {1}", "No call: {1}", []),
    ("llama, other JSON", LlamaJsonParser, '{"answer": 42}', '{"answer": 42}', []),
    ("pythonic", PythonicParser, '[f(x=1, y="]"), a.g()]', "", [("f", {"x": 1, "y": "]"}), ("a.g", {})]),
    ("pythonic, text", PythonicParser, "Well, [f()]", "Well, [f()]", []),
    ("pythonic, no literal", PythonicParser, '[f(x=open("y"))]', '[f(x=open("y"))]', []),
    ("list", JsonListParser, '[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]', "",
     [("f", {"x": 1}), ("g", {})]),
    ("mistral", MistralParser,
     'a [TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}}, {"name": "g", "arguments": {}}]', "a ",
     [("f", {"x": "]"}), ("g", {})]),
    ("mistral, other order", MistralParser, '[TOOL_CALLS][{"arguments": {"x": 1}, "name": "f", "id": "a"}]', "",
     [("f", {"x": 1})]),
    ("mistral, by name", MistralParser, 'a[TOOL_CALLS]f[ARGS]{"x": "}["}[TOOL_CALLS]a.g[CALL_ID]9[ARGS]{}', "a",
     [("f", {"x": "}["}), ("a.g", {})]),
    ("mistral, by name alone", MistralParser, '[TOOL_CALLS]f{"x": {}}', "", [("f", {"x": {}})]),
    ("mistral, text", MistralParser, "a [TOOL] b [TOOL_CALL", "a [TOOL] b [TOOL_CALL", []),
    ("mistral, no call", MistralParser, "[TOOL_CALLS]no call {x}", "[TOOL_CALLS]no call {x}", []),
    ("mistral, cut", MistralParser, "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR", []),
    ("mistral, other JSON", MistralParser, '[TOOL_CALLS][{"x": 1}]', '{"x": 1}', []),
    ("qwen3_coder", of("qwen3_coder"), "a " + tagged("f", text="1", n="2", on="True", list="[3, {}]", maybe="null"),
     "a ", [("f", {"text": "1", "n": 2, "on": True, "list": [3, {}], "maybe": None})]),
    ("qwen3_coder, two", of("qwen3_coder"), tagged("f", text='a "b"\n\n c') + "\n" + tagged("g", x="7"), "",
     [("f", {"text": 'a "b"\n\n c'}), ("g", {"x": "7"})]),
    ("qwen3_coder, no outer tags", of("qwen3_coder"), "<function=f><parameter=n>5</parameter></function> b", " b",
     [("f", {"n": 5})]),
    ("qwen3_coder, no number", of("qwen3_coder"), tagged("f", n="NaN", maybe="four"), "",
     [("f", {"n": "NaN", "maybe": "four"})]),
    ("qwen3_coder, text", of("qwen3_coder"), "a < b <tool_call> c <fun", "a < b <tool_call> c <fun", []),
    ("named", lambda: NamedCallParser("f"), '{"x": 1}', "", [("f", {"x": 1})]),
]  # fmt: skip


def read(parser: Parser, pieces: list[str]) -> ChoiceText:
    found = ChoiceText()
    for delta in [*(parser.push(piece) for piece in pieces), parser.flush()]:
        assert isinstance(delta, Delta)
        found.add(AnswerStep(0, delta, ()))
    return found


def cuts(text: str) -> list[list[str]]:
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]


def check(make: Callable[[], Parser], text: str, content: str, calls: Calls, reasoning: str = "") -> None:
    """A parser finds these, wherever the text is cut."""
    for pieces in cuts(text):
        found = read(make(), pieces)
        assert [(call.name, json.loads(call.text)) for call in found.tool_calls] == calls, pieces
        assert (found.content, found.reasoning) == (content, reasoning), pieces


@pytest.mark.parametrize(("make", "text", "content", "calls"), [case[1:] for case in CASES], ids=[c[0] for c in CASES])
def test_tool_calls_parse_in_any_chunks(make: Callable[[], Parser], text: str, content: str, calls: Calls) -> None:
    check(make, text, content, calls)


@pytest.mark.parametrize("row", REASONING, ids=[row.name for row in REASONING])
def test_reasoning_parses_in_any_chunks(row: ReasoningRow) -> None:
    start, end = row.start, row.end
    for text, started, thought, answer in (
        (f"{start}a < b{end}\n\nc", False, "a < b", "c"),
        (f"a{end}c", True, "a", "c"),
        (f"a{end[:-1]}", True, f"a{end[:-1]}", ""),
        (f"x{start}a{end}", False, "", f"x{start}a{end}"),
        (start[:-1], False, "", start[:-1]),
    ):
        check(lambda started=started: ReasoningParser(row, Parser(), started=started), text, answer, [], thought)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("{% if tools %}<tool_call><function=f>{% endif %}", "qwen3_coder"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral"),
        ('{{ tools }} {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("{{ tools }} [func_name1(params_name1=params_value1...)]", "pythonic"),
        ("{{ messages }} <tool_call>", None),
    ],
)
def test_the_format_is_detected_from_the_template(template: str, name: str | None) -> None:
    found = tool_format(template)
    assert (None if found is None else found.name) == name
