"""Fields that the requests of all endpoints share, and the parser of request bodies.

Fields have the meaning of OpenAI's API, or vLLM's if OpenAI lacks them. `SamplingParams` checks the ranges of sampling
values for all interfaces. A field's description completes "must be ..." in an error's message.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from paceline.engine.request import SamplingParams
from paceline.serving.errors import RefusedError
from paceline.serving.settings import SpecMetrics

ModelT = TypeVar("ModelT", bound=BaseModel)

MAX_STOPS = 4
MAX_CHOICES = 128
MAX_LOGPROBS = 20


_MEDIA = {"image": "images are", "audio": "audio is", "video": "videos are", "file": "files are"}


def refuse_media(part: Any) -> Any:
    """Raise ValueError for a part of a content that is not text; otherwise return it."""
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and (found := next((name for name in _MEDIA if name in kind), None)):
        raise ValueError(f"{_MEDIA[found]} not served; send text alone")
    return part


class Strict(BaseModel):
    """A value of a request: no unknown fields, no conversion of types, nothing infinite."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        """A null is a missing field."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


class StreamOptions(Strict):
    """Options of a streamed response. ``include_obfuscation`` is ignored: nothing is padded."""

    include_usage: bool = False
    include_obfuscation: bool = False
    continuous_usage_stats: bool = False

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats: expected include_usage: true with it; set it")
        return self


class SpeculativeOptions(Strict):
    """Drafting options of one request, within the server's setting.

    k        maximum drafted tokens per round
    drafter  name of the one drafter of the model's choice that proposes
    metrics  acceptance metrics in the response, replacing the server's setting
    """

    enabled: bool = True
    k: Annotated[int | None, Field(ge=0)] = None
    drafter: str | None = None
    metrics: SpecMetrics | None = None

    @model_validator(mode="after")
    def _check(self) -> SpeculativeOptions:
        if self.is_off and self.drafter is not None:
            raise ValueError("drafter: expected none where nothing is drafted; omit it, or enabled: false and k: 0")
        return self

    @property
    def is_off(self) -> bool:
        return not self.enabled or self.k == 0


class IgnoredFields(Strict):
    """Accepted, checked for their type, and ignored: they change no answer."""

    user: Annotated[str, Field(description="a text")] = ""
    metadata: Annotated[dict[str, Any], Field(description="an object")] = {}
    store: Annotated[bool, Field(description="true or false")] = False
    service_tier: Annotated[str, Field(description="a text")] = ""
    safety_identifier: Annotated[str, Field(description="a text")] = ""
    prompt_cache_key: Annotated[str, Field(description="a text")] = ""
    prompt_cache_retention: Annotated[str, Field(description="a string")] = ""


class OwnSamplingFields(Strict):
    """How tokens are chosen, where it is said as in OpenAI's API or in vLLM."""

    # `SamplingParams` checks bounds that are only in the description, for all interfaces.
    temperature: Annotated[float, Field(description="a number from 0 on", json_schema_extra={"minimum": 0})] = 1.0
    top_p: Annotated[
        float | None,
        Field(description="a number above 0, at most 1", json_schema_extra={"minimum": 1e-4, "maximum": 1}),
    ] = None
    top_k: Annotated[
        int | None, Field(description="a whole number; 0 or -1 is off", json_schema_extra={"minimum": -1})
    ] = None
    min_p: Annotated[
        float | None, Field(description="a number from 0 to 1", json_schema_extra={"minimum": 0, "maximum": 1})
    ] = None
    seed: Annotated[
        int, Field(default_factory=lambda: secrets.randbits(31), description="a whole number, or null for a random one")
    ]
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2")] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2, description="a number from -2 to 2")] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, description="a number above 0")] = 1.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]],
        Field(max_length=300, description="an object from at most 300 token ids to numbers from -100 to 100"),
    ] = {}
    min_tokens: Annotated[int, Field(ge=0, description="a whole number from 0 on")] = 0
    ignore_eos: Annotated[bool, Field(description="true or false")] = False
    prompt_logprobs: Annotated[
        None, Field(description="null (/v1/completions returns them with echo: true and logprobs)")
    ] = None
    speculative: Annotated[
        SpeculativeOptions,
        Field(description='an object such as {"enabled": false}, {"k": 2} or {"metrics": "detailed"}'),
    ] = SpeculativeOptions()

    @model_validator(mode="after")
    def _check_bias(self) -> OwnSamplingFields:
        for name in self.logit_bias:
            if not name.isascii() or not name.isdecimal():
                raise ValueError(f"logit_bias: expected token ids as keys, got {name!r}; correct them")
        return self


