"""Tool calls and reasoning: texts as models write them, cut anywhere, and every chat template of llama.cpp's sources.

The templates come with the source distribution of llama-cpp-python, which `make test-gguf` fetches.
"""
# ruff: noqa: RUF001, ISC004  (DeepSeek writes its markers with full-width bars)

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.serving.answer import AnswerStep, ChoiceText
from paceline.serving.errors import RefusedError
from paceline.serving.model_server import ChatFormat, _chat_text
from paceline.serving.openai.requests import ChatRequest
from paceline.serving.parsers import (
    REASONING,
    Delta,
    JsonListParser,
    ListOrTextParser,
    NamedCallParser,
    Parser,
    ReasoningParser,
    ReasoningRow,
)
from paceline.serving.tool_formats import TOOL_FORMATS, tool_format
from tests.serving.edge import chat_tokenizer

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


FORMS_OF_GRAMMARS: dict[str, Callable[[], Parser]] = {
    "list": JsonListParser, "generic": ListOrTextParser, "named": lambda: NamedCallParser("f"),
}  # fmt: skip


def of(label: str) -> Callable[[], Parser]:
    """Make the parser of a format, the first word of a label."""
    name = label.partition(",")[0]
    own = FORMS_OF_GRAMMARS.get(name)
    return own or (lambda: next(row for row in TOOL_FORMATS if row.name == name).make(SCHEMAS))


