# ruff: noqa: RUF001  (DeepSeek writes its markers with full-width bars)
"""Formats of tool calls: what chat templates teach, and the parsers of each. Names are vLLM's where it has
the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import regex

from paceline.serving.parsers import (
    Delta,
    HermesParser,
    JsonValue,
    LlamaJsonParser,
    MarkedListParser,
    MistralParser,
    Parser,
    PythonicParser,
    StateParser,
    ToolCallDelta,
    overlap,
    python_calls,
)

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the parameters of each function, by the function's name."""


class _MarkedParser(StateParser):
    """Base of parsers of calls that begin with a marker, any number of them, with text around.

    starts   texts of which one begins a call, or a section of calls
    opening  from there to the arguments, with the function's ``name``
    closing  what may follow the arguments
    end      the end of a section, "" if there is none
    """

    def __init__(self, starts: tuple[str, ...], opening: str, closing: str, *, end: str = "") -> None:
        super().__init__(self._text)
        self._starts, self._opening = starts, regex.compile(opening)
        self._closing, self._end = regex.compile(closing), end

    def flush(self) -> Delta:
        return Delta(self._take() if self._state == self._text else "")

    def _text(self) -> Delta:
        places = [(place, start) for start in self._starts if (place := self._held.find(start)) >= 0]
        uncertain = max(overlap(self._held, start) for start in self._starts)
        place, start = min(places, default=(len(self._held) - uncertain, ""))
        delta = self._around(self._take(place))
        if not start:
            return delta
        found = self._opening.match(self._held, partial=True)
        if found is None:
            return delta + Delta(self._take(len(start)))
        if found.partial:
            return delta
        self._take(found.end())
        return delta + self._begin(found["name"])

    def _begin(self, name: str) -> Delta:
        """Return what a call of that name begins with; set the next state."""
        raise NotImplementedError

    def _after(self) -> Delta:
        found = self._closing.match(self._held, partial=True)
        if found is not None and found.partial:
            return Delta()
        self._take(0 if found is None else found.end())
        self._state = self._gap if self._end else self._text
        return Delta()

    def _gap(self) -> Delta:
        """Between calls of a section, or at its end."""
        begun = self._held.lstrip()
        if begun.startswith(self._end):
            self._held, self._state = begun[len(self._end) :], self._text
        elif not self._end.startswith(begun):
            self._state = self._text
        return Delta()


class MarkedJsonParser(_MarkedParser):
    """A marker, the name, and the arguments as one JSON object: DeepSeek V3, Kimi K2, Functionary."""

    def _begin(self, name: str) -> Delta:
        self._state, self._value = self._arguments, JsonValue()
        return Delta(tool_calls=(ToolCallDelta(self.calls, name, ""),))

    def _arguments(self) -> Delta:
        return self._take_arguments(self._value, self._after)


class TaggedParser(_MarkedParser):
    """A marker, the name, and each argument between tags, as Qwen3-Coder writes them.

    A value has no quotes: the function's schema says whether it is text.
    """

    def __init__(self, schemas: Schemas, tags: Tags) -> None:
        super().__init__(tags.starts, tags.opening, tags.closing)
        self._inside = regex.compile(rf"\s*(?:(?P<end>{tags.end})|{tags.argument})", regex.DOTALL)
        self._schemas = schemas
        self._properties: Mapping[str, Any] = {}
        self._written = 0

    def _begin(self, name: str) -> Delta:
        self._properties = _mapping(self._schemas.get(name, {}).get("properties"))
        self._state, self._written = self._function, 0
        return Delta(tool_calls=(ToolCallDelta(self.calls, name, "{"),))

    def _function(self) -> Delta:
        found = self._inside.match(self._held, partial=True)
        if found is None:
            self._take(1)  # unexpected text
            return Delta()
        if found.partial:
            return Delta()
        self._take(found.end())
        if found["end"]:
            self.calls, self._state = self.calls + 1, self._after
            return Delta(tool_calls=(ToolCallDelta(self.calls - 1, None, "}"),))
        name, value = found["key"].strip(), found["value"].removeprefix("\n").removesuffix("\n")
        schema = _mapping(self._properties.get(name))
        if (kind := found.groupdict().get("string")) is not None:  # the call itself says whether it is text
            schema = (
                {"type": "string"} if kind == "true" else {"type": ["number", "boolean", "null", "object", "array"]}
            )
        text = f"{', ' if self._written else ''}{json.dumps(name, ensure_ascii=False)}: {_json(value, schema)}"
        self._written += 1
        return Delta(tool_calls=(ToolCallDelta(self.calls, None, text),))


