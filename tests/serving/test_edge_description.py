"""The description at /openapi.json is true to what is taken; pages of other origins; encoded bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from paceline.core.errors import ConfigurationError
from paceline.serving.api import create_app
from paceline.serving.errors import RefusedError
from paceline.serving.lifecycle import ModelLifecycle
from paceline.serving.model_server import LocalRouter, sampling_params
from paceline.serving.openai.fields import read_body
from paceline.serving.openai.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from paceline.serving.settings import ApiSettings
from tests.decoder.tiny import Workshop
from tests.serving.edge import chat_tokenizer, running, scripted
from tests.serving.test_lifecycle import PlannedLoader, Service, service

DESCRIBED = create_app(LocalRouter({}), ApiSettings()).openapi()
SCHEMAS: dict[str, Any] = DESCRIBED["components"]["schemas"]
MODELS = (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
BASES: dict[str, dict[str, Any]] = {
    "ChatRequest": {"model": "m", "messages": [{"role": "user", "content": "x"}]},
    "CompletionRequest": {"model": "m", "prompt": "x"},
    "ResponsesRequest": {"model": "m", "input": "x"},
    "TokenizeRequest": {"model": "m", "prompt": "x"},
    "DetokenizeRequest": {"model": "m", "tokens": [1]},
}
OTHERS: dict[str, dict[str, Any]] = {  # what a field goes with
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}, "max_tokens": {"echo": True},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "x"}}]},
}  # fmt: skip
CROSS = (  # what no schema of one field says
    "json_schema: expected type", "one of json, regex", "continuous_usage_stats: expected",
    "expected a function in tools", "has no effect on", "expected either prompt", "an item of type", "best_of",
    "strict: true of", "unless the message has tool_calls", "an empty list", "logit_bias: expected token ids",
    "structured_outputs", "omit one of them", "one item that the model reads",
)  # fmt: skip


def values(schema: dict[str, Any], depth: int = 0) -> list[Any]:
    """Values at the borders of a schema."""
    if "$ref" in schema:
        return values(SCHEMAS[schema["$ref"].rpartition("/")[2]], depth + 1)
    if "anyOf" in schema:
        rest = {name: value for name, value in schema.items() if name != "anyOf"}
        return [value for one in schema["anyOf"] for value in values({**rest, **one}, depth)]
    if "const" in schema or "enum" in schema:
        return list(schema.get("enum", [schema.get("const")]))
    kind, least, most = schema.get("type"), schema.get("minimum"), schema.get("maximum")
    if kind == "array":
        inner = [[one] for one in values(schema.get("items") or {}, depth + 1)] if depth < 4 else []
        return [*inner, *([] if schema.get("minItems") else [[]])] if schema.get("maxItems") != 0 else [[]]
    if kind == "object":
        fields, needed = schema.get("properties", {}), schema.get("required", [])
        base = {name: values(fields[name], depth + 1)[0] for name in needed}
        more = [base | {name: one} for name in fields if depth < 4 for one in values(fields[name], depth + 1)]
        return [base, *more]
    if kind in ("integer", "number"):
        above = schema.get("exclusiveMinimum")
        first = least if least is not None else above + 1 if above is not None else 0
        return [first, first + 1 if most is None else most]
    plain: dict[Any, list[Any]] = {"string": ["x"], "boolean": [True, False], "null": [None]}
    return plain.get(kind, ["x"])


def check(model: Any, body: dict[str, Any], tokenizer: Any) -> None:
    """Read a body as its endpoint does, up to the sampling values."""
    request = read_body(model, json.dumps(body).encode())
    if isinstance(request, ResponsesRequest):
        request = request.chat()
    if isinstance(request, ChatRequest | CompletionRequest):
        sampling_params(request, tokenizer).check()


@pytest.mark.parametrize("model", MODELS, ids=lambda one: one.__name__)
def test_described_values_are_accepted(model: Any) -> None:
    fields, tokenizer = SCHEMAS[model.__name__]["properties"], chat_tokenizer()
    base = BASES[model.__name__]
    taken = 0
    for name, schema in fields.items():
        for value in values(schema):
            others = {} if name not in OTHERS else {k: v for k, v in OTHERS[name].items() if k in fields}
            if name == "tool_choice" and model is ResponsesRequest:
                others = {"tools": [{"type": "function", "name": "x"}]}
            try:
                check(model, base | others | {name: value}, tokenizer)
            except (RefusedError, ValueError) as error:
                assert any(one in str(error) for one in CROSS), f"{name}={value!r}: {error}"
            else:
                taken += 1
    assert taken > len(fields) / 2


@pytest.mark.parametrize("model", MODELS, ids=lambda one: one.__name__)
def test_values_beyond_the_described_limits_are_rejected(model: Any) -> None:
    """And never by a sentence that the value fulfils."""
    fields, tokenizer = SCHEMAS[model.__name__]["properties"], chat_tokenizer()
    base = BASES[model.__name__]
    for name, schema in fields.items():
        other = [] if any(kind in json.dumps(schema) for kind in ("object", "$ref")) else [{"no": "such"}]
        for one in schema.get("anyOf", [schema]):
            bounds = {**schema, **one}
            beyond = [bounds[key] + step for key, step in (("minimum", -1), ("maximum", 1)) if key in bounds]
            for value in [*beyond, *other]:
                with pytest.raises((RefusedError, ValueError)) as refused:
                    check(model, base | {name: value}, tokenizer)
                assert name in str(refused.value), refused.value


def test_every_described_response_is_sent() -> None:
    operations = [one for methods in DESCRIBED["paths"].values() for one in methods.values()]
    assert not any("422" in one["responses"] for one in operations) and "HTTPValidationError" not in SCHEMAS
    keyed = create_app(LocalRouter({}), ApiSettings(api_keys=("k",))).openapi()
    assert keyed["security"] == [{"key": []}] and "security" not in DESCRIBED


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    app, _, _ = scripted(lambda _: "yes", api_keys=("k",), max_body_bytes=50_000, cors_origins=("https://a.org",))
    with running(app) as where:
        yield where


BODY = json.dumps({"model": "m", "prompt": "x"}).encode()
HEADERS = {"authorization": "Bearer k", "content-type": "application/json"}


def test_an_encoded_body_is_refused(address: str) -> None:
    answer = httpx.post(f"{address}/v1/completions", content=BODY, headers=HEADERS | {"content-encoding": "gzip"})
    assert answer.status_code == 415 and "the body is encoded as 'gzip'" in answer.text
    answer = httpx.post(f"{address}/v1/completions", content=BODY, headers=HEADERS | {"content-encoding": "identity"})
    assert answer.status_code == 200


def test_only_configured_origins_use_the_api(address: str) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for origin, path, allowed in (
        ("https://a.org", "/v1/completions", True),
        ("https://b.org", "/v1/completions", False),
        ("https://a.org", "/admin/models/load", False),
    ):
        before = httpx.options(address + path, headers={"origin": origin, **asked})
        assert (before.headers.get("access-control-allow-origin") == origin) is allowed
        assert (before.status_code == 200) is allowed
    answer = httpx.post(f"{address}/v1/completions", content=BODY, headers=HEADERS | {"origin": "https://a.org"})
    refused = httpx.post(f"{address}/v1/completions", content=BODY, headers={"origin": "https://a.org"})
    assert refused.status_code == 401, "a page needs the key as anything else"
    for one in (answer, refused):
        assert one.headers["access-control-allow-origin"] == "https://a.org"
        assert "x-request-id" in one.headers["access-control-expose-headers"]


def test_other_origins_are_rejected_by_default() -> None:
    app, _, _ = scripted(lambda _: "yes")
    with running(app) as where:
        asked = {"origin": "https://a.org", "access-control-request-method": "POST"}
        assert httpx.options(f"{where}/v1/completions", headers=asked).status_code == 405
        assert "access-control-allow-origin" not in httpx.get(f"{where}/v1/models", headers=asked).headers


@pytest.mark.parametrize("origin", ["", "a.org", "https://a.org/", "https://a.org/path", "null"])
def test_an_invalid_origin_is_rejected(origin: str) -> None:
    with pytest.raises(ConfigurationError, match="cors_origins: expected an origin"):
        ApiSettings(cors_origins=(origin,))


# ---- requests that schemathesis makes up from the description

KEY = "k"
NAMES = ("kept", "late", "nobody")  # of which the last one is not served
CONFIG = schemathesis.Config.from_dict({"phases": {"coverage": {"enabled": False}}})
FULL = create_app(LocalRouter({}), ApiSettings(), ModelLifecycle(PlannedLoader([]), {}))
MADE_UP = schemathesis.openapi.from_dict(FULL.openapi(), config=CONFIG)


@MADE_UP.hook
def map_body(context: object, body: Any) -> Any:
    """Most requests are for a model that is served: a name that is made up has the same answer every time."""
    if isinstance(body, dict) and isinstance(name := body.get("model"), str):
        body["model"] = NAMES[len(name) % len(NAMES)]
    return body


@pytest.fixture(scope="module")
def served(workshop: Workshop) -> Iterator[Service]:
    models = {"name": "kept", "n_positions": 4096}, {"name": "late", "load": "on_demand"}
    with service(workshop.checkpoint(), *models, key=KEY, api_keys=(KEY,), access_log=False) as made:
        yield made


@MADE_UP.parametrize()
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
def test_no_request_ends_in_a_server_error(case: schemathesis.Case, served: Service) -> None:
    """503 is the answer of a model that an operator has unloaded, as such requests do: it may be asked again."""
    response = case.call(base_url=served.address, headers={"authorization": f"Bearer {KEY}"})
    assert response.status_code < 500 or (response.status_code == 503 and "retry-after" in response.headers)
    if response.status_code >= 400:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}, response.text