SAME_SAMPLING = tuple(
    name
    for name in SamplingParams.asked_names()
    if name not in {"max_new_tokens", "logprobs", "prompt_logprobs", "repetition_penalty"}
)
"""Fields of `SamplingParams` with the same name and meaning in requests."""

if TYPE_CHECKING:
    SamplingFields = OwnSamplingFields
else:
    _types = get_type_hints(SamplingParams)
    SamplingFields = create_model(
        "SamplingFields",
        __base__=OwnSamplingFields,
        **{
            one.name: (_types[one.name], Field(one.default, description=one.metadata["help"]))
            for one in fields(SamplingParams)
            if one.name in SAME_SAMPLING and one.name not in OwnSamplingFields.model_fields
        },
    )


class Streamed(Strict):
    """Whether the answer comes in parts. The endpoints' ``stream_options`` differ."""

    stream: Annotated[bool, Field(description="true or false")] = False

    @model_validator(mode="after")
    def _check_stream(self) -> Streamed:
        if "stream_options" in self.model_fields_set and not self.stream:
            raise RefusedError(400, "stream_options: expected stream: true with it; omit it", param="stream_options")
        return self


class StreamFields(Streamed):
    """How the answer comes, and what it says about its tokens."""

    stream_options: Annotated[StreamOptions, Field(description="an object whose include_usage is true or false")] = (
        StreamOptions()
    )
    return_token_ids: Annotated[bool, Field(description="true or false")] = False
    return_token_origins: Annotated[bool, Field(description="true or false")] = False


class StructuredOutputs(Strict):
    """vLLM's ``structured_outputs``: what the text must be. Exactly one is given."""

    json_schema: Annotated[dict[str, Any] | str | bool | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Annotated[list[str] | None, Field(min_length=1)] = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        fields_set = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(fields_set) != 1:
            raise ValueError(
                f"expected exactly one of json, regex, choice, grammar and json_object, got {len(fields_set)}; "
                "remove the others"
            )
        return self


class StructureFields(Strict):
    """vLLM's way to say what the text must be."""

    structured_outputs: Annotated[
        StructuredOutputs | None,
        Field(description="an object with one of json, regex, choice, grammar and json_object"),
    ] = None


StopField = Annotated[
    Annotated[str, Field(min_length=1)]
    | Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)],
    Field(description=f"a string or a list of at most {MAX_STOPS} strings, none of them empty"),
]
ModelField = Annotated[str, Field(min_length=1, description="the name of a model")]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]  # no vocabulary has more, and tokenizers fail at more than 32 bits


class JsonSchema(Strict):
    """The `json_schema` object inside ``response_format``."""

    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool = False


class ResponseFormat(Strict):
    """Allowed outputs: any, JSON objects, or those that a schema allows."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: expected type json_schema with it; correct the type")
        return self


class GenerationFields(SamplingFields, StreamFields, StructureFields, IgnoredFields):
    """Fields that completions and chats share."""

    model: ModelField
    stop: StopField = []
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES, description=f"a whole number from 1 to {MAX_CHOICES}")] = 1
    response_format: Annotated[
        ResponseFormat, Field(description='{"type": "text"}, "json_object", or "json_schema" with a json_schema')
    ] = ResponseFormat(type="text")

    @model_validator(mode="after")
    def _check_structure(self) -> GenerationFields:
        if self.response_format.type != "text" and self.structured_outputs is not None:
            message = (
                "response_format: expected either response_format or structured_outputs, got both; omit one of them"
            )
            raise RefusedError(400, message, param="response_format")
        return self

    @property
    def structured(self) -> StructuredOutputs | None:
        form = self.response_format
        if form.json_schema is not None:
            return StructuredOutputs.model_validate({"json": form.json_schema.schema_})
        return StructuredOutputs(json_object=True) if form.type == "json_object" else self.structured_outputs


def read_body(model: type[ModelT], body: bytes) -> ModelT:
    """Check the JSON of a request. All of it runs in C, so a MiB takes some 20 ms. Raises RefusedError (400) with the
    invalid field.
    """
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        is_json = error.errors(include_url=False)[0]["type"] != "json_invalid"
        raise _refusal(error, model, json.loads(body) if is_json else None) from error
    except RecursionError as error:
        raise RefusedError(
            400, "the body: expected at most the allowed depth of nesting, got more; simplify it"
        ) from error


def validated(model: type[ModelT], fields: dict[str, Any]) -> ModelT:
    """Make a request of the fields of another one. Raises as `read_body`."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _refusal(error, model, fields) from error