@dataclass(frozen=True, slots=True)
class Tags:
    """Tags of a format, as patterns.

    starts, opening  see `_MarkedParser`
    argument         an argument's ``key`` and ``value``, and perhaps whether it is a ``string``
    end              the end of a call
    closing          what may follow it
    """

    starts: tuple[str, ...]
    opening: str
    argument: str
    end: str
    closing: str = ""


_NAME = r"(?P<name>[\w.\-]+)"
_QWEN = Tags(
    ("<tool_call>", "<function="),
    rf"(?:<tool_call>\s*)?<function=\s*{_NAME}\s*>",
    r"<parameter=(?P<key>[^>]*)>(?P<value>.*?)</parameter>",
    "</function>",
    r"\s*</tool_call>",
)
_SEED = Tags(
    ("<seed:tool_call>",),
    rf"<seed:tool_call>\s*<function=\s*{_NAME}\s*>",
    _QWEN.argument,
    _QWEN.end,
    r"\s*</seed:tool_call>",
)
_GLM = Tags(
    ("<tool_call>",),
    rf"<tool_call>\s*{_NAME}\s*(?=<)",
    r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
    "</tool_call>",
)


def _invoked(prefix: str, *sections: str) -> Tags:
    """<invoke name="f"><parameter name="x">1</parameter></invoke>, with a prefix of tags, in a section."""
    section = "|".join(sections)
    return Tags(
        tuple(f"<{one}>" for one in sections),
        rf'<(?:{section})>\s*<{prefix}invoke name="{_NAME}">',
        rf'<{prefix}parameter name="(?P<key>[^"]*)"(?: string="(?P<string>true|false)")?>(?P<value>.*?)'
        rf"</{prefix}parameter>",
        f"</{prefix}invoke>",
        rf"\s*</(?:{section})>",
    )


_MINIMAX = _invoked("", "minimax:tool_call")
_MUSE = _invoked("atem:", "atem:function_calls")
_MINIMAX_M3 = Tags(
    ("]<]minimax[>[<tool_call>",),
    rf'\]<\]minimax\[>\[<tool_call>\s*\]<\]minimax\[>\[<invoke name="{_NAME}">',
    r"\]<\]minimax\[>\[<(?P<key>[\w.\-]+)>(?P<value>.*?)\]<\]minimax\[>\[</(?P=key)>",
    r"\]<\]minimax\[>\[</invoke>",
    r"\s*\]<\]minimax\[>\[</tool_call>",
)
_MINICPM = Tags(
    ('<function name="',),
    rf'<function name="{_NAME}">',
    r'<param name="(?P<key>[^"]*)">(?P<value>.*?)</param>',
    "</function>",
)
_DSML = _invoked("｜DSML｜", "｜DSML｜function_calls", "｜DSML｜tool_calls")


class CollectedParser(StateParser):
    """Calls between markers, any number, with text around; they are returned when they are complete.

    calls  makes calls of the text between the markers; None: it is none
    """

    def __init__(self, start: str, end: str, calls: Callable[[str], Sequence[ToolCallDelta] | None]) -> None:
        super().__init__(self._text)
        self._start, self._end, self._calls = start, end, calls
        self._collected = ""

    def flush(self) -> Delta:
        held = self._take()
        return Delta(held) if self._state == self._text else self._finish(held)

    def _text(self) -> Delta:
        return self._around(self._take_until(self._start, self._inside))

    def _inside(self) -> Delta:
        self._collected += self._take_until(self._end, self._text)
        return Delta() if self._state == self._inside else self._finish("")

    def _finish(self, rest: str) -> Delta:
        text, self._collected = self._collected + rest, ""
        if (found := self._calls(text)) is None:
            return Delta(f"{self._start}{text}")
        first, self.calls = self.calls, self.calls + len(found)
        return Delta(tool_calls=tuple(replace(call, index=first + call.index) for call in found))