def tagged(name: str, **values: str) -> str:
    """A call as Qwen3-Coder's template shows it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", 'a <tool_call>{"name": "f", "arguments": {"x": "}<"}}</tool_call>', "a ", [("f", {"x": "}<"})]),
    ("hermes, none", "a < b <tool_ca", "a < b <tool_ca", []),
    ("hermes, cut", '<tool_call>{"name": "f", "arguments": {"x": 1}}', "", [("f", {"x": 1})]),
    ("llama3_json", '{"name": "f", "parameters": {"x": [1, {}]}}', "", [("f", {"x": [1, {}]})]),
    ("llama3_json, two", '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"y": "a;b"}}', "",
     [("f", {}), ("g", {"y": "a;b"})]),
    ("llama3_json, tag", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", {})]),
    ("llama3_json, type", '{"type": "function", "name": "f", "parameters": {"x": 1}}', "", [("f", {"x": 1})]),
    ("llama3_json, text", "No call: {1}", "No call: {1}", []),
    ("llama3_json, other JSON", '{"answer": 42}', '{"answer": 42}', []),
    ("pythonic", '[f(x=1, y="]"), a.g()]', "", [("f", {"x": 1, "y": "]"}), ("a.g", {})]),
    ("pythonic, text", "Well, [f()]", "Well, [f()]", []),
    ("pythonic, no literal", '[f(x=open("y"))]', '[f(x=open("y"))]', []),
    ("list", '[{"name": "f", "parameters": {"x": 1}}, {"name": "g", "parameters": {}}]', "",
     [("f", {"x": 1}), ("g", {})]),
    ("mistral", 'a [TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}}, {"name": "g", "arguments": {}}]', "a ",
     [("f", {"x": "]"}), ("g", {})]),
    ("mistral, other order", '[TOOL_CALLS][{"arguments": {"x": 1}, "name": "f", "id": "a"}]', "", [("f", {"x": 1})]),
    ("mistral, by name", 'a[TOOL_CALLS]f[ARGS]{"x": "}["}[TOOL_CALLS]a.g[CALL_ID]9[ARGS]{}', "a",
     [("f", {"x": "}["}), ("a.g", {})]),
    ("mistral, by name alone", '[TOOL_CALLS]f{"x": {}}', "", [("f", {"x": {}})]),
    ("mistral, text", "a [TOOL] b [TOOL_CALL", "a [TOOL] b [TOOL_CALL", []),
    ("mistral, no call", "[TOOL_CALLS]no call {x}", "[TOOL_CALLS]no call {x}", []),
    ("mistral, cut", "[TOOL_CALLS]f[AR", "[TOOL_CALLS]f[AR", []),
    ("mistral, other JSON", '[TOOL_CALLS][{"x": 1}]', '{"x": 1}', []),
    ("qwen3_coder", "a " + tagged("f", text="1", n="2", on="True", list="[3, {}]", maybe="null"), "a ",
     [("f", {"text": "1", "n": 2, "on": True, "list": [3, {}], "maybe": None})]),
    ("qwen3_coder, two", tagged("f", text='a "b"\n\n c') + "\n" + tagged("g", x="7"), "",
     [("f", {"text": 'a "b"\n\n c'}), ("g", {"x": "7"})]),
    ("qwen3_coder, no outer tags", "<function=f><parameter=n>5</parameter></function> b", " b", [("f", {"n": 5})]),
    ("qwen3_coder, no number", tagged("f", n="NaN", maybe="four"), "", [("f", {"n": "NaN", "maybe": "four"})]),
    ("qwen3_coder, text", "a < b <tool_call> c <fun", "a < b <tool_call> c <fun", []),
    ("named", '{"x": 1}', "", [("f", {"x": 1})]),
]  # fmt: skip
"""A format and what is special, a text, what stays of it, and the calls."""


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


SOURCES = os.environ.get("LLAMA_CPP_SOURCES", "")
TEMPLATES = sorted(Path(SOURCES, "models", "templates").glob("*.jinja")) if SOURCES else []

F, G = ("f", {"text": "<b>", "n": 2}), ("f", {})
JSON = '{"text": "<b>", "n": 2}'
FIRST = f'{{"name": "f", "arguments": {JSON}}}'


def lines(*pieces: str) -> str:
    return "\n".join(pieces)


FORMS: list[tuple[str, str, str, Calls]] = [
    ("deepseek_v3",
     "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>"
     + lines(
         "f", "```json", JSON, "```<｜tool▁call▁end｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f", "```json"
     )
     + lines("", "{}", "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"), "", [F, G]),
    ("deepseek_v3",
     f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
     "", [F]),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>?", "<｜tool▁calls▁begin｜>?", []),
    ("kimi_k2",
     f"<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{JSON}"
     "<|tool_call_end|><|tool_call_begin|>functions.f:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|>", "", [F, G]),
    ("solar_open",
     f"<|tool_calls|><|tool_call:begin|>call1<|tool_call:name|>f<|tool_call:args|>{JSON}<|tool_call:end|><|calls|>", "",
     [F]),
    ("functionary", f"<function=f>{JSON}</function><function=f>{{}}</function>", "", [F, G]),
    ("seed_oss",
     lines("<seed:tool_call>", "<function=f>", "<parameter=text><b></parameter>", "<parameter=n>2</parameter>")
     + lines("", "</function>", "</seed:tool_call>"), "", [F]),
    ("glm45",
     lines("<tool_call>f", "<arg_key>text</arg_key>", "<arg_value><b></arg_value>", "<arg_key>n</arg_key>")
     + lines("", "<arg_value>2</arg_value>", "</tool_call>", "<tool_call>f</tool_call>"), "", [F, G]),
    ("glm45", "<tool_call>, it says", "<tool_call>, it says", []),
    ("minimax_m2",
     lines("<minimax:tool_call>", '<invoke name="f">', '<parameter name="text"><b></parameter>')
     + lines("", '<parameter name="n">2</parameter>', "</invoke>", "</minimax:tool_call>"), "", [F]),
    ("deepseek_v32",
     '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="text" string="true"><b>'
     '</｜DSML｜parameter>\n<｜DSML｜parameter name="n" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
     "</｜DSML｜function_calls>", "", [F]),
    ("cohere2",
     lines("<|START_ACTION|>[", f'    {{"tool_call_id": "0", "tool_name": "f", "parameters": {JSON}}},')
     + lines("", '    {"tool_call_id": "1", "tool_name": "f", "parameters": {}}', "]<|END_ACTION|>"), "", [F, G]),
    ("nemotron_json", f"<TOOLCALL>[{FIRST}]</TOOLCALL>", "", [F]),
    ("minimax", lines("<tool_calls>", FIRST, '{"name": "f", "arguments": {}}', "</tool_calls>"), "", [F, G]),
    ("granite", f"<|tool_call|>[{FIRST}]", "", [F]),
    ("gigachat3", f"<|function_call|>{FIRST}", "", [F]),
    ("functools", f" functools[{FIRST}]", "", [F]),
    ("apertus", f'<|tools_prefix|>[{{"f": {JSON}}}, {{"f": {{}}}}]<|tools_suffix|>', "", [F, G]),
    ("lfm2", '<|tool_call_start|>[f(text="<b>", n=2), f()]<|tool_call_end|>', "", [F, G]),
    ("minicpm5", '<function name="f"><param name="text"><b></param><param name="n">2</param></function>', "", [F]),
    ("gemma4", '<|tool_call>call:f{text:<|"|><b><|"|>,n:2}<tool_call|><|tool_call>call:f{}<tool_call|>', "", [F, G]),
    ("gemma4", "<|tool_call>none<tool_call|>", "<|tool_call>none", []),
]  # fmt: skip
"""The format, a text after "a ", what stays of it, and the calls."""


_THOUGHT = "<|channel|>analysis<|message|>b<|end|><|start|>assistant"


WHOLE: list[tuple[str, str, str, str, Calls]] = [
    ("openai", f"{_THOUGHT}<|channel|>final<|message|>a <b><|return|>", "a <b>", "b", []),
    ("openai", f"{_THOUGHT} to=functions.f<|channel|>commentary json<|message|>{JSON}<|call|>", "", "b", [F]),
    ("openai",
     "<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f "
     f"<|constrain|>json<|message|>{JSON}<|call|><|start|>assistant to=functions.f<|channel|>commentary json"
     "<|message|>{}<|call|>", "a", "", [F, G]),
    ("openai", '{"a": "b"}', '{"a": "b"}', "", []),
    ("openai", "<|channel|>final<|message|>a <|", "a <|", "", []),
    ("openai", "<|channel|>fin", "", "", []),
    ("functionary_v3", "all\na <b>", "a <b>", "", []),
    ("functionary_v3", f"all\na>>>f\n{JSON}>>>f\n{{}}", "a", "", [F, G]),
    ("functionary_v3", f"f\n{JSON}", "", "", [F]),
    ("functionary_v3", '{"a": "b"}', '{"a": "b"}', "", []),
    ("functionary_v3", "Yes", "Yes", "", []),
    ("functionary_v3", "\n a", "\n a", "", []),
    ("generic", '[{"name": "f", "parameters": {"text": "<b>", "n": 2}}, {"name": "f", "parameters": {}}]', "", "",
     [F, G]),
    ("generic", " So [it] is.", " So [it] is.", "", []),
    ("generic", " ", " ", "", []),
]  # fmt: skip
"""Messages of gpt-oss and Functionary 3.2, and the form for templates without tools. An answer that a grammar forces
names no channel and no recipient.
"""
ROWS: list[tuple[str, str, str, str, Calls]] = [
    *((label, text, said, "", calls) for label, text, said, calls in CASES),
    *((name, f"a {text}", f"a {left}", "", calls) for name, text, left, calls in FORMS),
    *WHOLE,
]


@pytest.mark.parametrize(("label", "text", "said", "thought", "calls"), ROWS)
def test_tool_calls_parse_in_any_chunks(label: str, text: str, said: str, thought: str, calls: Calls) -> None:
    check(of(label), text, said, calls, thought)


ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
SILENT = "{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
SYSTEM_FIRST = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def test_a_template_that_wants_arguments_as_text_gets_them() -> None:
    """Functionary 3.2's template is one."""
    template = (
        "{{ tools }}{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}>>>"
        "{{ '' + c.function.arguments }}{% endfor %}{% endfor %} >>>all"
    )
    made = of_server(template, [USER, calling(ARGUMENTS)], tools=True)
    assert made is not None and f">>>{json.dumps(ARGUMENTS)}" in made