def _refusal(error: ValidationError, model: type[BaseModel], body: object) -> RefusedError:
    """The first error of a body, with the request's field and the place in that field."""
    errors = error.errors(include_url=False, include_context=True)
    first = errors[0]
    if first["type"] == "json_invalid":
        return RefusedError(400, f"the body: expected JSON, got {first['msg']}; correct it")
    if not first["loc"]:
        message = first["msg"] if first["type"] == "value_error" else "the body: expected a JSON object; send one"
        return RefusedError(400, message.removeprefix("Value error, "))
    name = str(first["loc"][0])
    if name not in model.model_fields:
        return RefusedError(400, f"{name}: not a field of this endpoint; omit it", param=name)
    description = model.model_fields[name].description or "as OpenAI's API says"
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return RefusedError(400, f"{name}: expected {description}, got nothing; add it", param=name)
    # A value of a union type has an error for each type: the deepest is the most specific.
    places = [(_place(one["loc"], body), one) for one in errors if one["loc"][0] == name]
    depth = max(len(place) for place, _ in places)
    deepest = [(place, one) for place, one in places if len(place) == depth]
    place, worst = deepest[0]
    # For a union of several list types, the field's description is more helpful than that of an entry.
    is_either = (
        depth > 1 and isinstance(first["loc"][1], str) and isinstance(body, dict) and isinstance(body[name], list)
    )
    if depth > 1 and not (is_either and len({where for where, _ in deepest}) > 1):
        sentences = dict.fromkeys(_sentence(one) for where, one in deepest if where == place)
        return RefusedError(400, _at(place, worst, " or ".join(sentences)), param=name)
    why = f" ({first['msg'].removeprefix('Value error, ')})" if first["type"] == "value_error" else ""
    return RefusedError(
        400, f"{name}: expected {description}, got {_shown(first['input'])}{why}; correct it", param=name
    )


_PLAIN = {
    "string_type": "a string",
    "string_too_short": "a string that is not empty",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "too_short": "a list with an entry",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "none_required": "null",
}
"""Expected value in messages, by the type of pydantic's error."""


def _place(location: tuple[int | str, ...], body: object) -> tuple[int | str, ...]:
    """The fields and numbers of an error's location, without what it says of alternatives of a type."""
    place: list[int | str] = []
    value: Any = body
    for number, step in enumerate(location):
        if isinstance(value, dict) and isinstance(step, str) and (step in value or number == len(location) - 1):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            continue
        place.append(step)
    return tuple(place)


def _sentence(error: Any) -> str:
    """An allowed value, to follow "expected"."""
    if error["type"] == "literal_error":
        return str(error["ctx"]["expected"])
    message = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input should be ")
    return _PLAIN.get(error["type"], message)


def _at(place: tuple[int | str, ...], error: Any, sentence: str) -> str:
    path = str(place[0]) + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place[1:])
    if error["type"] == "missing":
        return f"{path}: expected a value, got nothing; add it"
    if error["type"] == "extra_forbidden":
        outer, _, last = path.rpartition(".")
        return f"{outer}: {last!r} is not a field; omit it"
    if error["type"] == "value_error":
        return f"{path}: {sentence}"
    return f"{path}: expected {sentence}, got {_shown(error['input'])}; correct it"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."