class ChannelParser(StateParser):
    """Messages of gpt-oss, each after a header that names its channel, and in calls the function.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>...
    """

    def __init__(self) -> None:
        super().__init__(self._first)
        self._kind = "content"

    def flush(self) -> Delta:
        held = self._take()
        return Delta() if self._state == self._header and held.lstrip().startswith("<|") else self._delta(held)

    def _first(self) -> Delta:
        """Before the answer, which may have no header where a grammar writes it."""
        begun = self._held.lstrip()
        if begun.startswith(_HEADERS):
            self._state = self._header
        elif not any(header.startswith(begun) for header in _HEADERS):
            self._state = self._body
        return Delta()

    def _header(self) -> Delta:
        place = self._held.find("<|message|>")
        if place < 0:
            return Delta()
        header = self._take(place)
        self._take(len("<|message|>"))
        called = regex.search(rf"to=functions\.{_NAME}", header)
        self._kind = "call" if called else "reasoning" if "analysis" in header else "content"
        self._state = self._body
        return Delta(tool_calls=(ToolCallDelta(self.calls, called["name"], ""),)) if called else Delta()

    def _body(self) -> Delta:
        places = [(place, end) for end in _MESSAGE_ENDS if (place := self._held.find(end)) >= 0]
        uncertain = max(overlap(self._held, end) for end in _MESSAGE_ENDS)
        place, end = min(places, default=(len(self._held) - uncertain, ""))
        delta = self._delta(self._take(place))
        if end:
            self._take(len(end))
            self.calls += self._kind == "call"
            self._kind, self._state = "content", self._header
        return delta

    def _delta(self, text: str) -> Delta:
        if self._kind == "call" and text:
            return Delta(tool_calls=(ToolCallDelta(self.calls, None, text),))
        return Delta(reasoning=text) if self._kind == "reasoning" else Delta(text)


class RecipientParser(StateParser):
    """Messages of Functionary 3.2, each after a line that names who gets it; the prompt ends with the first >>>.

    all
    text>>>f
    {"x": 1}
    """

    def __init__(self) -> None:
        super().__init__(self._recipient)
        self._value = JsonValue()

    def flush(self) -> Delta:
        return Delta(self._take())

    def _recipient(self) -> Delta:
        """At the line of a name; other text has no recipient, as where a grammar writes it."""
        name, ended, _ = self._held.partition("\n")
        if not regex.fullmatch(r"[\w.\-]*", name) or (ended and not name):
            self._state = self._text
            return Delta()
        if not ended:
            return Delta()
        self._take(len(name) + 1)
        self._state, self._value = self._text if name == "all" else self._arguments, JsonValue()
        return Delta() if name == "all" else Delta(tool_calls=(ToolCallDelta(self.calls, name, ""),))

    def _text(self) -> Delta:
        return Delta(self._take_until(">>>", self._recipient))

    def _arguments(self) -> Delta:
        return self._take_arguments(self._value, self._text)


_HEADERS = ("<|channel|>", "<|start|>", "to=functions.")
_MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


