"""Requests in OpenAI's format, checked field by field. Values only: no HTTP, no model.

What a field means is OpenAI's; ``top_k`` and ``min_p`` are additions. A field that would change the answer and is not
served is refused by name, not passed over.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

Kind = Literal["completion", "chat"]
Prompt = str | tuple[int, ...]
Number = TypeVar("Number", int, float)

_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions; chat has none
_MOST_STOPS = 4
_MOST_PROMPTS = 2048
_MOST_SHOWN = 400  # letters of an error's message, which may quote what was sent

# Fields that are served by their only harmless value (a float stands for the integer too), and those that change
# nothing, with their types.
_ONLY: dict[str, tuple[object, ...]] = {
    "n": (1,), "frequency_penalty": (0.0,), "presence_penalty": (0.0,), "logit_bias": ({},),
}  # fmt: skip
_ONLY_OF: dict[Kind, dict[str, tuple[object, ...]]] = {
    # How many log-probabilities: 0 asks for those of the text itself.
    "completion": {**_ONLY, "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": ()},
    "chat": {
        **_ONLY, "logprobs": (False,), "top_logprobs": (0,), "tools": ([],), "tool_choice": ("none",),
        "functions": ([],), "response_format": ({"type": "text"},), "modalities": (["text"],),
    },
}  # fmt: skip
_NOTHING: dict[str, type] = {
    "user": str, "metadata": dict, "store": bool, "service_tier": str, "parallel_tool_calls": bool,
    "stream_options": dict, "safety_identifier": str, "prompt_cache_key": str, "prompt_cache_retention": str,
}  # fmt: skip
_NAMES: dict[type, str] = {str: "a text", dict: "an object", bool: "true or false"}
_READ = frozenset({"model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream"})
_READ_OF: dict[Kind, frozenset[str]] = {
    "completion": _READ | {"prompt"},
    "chat": _READ | {"messages", "max_completion_tokens"},
}


class RefusedError(Exception):
    """A request that gets an error object. ``status`` is HTTP's."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        message = message if len(message) <= _MOST_SHOWN else message[: _MOST_SHOWN - 3] + "..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request. ``limit`` None: as long as the model can."""

    kind: Kind
    model: str
    prompts: tuple[Prompt, ...]
    messages: tuple[Message, ...]
    limit: int | None
    temperature: float
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int
    stop: tuple[str, ...]
    stream: bool
    usage: bool


def read(kind: Kind, body: object) -> CompletionRequest:
    """Check a request's JSON.

    Raises:
        RefusedError: with status 400, and the field that is wrong.
    """
    if not isinstance(body, dict):
        raise RefusedError(400, "the body must be a JSON object")
    fields = {key: value for key, value in body.items() if value is not None}
    _only_what_is_served(kind, fields)
    chat = kind == "chat"
    limit = _limit(fields)
    seed = _number(fields, "seed", int, default=None)
    temperature = _number(fields, "temperature", float, default=1.0)
    assert temperature is not None
    stream = fields.get("stream", False)
    _of_type(stream, bool, name="stream")
    return CompletionRequest(
        kind=kind,
        model=_text(fields, "model"),
        prompts=() if chat else _prompts(fields),
        messages=_messages(fields) if chat else (),
        limit=limit if limit is not None or chat else _COMPLETION_TOKENS,
        temperature=temperature,
        top_p=_number(fields, "top_p", float, default=None),
        top_k=_number(fields, "top_k", int, default=None),
        min_p=_number(fields, "min_p", float, default=None),
        seed=secrets.randbits(31) if seed is None else seed,
        stop=_stops(fields),
        stream=stream,
        usage=_usage(fields),
    )


def _only_what_is_served(kind: Kind, fields: Mapping[str, object]) -> None:
    only = _ONLY_OF[kind]
    for name, value in fields.items():
        _only_characters(name, param=None)
        _only_characters(value, param=name)
        if name in _NOTHING:
            _of_type(value, _NOTHING[name], name=name)
        elif name in _READ_OF[kind]:
            continue
        elif name not in only:
            raise RefusedError(400, f"{name!r} is not a field of this endpoint", param=name)
        elif not any(_same(value, one) for one in only[name]):
            raise RefusedError(400, f"{name}={value!r} is not served; leave it out", param=name)


