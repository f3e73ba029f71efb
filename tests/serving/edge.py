"""The HTTP edge under uvicorn without Ray, over an engine that says what a test wants; no tests."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import openai
import uvicorn
from fastapi import FastAPI
from transformers import PreTrainedTokenizerFast

from paceline.core.errors import QueueFullError
from paceline.engine.request import TargetLimits
from paceline.outputs import RequestOutput, TokenLogprobs
from paceline.serving.api import create_app
from paceline.serving.model_server import LocalRouter, ModelServer
from paceline.serving.router import ModelCard, PlacedModel
from paceline.serving.settings import ApiSettings
from paceline.workers.calls import Call, CallUpdate, Sink
from tests.draft.tokenizers_of_two import every_byte

TEMPLATE = (
    "{% if tools %}[tools]{% for tool in tools %}{{ tool.function.name }} {% endfor %}<tool_call>[/tools]{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.name }} {{ call.function.arguments | tojson }}"
    "</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% if open_reasoning %}<think>\n{% endif %}"
    "{% if no_reasoning %}<think></think>{% endif %}{% endif %}"
    "{# reasoning ends with </think> #}"
)
POSITIONS = 4096


def chat_tokenizer(template: str = TEMPLATE, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Bytes and a few merges, with a chat template and special tokens."""
    tokenizer = every_byte()
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = template
    return tokenizer


class ScriptedEngine:
    """Stands for `paceline.workers.shared_engine.SharedEngine`: says a text, in rounds of three tokens.

    say      prompt's text -> the answer's; of every round two tokens were drafted, three where that fits
    pause_s  seconds before every round
    in_turn  begin a request only when the one before has left its slot
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, say: Callable[[str], str]) -> None:
        self.tokenizer, self.say, self.pause_s = tokenizer, say, 0.0
        self.full, self.calls, self.ended = False, list[Call](), list[str]()
        self.left: set[tuple[str, int]] = set()  # (ticket, index)
        self.in_turn, self._leaving = False, threading.Condition()

    def submit(self, call: Call, sink: Sink) -> None:
        if self.full:
            raise QueueFullError("4 requests wait", retry_after=7.0)
        self.calls.append(call)
        threading.Thread(target=self._speak, args=(call, sink), daemon=True).start()

    def end(self, ticket: str) -> bool:
        self.ended.append(ticket)
        return True

    def leave(self, ticket: str, indices: Collection[int]) -> None:
        with self._leaving:
            self.left.update((ticket, index) for index in indices)
            self._leaving.notify_all()

    def _speak(self, call: Call, sink: Sink) -> None:
        for number, request in enumerate(call.requests):
            if self.in_turn and number:
                with self._leaving:
                    self._leaving.wait_for(lambda before=number - 1: (call.ticket, before) in self.left, timeout=60)
            text = self.say(self.tokenizer.decode(list(request.prompt)))
            room = request.max_length - len(request.prompt)
            tokens = self.tokenizer.encode(text)
            kept = tokens[:room]
            for first in range(0, len(kept), 3):
                time.sleep(self.pause_s)
                if call.ticket in self.ended:
                    return
                last = first + 3 >= len(kept)
                reason = ("stop" if len(tokens) <= room else "length") if last else None
                part = tuple(kept[first : first + 3])
                said = tuple(TokenLogprobs(token, -0.5, 1, _likeliest(token, request.num_logprobs)) for token in part)
                output = RequestOutput(
                    request.index, part, min(2, len(part)), reason, None, 2 + (first % 2),  # type: ignore[arg-type]
                    token_logprobs=None if request.num_logprobs is None else said,
                    replaced=() if request.num_logprobs is None else (abs(part[-1] - 1),),
                )  # fmt: skip
                ended = last and request is call.requests[-1]
                sink([CallUpdate(call.ticket, (output,), ended=ended)])


def _likeliest(token: int, count: int | None) -> tuple[tuple[int, float], ...]:
    """A token itself and the ids before it."""
    return tuple((abs(token - place), -0.5 - place) for place in range(count or 0))


def scripted(
    say: Callable[[str], str], template: str = TEMPLATE, special: Sequence[str] = (), **settings: Any
) -> tuple[FastAPI, ScriptedEngine, ModelServer]:
    """An application over one model, "m"."""
    tokenizer = chat_tokenizer(template, special)
    engine = ScriptedEngine(tokenizer, say)
    limits = TargetLimits(len(tokenizer), POSITIONS, (0,), drafters=DRAFTERS)
    server = ModelServer(tokenizer, engine, limits, card=card())  # type: ignore[arg-type]
    return create_app(LocalRouter({"m": server}), ApiSettings(**settings)), engine, server


DRAFTERS = ("draft", "ngram")


def card() -> ModelCard:
    """The card of a model with a choice of drafts."""
    placement = (
        PlacedModel("m", "target", "4f1a", (0, 1), "kitchen"),
        PlacedModel("d", "draft", "4f1a", (2,), "kitchen"),
    )
    return ModelCard("m", 1_700_000_000, POSITIONS, ("choice",), DRAFTERS, num_spec_tokens=3, placement=placement)


@contextmanager
def running(app: FastAPI) -> Iterator[str]:
    """The address of an application that runs under uvicorn, in a thread."""
    with socket.socket() as link:
        link.bind(("127.0.0.1", 0))
        port = link.getsockname()[1]
    config = uvicorn.Config(app, port=port, log_level=logging.ERROR, ws="none", loop="asyncio", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


@contextmanager
def client_of(app: FastAPI, key: str = "none") -> Iterator[openai.OpenAI]:
    """OpenAI's own client of an application."""
    with (
        running(app) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60) as client,
    ):
        yield client


def messages_of(app: FastAPI, receive: Callable[[], Awaitable[Any]]) -> list[Any]:
    """Messages of an application to a POST of /v1/completions, without a server between."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
    asyncio.run(app(scope | {"raw_path": b"/v1/completions", "root_path": ""}, receive, send))
    return sent


def texts(chunks: Sequence[Any]) -> str:
    """The contents of a streamed chat."""
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