def _gemma_calls(text: str) -> list[ToolCallDelta] | None:
    """call:f{x:<|"|>text<|"|>,n:3}, of Gemma 4: strings stand between <|"|>, and keys have no quotes."""
    found = regex.fullmatch(rf"\s*call:\s*{_NAME}\s*(?P<arguments>\{{.*\}})\s*", text, regex.DOTALL)
    if found is None:
        return None
    pieces = found["arguments"].split('<|"|>')
    for place, piece in enumerate(pieces):
        quoted = json.dumps(piece, ensure_ascii=False)
        pieces[place] = quoted if place % 2 else regex.sub(r"([{,]\s*)([\w.\-]+)(\s*:)", r'\1"\2"\3', piece)
    try:
        written = json.dumps(json.loads("".join(pieces)), ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return [ToolCallDelta(0, found["name"], written)]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A format of tool calls.

    name     vLLM's
    make     makes the parser of one response from the schemas of the offered functions
    markers  a template with all of these uses it
    tokens   strings that the parser searches for, which may be special tokens of the vocabulary
    always   answers without calls have the format, too
    """

    name: str
    make: Callable[[Schemas], Parser]
    markers: tuple[str, ...]
    tokens: tuple[str, ...] = ()
    always: bool = False


def _marked_json(name: str, starts: tuple[str, ...], opening: str, *, closing: str, end: str = "") -> ToolFormat:
    tokens = (*starts, *_LITERAL.findall(opening + closing), *((end,) if end else ()))
    return ToolFormat(
        name,
        lambda _: MarkedJsonParser(starts, opening + r"\s*(?=\{)", closing, end=end),
        starts[-1:],
        tuple(dict.fromkeys(tokens)),
    )


def _tagged(name: str, tags: Tags, *, marker: str) -> ToolFormat:
    """A row of `TaggedParser`. ``marker``: what its templates have."""
    tokens = (*tags.starts, *_LITERAL.findall(tags.opening + tags.argument + tags.end + tags.closing))
    return ToolFormat(name, lambda schemas: TaggedParser(schemas, tags), (marker,), tuple(dict.fromkeys(tokens)))


def _marked_list(
    name: str, start: str, end: str = "", *, markers: tuple[str, ...] = (), keyed: bool = False
) -> ToolFormat:
    """A row of `MarkedListParser`. ``markers``: what its templates have, if not the start."""
    tokens = (start, end) if end else (start,)
    return ToolFormat(name, lambda _: MarkedListParser(start, end, keyed=keyed), markers or (start,), tokens)


def _collected(
    name: str,
    start: str,
    end: str,
    *,
    calls: Callable[[str], Sequence[ToolCallDelta] | None],
    more: tuple[str, ...] = (),
) -> ToolFormat:
    """A row of `CollectedParser`. ``more``: further special tokens."""
    return ToolFormat(name, lambda _: CollectedParser(start, end, calls), (start,), (start, end, *more))


_LITERAL = regex.compile(r"</?[\w:｜▁]+>")
"""Tags in a pattern that have no wildcards: they may be special tokens."""

_OUTER = ("<tool_call>", "</tool_call>")

TOOL_FORMATS: tuple[ToolFormat, ...] = (
    _tagged("deepseek_v32", _DSML, marker="｜DSML｜"),
    _tagged("minimax_m3", _MINIMAX_M3, marker="]<]minimax[>["),
    _tagged("minimax_m2", _MINIMAX, marker="<minimax:tool_call>"),
    _tagged("muse_glimmer", _MUSE, marker="atem:function_calls"),
    _tagged("minicpm5", _MINICPM, marker='<function name="'),
    _tagged("seed_oss", _SEED, marker="<seed:tool_call>"),
    _tagged("glm45", _GLM, marker="<arg_key>"),
    ToolFormat("qwen3_coder", lambda schemas: TaggedParser(schemas, _QWEN), ("<tool_call>", "<function="), _OUTER),
    _marked_json(
        "deepseek_v3",
        ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
        "(?:<｜tool▁calls▁begin｜>\\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?"
        rf"{_NAME}(?:<｜tool▁sep｜>)?\s*(?:```json)?",
        closing=r"\s*(?:```)?\s*<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜>",
    ),
    _marked_json(
        "kimi_k2",
        ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        r"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?"
        r"(?P<name>[\w.\-]+?)(?::\d+)?\s*<\|tool_call_argument_begin\|>",
        closing=r"\s*<\|tool_call_end\|>",
        end="<|tool_calls_section_end|>",
    ),
    _marked_json(
        "solar_open",
        ("<|tool_calls|>", "<|tool_call:begin|>"),
        r"(?:<\|tool_calls\|>\s*)?<\|tool_call:begin\|>[\w\-]*<\|tool_call:name\|>" + _NAME + r"<\|tool_call:args\|>",
        closing=r"\s*<\|tool_call:end\|>",
        end="<|calls|>",
    ),
    _marked_list("cohere2", "<|START_ACTION|>", "<|END_ACTION|>"),
    _marked_list("nemotron_json", "<TOOLCALL>", "</TOOLCALL>"),
    _marked_list("minimax", "<tool_calls>", "</tool_calls>"),
    _marked_list("gigachat3", "<|function_call|>"),
    _marked_list("granite", "<|tool_call|>"),
    _marked_list("functools", " functools["),
    _marked_list("gigachat3_10b", "function call<|role_sep|>", markers=("function call", "<|role_sep|>")),
    _marked_list("apertus", "<|tools_prefix|>", "<|tools_suffix|>", keyed=True),
    _collected("lfm2", "<|tool_call_start|>", "<|tool_call_end|>", calls=python_calls),
    _collected("gemma4", "<|tool_call>", "<tool_call|>", calls=_gemma_calls, more=('<|"|>',)),
    ToolFormat(
        "openai",
        lambda _: ChannelParser(),
        ("<|channel|>", "<|call|>"),
        ("<|channel|>", "<|message|>", "<|constrain|>", *_MESSAGE_ENDS),
        always=True,
    ),
    ToolFormat("hermes", lambda _: HermesParser(), ("<tool_call>",), _OUTER),
    ToolFormat("mistral", lambda _: MistralParser(), ("[TOOL_CALLS]",), ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    ToolFormat("functionary_v3", lambda _: RecipientParser(), (">>>all",), always=True),
    _marked_json("functionary", ("<function=",), rf"<function=\s*{_NAME}\s*>", closing=r"\s*</function>"),
    ToolFormat("pythonic", lambda _: PythonicParser(), ("[func_name1(",)),
    ToolFormat("llama3_json", lambda _: LlamaJsonParser(), ('"parameters"', '"name"')),
)
"""Formats in the order in which templates are searched."""


TOLD = "You can call functions. Each line describes one, with the JSON schema of its parameters:"
_ANSWERS = (
    'To call some, answer with a JSON list alone: [{"name": "...", "parameters": {...}}]. Otherwise answer in text '
    "that does not begin with a bracket."
)


def told_turns(
    turns: Sequence[Mapping[str, Any]], functions: Sequence[Mapping[str, Any]], *, system: bool
) -> list[dict[str, Any]]:
    """Write a conversation for a template without tools. The ``system`` message, or else the user's first, lists the
    functions; calls become the assistant's text, and their results the user's.
    """
    told = "\n".join((TOLD, *(json.dumps(function, ensure_ascii=False) for function in functions), _ANSWERS))
    made: list[dict[str, Any]] = [{"role": "system", "content": told}] if system else []
    told = "" if system else told
    before = "system" if system else ""  # this turn joins one of the same role, as a result joins another one
    for turn in turns:
        role, text = turn["role"], turn["content"]
        if calls := turn.get("tool_calls"):
            named = [{"name": one["function"]["name"], "parameters": one["function"]["arguments"]} for one in calls]
            text = "\n".join(filter(None, (text, json.dumps(named, ensure_ascii=False))))
        if role == "tool":
            role, text = "user", f"Result: {text}"
        if role == "user" and told:
            text, told = f"{told}\n\n{text}", ""
        if role == before:
            made[-1]["content"] += f"\n\n{text}"
        else:
            made.append({"role": role, "content": text})
        before = "user" if turn["role"] == "tool" else ""
    return made


def tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template teaches, if it has a place for tools at all and the format is known."""
    if "tools" not in template:
        return None
    return next((row for row in TOOL_FORMATS if all(marker in template for marker in row.markers)), None)


def _json(value: str, schema: Mapping[str, Any]) -> str:
    """A value as JSON: the text itself if the schema takes strings, gives no type, or the text is not JSON."""
    kinds = _kinds(schema)
    if not kinds and not schema.keys() & {"type", "anyOf", "oneOf", "$ref"}:
        kinds = {"string"}
    for key in ("anyOf", "oneOf"):
        others = schema.get(key)
        for other in others if isinstance(others, list) else ():
            kinds |= _kinds(_mapping(other))
    text = json.dumps(value, ensure_ascii=False)
    if value.strip().lower() in ("null", "none") and "null" in kinds:
        return "null"
    if "string" in kinds:
        return text
    if "boolean" in kinds and value.strip().lower() in ("true", "false"):
        return value.strip().lower()
    try:
        json.loads(value, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value.strip()


def _kinds(schema: Mapping[str, Any]) -> set[str]:
    said = schema.get("type")
    return {one for one in (said if isinstance(said, list) else [said]) if isinstance(one, str)}


def _mapping(value: object) -> Mapping[str, Any]:
    """A schema of a request; one that is true, or no schema at all, says nothing."""
    return value if isinstance(value, Mapping) else {}


def _refuse(constant: str) -> None:
    raise ValueError(f"expected JSON, got {constant}; write null or a string")