def _same(value: object, served: object) -> bool:
    """Equal, and of one type: to Python, though not to JSON, true is 1."""
    return value == served and (type(value) is type(served) or (isinstance(served, float) and type(value) is int))


def _of_type(value: object, kind: type, *, name: str) -> None:
    if not isinstance(value, kind):
        raise RefusedError(400, f"{name} must be {_NAMES[kind]}, not {value!r}", param=name)


def _usage(fields: Mapping[str, object]) -> bool:
    options = fields.get("stream_options", {})
    assert isinstance(options, dict)  # checked with the others that change nothing
    asked = options.get("include_usage")
    if not isinstance(asked, bool | None):
        raise RefusedError(400, f"include_usage must be true or false, not {asked!r}", param="stream_options")
    return bool(asked)


def _only_characters(value: object, *, param: str | None) -> None:
    """JSON can write halves of surrogate pairs. No tokenizer and no answer can, so they would fail further on."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        where = "the name of a field" if param is None else param
        raise RefusedError(400, f"{where} holds half a surrogate pair, which is no character", param=param) from error
    except RecursionError as error:
        raise RefusedError(400, f"{param} is nested too deeply", param=param) from error


def _text(fields: Mapping[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise RefusedError(400, f"{name} must be a text", param=name)
    return value


def _number(fields: Mapping[str, object], name: str, kind: type[Number], *, default: Number | None) -> Number | None:
    value = fields.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | kind):
        raise RefusedError(400, f"{name} must be a number, not {value!r}", param=name)
    try:
        return kind(value)
    except OverflowError as error:
        raise RefusedError(400, f"{name} is out of range", param=name) from error


def _limit(fields: Mapping[str, object]) -> int | None:
    """The newer of two names goes before the other. None at all is no limit; a limit of none at all is refused."""
    found = None
    for name in ("max_tokens", "max_completion_tokens"):
        given = _number(fields, name, int, default=None)
        if given is not None and given < 1:
            raise RefusedError(400, f"{name} must be at least 1, not {given}", param=name)
        found = found if given is None else given
    return found


def _prompts(fields: Mapping[str, object]) -> tuple[Prompt, ...]:
    value = fields.get("prompt")
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _ids(value):
            return (tuple(value),)
        if len(value) > _MOST_PROMPTS:
            raise RefusedError(400, f"prompt holds {len(value)} prompts, and may hold {_MOST_PROMPTS}", param="prompt")
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and _ids(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise RefusedError(400, "prompt must be a text, a list of texts, or a list of ids", param="prompt")


def _ids(value: list[object]) -> bool:
    return bool(value) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _messages(fields: Mapping[str, object]) -> tuple[Message, ...]:
    value = fields.get("messages")
    if not isinstance(value, list) or not value:
        raise RefusedError(400, "messages must be a list of at least one message", param="messages")
    return tuple(map(_message, value))


def _message(item: object) -> Message:
    """One of them. What else clients keep beside it, such as calls of tools, says nothing only if it is empty."""
    fields = item if isinstance(item, dict) else {}
    for name, value in fields.items():
        if name not in ("role", "content") and value not in (None, "", [], {}):
            raise RefusedError(400, f"{name!r} of a message is not served; leave it out", param="messages")
    role, content = fields.get("role"), fields.get("content")
    if isinstance(content, list):
        content = _joined(content)
    if not isinstance(role, str) or not isinstance(content, str):
        raise RefusedError(400, "a message has a role and a content, both texts", param="messages")
    return Message(role, content)


def _joined(parts: list[object]) -> str | None:
    """The text of a content in parts; None if one of them is no text."""
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in parts]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if len(found) == len(texts) else None


def _stops(fields: Mapping[str, object]) -> tuple[str, ...]:
    value = fields.get("stop", [])
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise RefusedError(400, f"stop must be a text or a list of at most {_MOST_STOPS}", param="stop")
    return tuple(stops)