@pytest.mark.parametrize("template", [ALTERNATING, SILENT, SYSTEM_FIRST])
def test_a_template_without_tools_is_told_of_functions_in_messages(template: str) -> None:
    """In the system message, or with the user's first where it takes none; calls and results are turns of text."""
    conversation = [USER, *answered(ARGUMENTS)[2:], {**answered(ARGUMENTS)[3], "content": "no wind"}]
    made = of_server(template, conversation, tools=True)
    assert made is not None
    begin = "[system]" if template == SYSTEM_FIRST else "[user]"
    assert made.startswith(f"{begin}You can call functions.") and made.count("weather") == 3
    call = json.dumps([{"name": "weather", "parameters": ARGUMENTS}])
    assert made.endswith(
        f'{USER["content"]}[assistant]{call}[user]Result: {{"rain": true}}\n\nResult: no wind[assistant]'
    )
    with_system = of_server(template, [SYSTEM, USER], tools=True)
    assert (with_system is None) is (template == ALTERNATING)
    if template == SYSTEM_FIRST:
        assert with_system is not None and with_system.endswith("\n\nBe brief.[user]Will it rain?[assistant]")


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        (True, "2"), (None, "2"), ({"type": None}, 2), ({"type": ["integer", "null"]}, 2), ({"oneOf": None}, 2),
        ({"anyOf": [True, {"type": ["integer", "string"]}]}, "2"),
    ],
)  # fmt: skip
def test_no_form_of_schema_fails_a_response(schema: object, value: object) -> None:
    """JSON Schema has true for what may be anything, and a request is not checked for it."""
    row = next(row for row in TOOL_FORMATS if row.name == "minicpm5")
    text = '<function name="f"><param name="x">2</param></function>'
    for properties, wanted in (({"x": schema}, value), ([], "2")):
        (call,) = read(row.make({"f": {"properties": properties}}), [text]).tool_calls
        assert json.loads(call.text) == {"x": wanted}


PROPERTIES = {
    "city": {"type": "string", "description": "Its name."},
    "days": {"type": "integer", "description": "How many days."},
}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}
ARGUMENTS = {"city": "Rome", "days": 3}
USER = {"role": "user", "content": "Will it rain?"}
SYSTEM = {"role": "system", "content": "Be brief."}


