"""Requests in OpenAI's format, as pydantic models. Values only: no HTTP, no model.

What a field means is OpenAI's; ``top_k`` and ``min_p`` are additions. A field that would change the answer and is not
served is refused by name. The fields that are accepted and ignored are those of `IgnoredFields`. A null is a missing
field. Ranges of sampling values are checked by `SamplingParams`, in one place for every way into the engine.
"""

from __future__ import annotations

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from paceline.engine.request import SamplingParams
from paceline.text.stop_strings import StopStrings

Kind = Literal["completion", "chat"]
T = TypeVar("T")

_COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens for completions; chat has none
_MAX_STOPS = 4
_MAX_PROMPTS = 2048
_MAX_MESSAGE = 400  # characters of an error's message, which may quote what was sent


class RefusedError(Exception):
    """A request that gets an error object. ``status`` is HTTP's."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        message = message if len(message) <= _MAX_MESSAGE else message[: _MAX_MESSAGE - 3] + "..."
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def _only(served: T) -> AfterValidator:
    """The one value of a field that is served."""

    def check(value: T) -> T:
        if value != served:
            raise ValueError(f"only {served!r} is served")
        return value

    return AfterValidator(check)


def _not_empty(value: T) -> T:
    """Neither a list nor one of the lists in it is empty."""
    parts = value if isinstance(value, list) else [value]
    if not parts or any(part == [] for part in parts):
        raise ValueError("an empty list")
    return value


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class StreamOptions(_Model):
    """Of a streamed answer. ``include_obfuscation`` is ignored: nothing is padded."""

    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(_Model):
    """The only form of an answer that is served."""

    type: Literal["text"]


class TextPart(_Model):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(_Model):
    """One turn of a conversation. Clients send messages back as they received them, so empty extras are dropped."""

    role: str
    content: str | list[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: v for name, v in fields.items() if name in cls.model_fields or v not in (None, "", [], {})}

    @property
    def text(self) -> str:
        """The whole content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class IgnoredFields(_Model):
    """Accepted, checked for their type, and ignored: they change no answer."""

    user: Annotated[str, Field(description="a text")] = ""
    metadata: Annotated[dict[str, Any], Field(description="an object")] = {}
    store: Annotated[bool, Field(description="true or false")] = False
    service_tier: Annotated[str, Field(description="a text")] = ""
    parallel_tool_calls: Annotated[bool, Field(description="true or false")] = False
    safety_identifier: Annotated[str, Field(description="a text")] = ""
    prompt_cache_key: Annotated[str, Field(description="a text")] = ""
    prompt_cache_retention: Annotated[str, Field(description="a text")] = ""


