"""Every request that fails has an error object and a status, whatever failed, and wherever."""

from __future__ import annotations

import asyncio
import json
import pickle
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from paceline.core.errors import CheckpointError, ContextError, PromptError, RankError, SamplingError, TargetLostError
from paceline.core.sampling import Sampling
from paceline.outputs import RequestOutput
from paceline.serving.ingress import Ingress, ModelRoute
from paceline.serving.protocol import read_request
from paceline.serving.replica import Item, Replica
from paceline.serving.responses import Accepted, Failed, TextDelta

BODY = {"model": "m", "prompt": "x"}
LOST: list[Exception] = [ActorDiedError(), RankError("rank 1 is gone"), TargetLostError("m was lost")]
FOUND = [(error, 503) for error in LOST] + [
    (PromptError("too long"), 400),
    (TypeError("no text"), 500),
    (CheckpointError("its tokenizer fails"), 500),
]


class Handle:
    """A deployment's handle whose stream has an opening, or not, and then fails."""

    def __init__(self, error: Exception, items: list[Item]) -> None:
        self._error, self._items = error, items
        self.stream = self

    def options(self, **_: object) -> Handle:
        return self

    async def remote(self, *_: object) -> AsyncIterator[Item]:
        for item in self._items:
            yield item
        raise self._error


async def answered(error: Exception, items: list[Item], **asked: object) -> Response:
    data = json.dumps({**BODY, **asked}).encode()

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": data, "more_body": False}

    return await posted(receive, error, items)


async def posted(receive: Callable[[], Awaitable[dict[str, object]]], error: Exception, items: list[Item]) -> Response:
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "server": ("here", 80),
             "scheme": "http", "query_string": b""}  # fmt: skip
    return await Ingress({"m": [ModelRoute(Handle(error, items), "m")]})(Request(scope, receive))


def test_a_body_without_end_is_not_read_to_its_end() -> None:
    parts = 0

    async def receive() -> dict[str, object]:
        nonlocal parts
        parts += 1
        assert parts < 100, "9 of these parts are too many"
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    assert asyncio.run(posted(receive, LOST[0], [])).status_code == 413


def test_who_hangs_up_while_asking_is_no_fault_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.disconnect"}

    assert asyncio.run(posted(receive, LOST[0], [])).status_code == 400
    assert not caplog.records


def answer(error: Exception, items: list[Item]) -> Response:
    return asyncio.run(answered(error, items))


@pytest.mark.parametrize("items", [[], [Accepted(1)], [Accepted(1), TextDelta(0, "a", 1)]], ids=len)
@pytest.mark.parametrize(("error", "status"), [*FOUND, (DeploymentUnavailableError(None), 503)], ids=str)
def test_an_error_of_any_kind_is_an_error_object(error: Exception, status: int, items: list[Item]) -> None:
    found = answer(error, items)
    body = json.loads(bytes(found.body))["error"]
    assert found.status_code == status and body["message"]
    assert body["type"] == ("invalid_request_error" if status == 400 else "server_error")
    assert (body["code"] == "model_unavailable") == (status == 503)


def test_an_error_of_another_process_is_what_it_was_there() -> None:
    for error, status in FOUND:
        across = RayTaskError("stream", "its traceback", error).as_instanceof_cause()
        assert answer(across, []).status_code == status


def test_a_value_out_of_range_is_named_also_from_another_process() -> None:
    with pytest.raises(SamplingError) as caught:
        Sampling(top_p=3)
    sent = pickle.loads(pickle.dumps(caught.value))
    for error in (caught.value, RayTaskError("stream", "its traceback", sent).as_instanceof_cause()):
        assert json.loads(bytes(answer(error, []).body))["error"]["param"] == "top_p"


def test_a_stream_that_fails_ends_with_an_error_event() -> None:
    async def events() -> list[dict]:
        found = await answered(ActorDiedError(), [Accepted(1), TextDelta(0, "a", 1)], stream=True)
        assert isinstance(found, StreamingResponse) and found.status_code == 200
        return [json.loads(bytes(event)[6:]) async for event in found.body_iterator]  # type: ignore[arg-type]

    said, failed = asyncio.run(events())
    assert said["choices"][0]["text"] == "a" and failed["error"]["code"] == "model_unavailable"


class Parts:
    """A tokenizer and a deployment; one of both fails."""

    chat_template = "a template"

    def __init__(self, error: Exception, *, text: bool) -> None:
        self._error, self._text = error, text

    def apply_chat_template(self, *_: object, **__: object) -> str:
        return "x"

    def encode(self, _: str, **__: object) -> list[int]:
        if self._text:
            raise self._error
        return [1]

    def decode(self, *_: object, **__: object) -> str:
        return ""

    def stream(self, *_: object, **__: object) -> object:
        raise self._error

    def close(self) -> None:
        """As of a deployment."""


class Bare(Replica):
    """Without workers."""

    def __init__(self, parts: Any) -> None:
        self._tokenizers, self._models, self._threads = {"m": parts}, parts, ThreadPoolExecutor(1)


@pytest.mark.parametrize("text", [True, False])
@pytest.mark.parametrize(("error", "status"), FOUND, ids=str)
def test_a_replica_sends_failures_in_place_of_raising(error: Exception, status: int, text: bool) -> None:
    async def items() -> list[Item]:
        return [item async for item in Bare(Parts(error, text=text)).stream("m", read_request("completion", BODY))]

    (failed,) = asyncio.run(items())
    assert isinstance(failed, Failed) and failed.status == status


@pytest.mark.parametrize(
    ("body", "param"), [(BODY, "prompt"), ({"model": "m", "messages": [{"role": "user", "content": "x"}]}, "messages")]
)
def test_a_prompt_that_is_too_long_has_the_code_that_clients_know(body: dict, param: str) -> None:
    """In the worker; the clients of OpenAI's service look for the code, and shorten the prompt."""

    async def items(error: Exception) -> list[Item]:
        replica = Bare(Parts(RayTaskError("stream", "its traceback", error).as_instanceof_cause(), text=False))
        return [
            item
            async for item in replica.stream("m", read_request("chat" if param == "messages" else "completion", body))
        ]

    (failed,) = asyncio.run(items(ContextError("9 tokens leave no room")))
    assert isinstance(failed, Failed) and (failed.status, failed.param) == (400, param)
    assert failed.code == "context_length_exceeded"
    (failed,) = asyncio.run(items(PromptError("outside the vocabulary")))
    assert isinstance(failed, Failed) and (failed.status, failed.param, failed.code) == (400, param, None)


class Wordless(Parts):
    """A tokenizer without text for what its target says, id 7, and the stream of that target."""

    def __init__(self) -> None:
        super().__init__(KeyError(7), text=False)
        self.closed = 0

    def decode(self, token_ids: list[int], **__: object) -> str:
        if 7 in token_ids:
            raise self._error
        return ""

    def stream(self, *_: object, **__: object) -> Wordless:
        return self

    def __next__(self) -> RequestOutput:
        return RequestOutput(0, (7,), 0, None)

    def close(self) -> None:
        self.closed += 1


def test_a_tokenizer_that_fails_at_an_answer_fails_that_request_and_frees_the_target() -> None:
    parts = Wordless()
    replica = Bare(parts)

    async def items() -> list[Item]:
        return [item async for item in replica.stream("m", read_request("completion", BODY))]

    opening, failed = asyncio.run(items())
    assert opening == Accepted(1) and isinstance(failed, Failed) and failed.status == 500
    assert "KeyError" in failed.message and parts.closed == 1