def calling(arguments: Any) -> dict[str, Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def answered(arguments: Any) -> list[dict[str, Any]]:
    result = {"role": "tool", "tool_call_id": "call00001", "content": '{"rain": true}'}
    return [SYSTEM, USER, calling(arguments), result]


CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "question": ([USER], False),
    "system": ([SYSTEM, USER], False),
    "turns": ([USER, {"role": "assistant", "content": "Yes."}, USER], False),
    "tools": ([SYSTEM, USER], True),
    "result": (answered(ARGUMENTS), True),
}
UNKNOWN = {
    "CohereForAI-c4ai-command-r-plus-tool_use", "Kimi-K3", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-ai-DeepSeek-V3.1", "tencent-Hy3",
}  # fmt: skip
"""Templates of other formats, or that have no place for tools."""


SILENT_TEMPLATES = {
    "HuggingFaceTB-SmolLM3-3B", "LFM2-8B-A1B", "LFM2.5-Instruct", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "google-gemma-2-2b-it", "ibm-granite-granite-3.3-2B-Instruct", "llama-cpp-rwkv-world",
    "microsoft-Phi-3.5-mini-instruct",
}  # fmt: skip
"""Templates that leave the calls of earlier turns out."""
FAILING_TEMPLATES = {
    "Kimi-K2-Instruct": "SecurityError",  # they change a list, which transformers' sandbox forbids
    "Kimi-K2-Thinking": "SecurityError",
    "fireworks-ai-llama-3-firefunction-v2": "UndefinedError",  # it wants functions by another name than tools
    "llama-cpp-deepseek-r1": "TypeError",  # it writes a filter's generator as JSON
}
"""Templates that fail in transformers, too, by its error."""


def of_server(template: str, messages: list[dict[str, Any]], *, tools: bool) -> str | None:
    """The prompt that the server makes of OpenAI's form of a conversation; None: refused."""
    tokenizer = chat_tokenizer(template)
    sent = [
        {**calling(json.dumps(ARGUMENTS)), "content": None} if "tool_calls" in message else message
        for message in messages
    ]
    body = {"model": "m", "messages": sent, **({"tools": [TOOL]} if tools else {})}
    try:
        return _chat_text(tokenizer, ChatRequest.model_validate(body), ChatFormat.of(tokenizer))
    except RefusedError:
        return None


@pytest.mark.gguf
@pytest.mark.skipif(not TEMPLATES, reason="llama.cpp's sources are not here; `make test-gguf` fetches them")
@pytest.mark.parametrize("path", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_a_published_template_renders_as_transformers_does(path: Path) -> None:
    template = path.read_text()
    tokenizer = chat_tokenizer(template)
    form = ChatFormat.of(tokenizer)
    for name, (messages, tools) in CONVERSATIONS.items():
        made = of_server(template, messages, tools=tools)
        try:
            known: dict[str, Any] = dict(tokenizer.special_tokens_map)  # type: ignore[attr-defined]
            (wanted,), _ = render_jinja_template(
                [messages], chat_template=template, tools=[TOOL] if tools else None, add_generation_prompt=True, **known
            )
        except Exception:  # templates are programs that may raise any error
            assert made is None or form.in_parts, name
            continue
        if tools and form.tools is None:  # messages tell of them, where the template takes these
            assert made is None or "weather" in made, name
        elif not form.in_parts:
            assert made == wanted, name


@pytest.mark.gguf
@pytest.mark.skipif(not TEMPLATES, reason="llama.cpp's sources are not here; `make test-gguf` fetches them")
@pytest.mark.parametrize("path", TEMPLATES, ids=[path.stem for path in TEMPLATES])
def test_tool_calls_of_published_templates_parse_back(path: Path) -> None:
    template = path.read_text()
    row = ChatFormat.of(chat_tokenizer(template)).tools
    more: dict[str, Any] = {"chat_template": template, "tools": [TOOL], "bos_token": "", "eos_token": ""}
    try:
        (asked,), _ = render_jinja_template([[USER]], add_generation_prompt=True, **more)
        arguments = json.dumps(ARGUMENTS) if "functionary-medium-v3.2" in path.stem else ARGUMENTS
        (text,), _ = render_jinja_template([[USER, calling(arguments)]], **more)
    except Exception as error:
        assert FAILING_TEMPLATES.get(path.stem) == type(error).__name__
        return
    text = text[len(asked) if text.startswith(asked) else text.rindex(USER["content"]) + len(USER["content"]) :]
    assert ("weather" in text) != (path.stem in SILENT_TEMPLATES)
    if path.stem in SILENT_TEMPLATES:
        return
    if row is None:
        assert path.stem in UNKNOWN, "a template that writes calls has a format"
        return
    found = read(row.make({"weather": PARAMETERS}), [text])
    assert [(call.name, json.loads(call.text)) for call in found.tool_calls] == [("weather", ARGUMENTS)]