class GenerationRequest(IgnoredFields):
    """What requests of both kinds have. A field's description completes "must be ..." in an error's message."""

    kind: ClassVar[Kind]
    prompt_field: ClassVar[str]

    model: Annotated[str, Field(min_length=1, description="the name of a model")]
    temperature: Annotated[float, Field(description="a number")] = 1.0
    top_p: Annotated[float | None, Field(description="a number")] = None
    top_k: Annotated[int | None, Field(description="a whole number")] = None
    min_p: Annotated[float | None, Field(description="a number")] = None
    seed: Annotated[
        int, Field(default_factory=lambda: secrets.randbits(31), description="a whole number, or left out for any")
    ]
    stop: Annotated[
        str | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=_MAX_STOPS)],
        Field(description=f"a text or a list of at most {_MAX_STOPS} texts, none of them empty"),
    ] = []
    stream: Annotated[bool, Field(description="true or false")] = False
    stream_options: Annotated[StreamOptions, Field(description="an object whose include_usage is true or false")] = (
        StreamOptions()
    )
    n: Annotated[int, _only(1), Field(description="1; no other number of choices is served")] = 1
    frequency_penalty: Annotated[float, _only(0.0), Field(description="0; penalties are not served")] = 0.0
    presence_penalty: Annotated[float, _only(0.0), Field(description="0; penalties are not served")] = 0.0
    logit_bias: Annotated[dict[str, float], Field(max_length=0, description="an empty object; no bias is served")] = {}

    @property
    @abstractmethod
    def num_choices(self) -> int:
        """How many texts the answer has."""

    @property
    @abstractmethod
    def max_new_tokens(self) -> int | None:
        """None: as many as the model has positions for."""

    @property
    def sampling_params(self) -> SamplingParams:
        """What the engine is asked for.

        Raises:
            SamplingError: a value is out of range.
        """
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        # A greedy request has all values too, so that one out of range is refused at any temperature.
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            seed=self.seed,
            do_sample=self.temperature != 0,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_strings=StopStrings(stops, scope="output") if stops else None,
        )


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    kind: ClassVar[Kind] = "completion"
    prompt_field: ClassVar[str] = "prompt"

    prompt: Annotated[
        str | list[int] | Annotated[list[str] | list[list[int]], Field(max_length=_MAX_PROMPTS)],
        AfterValidator(_not_empty),
        Field(description=f"a text, a list of ids, or a list of at most {_MAX_PROMPTS} texts or lists of ids"),
    ]
    max_tokens: Annotated[int, Field(ge=1, description="at least 1")] = _COMPLETION_TOKENS
    best_of: Annotated[int, _only(1), Field(description="1; no other number of candidates is served")] = 1
    echo: Annotated[bool, _only(False), Field(description="false; the prompt is not repeated")] = False
    suffix: Annotated[str, _only(""), Field(description="empty; nothing is inserted before a suffix")] = ""
    logprobs: Annotated[None, Field(description="left out; log-probabilities are not served")] = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [item for item in self.prompt if isinstance(item, int)]
        return [ids] if ids else [item for item in self.prompt if not isinstance(item, int)]

    @property
    def num_choices(self) -> int:
        return len(self.prompts)

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions. ``max_completion_tokens`` is the newer name of ``max_tokens`` and wins over it."""

    kind: ClassVar[Kind] = "chat"
    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[
        list[Message],
        Field(min_length=1, description="a list of messages that have a role and a content, both texts"),
    ]
    max_tokens: Annotated[int | None, Field(ge=1, description="at least 1")] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1, description="at least 1")] = None
    logprobs: Annotated[bool, _only(False), Field(description="false; log-probabilities are not served")] = False
    top_logprobs: Annotated[int, _only(0), Field(description="0; log-probabilities are not served")] = 0
    tools: Annotated[list[Any], Field(max_length=0, description="an empty list; tools are not served")] = []
    tool_choice: Annotated[Literal["none"], Field(description='"none"; tools are not served')] = "none"
    functions: Annotated[list[Any], Field(max_length=0, description="an empty list; functions are not served")] = []
    response_format: Annotated[TextFormat, Field(description='{"type": "text"}; no other format is served')] = (
        TextFormat(type="text")
    )
    modalities: Annotated[
        list[Literal["text"]], Field(max_length=1, description='["text"]; nothing else is served')
    ] = ["text"]

    @property
    def num_choices(self) -> int:
        return 1

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


REQUESTS: Mapping[Kind, type[CompletionRequest] | type[ChatRequest]] = {
    "completion": CompletionRequest,
    "chat": ChatRequest,
}


def read_request(kind: Kind, body: object) -> CompletionRequest | ChatRequest:
    """Check a request's JSON.

    Raises:
        RefusedError: with status 400, and the field that is wrong.
    """
    if not isinstance(body, dict):
        raise RefusedError(400, "the body must be a JSON object")
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        _check_characters(name, param=None)
        _check_characters(value, param=name)
    model: Callable[[object], CompletionRequest | ChatRequest] = REQUESTS[kind].model_validate
    try:
        return model(fields)
    except ValidationError as error:
        raise _refusal(error, REQUESTS[kind], fields) from error


def _refusal(error: ValidationError, request: type[GenerationRequest], fields: Mapping[str, object]) -> RefusedError:
    """The first error of a validation, by the field of the request that it is in."""
    first = error.errors(include_url=False, include_context=False)[0]
    name, *inside = map(str, first["loc"])
    if name not in request.model_fields:
        return RefusedError(400, f"{name!r} is not a field of this endpoint", param=name)
    if name == "messages" and first["type"] == "extra_forbidden":
        return RefusedError(400, f"{inside[-1]!r} of a message is not served; leave it out", param=name)
    description = request.model_fields[name].description
    if name not in fields:
        return RefusedError(400, f"{name} is missing; it must be {description}", param=name)
    return RefusedError(400, f"{name} must be {description}, not {fields[name]!r}", param=name)


def _check_characters(value: object, *, param: str | None) -> None:
    """JSON can write halves of surrogate pairs. No tokenizer and no answer can, so they would fail further on."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        where = "the name of a field" if param is None else param
        raise RefusedError(400, f"{where} holds half a surrogate pair, which is no character", param=param) from error
    except RecursionError as error:
        raise RefusedError(400, f"{param} is nested too deeply", param=param) from error
