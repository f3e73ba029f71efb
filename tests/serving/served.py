"""A plan served by HTTP on real Ray Serve, for tests that call it with OpenAI's client; no tests."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import openai
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.service_processes import processes
from paceline import AutoDecoder, SpeculativeGenerator
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.planning.groups import ReplicaGroupPlan
from paceline.placement.remote.drafter import DraftTimeouts
from paceline.serving.ray_app import ListeningSocket, application
from tests.decoder.tiny import VOCABULARY
from tests.simulation import check_nothing_left
from tests.waiting import until


def with_tokenizer(folder: Path, *, template: str | None) -> Path:
    """One id for each of 96 characters."""
    letters = {chr(32 + index): index for index in range(VOCABULARY)}
    made = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token=" "))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, clean_up_tokenization_spaces=False)
    if template is not None:
        fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def running() -> dict[str, int]:
    """The processes of the service below this one."""
    return processes(os.getpid())


def process(name: str) -> int:
    """The process with that name, waited for: a killed worker is started again while requests wait."""
    return until(lambda: running().get(name, 0), 90, what=f"{name} is not back", pause_s=0.05)


def replica(model: str) -> Any:
    """The handle of a model's deployment."""
    return serve.get_deployment_handle(f"model-{model}", "paceline")


@contextmanager
def struck(name: str, number: int) -> Iterator[None]:
    """A process gets a signal, and one that was stopped continues in the end."""
    pid = process(name)
    os.kill(pid, number)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def check_it_answers_when_idle(replica: Any) -> None:
    """A handle of a model: it answers while it has requests and just after the last one."""
    running = 1.0
    while running:
        families = text_string_to_metric_families(replica.metrics_text.remote().result(timeout_s=15))
        samples = [one for family in families for one in family.samples]
        running = sum(one.value for one in samples if one.name == "vllm:num_requests_running")
        time.sleep(0.2)
    for _ in range(4):
        replica.describe.remote().result(timeout_s=15)
        time.sleep(0.2)


def stop_until_replaced(*names: str) -> None:
    """Stop these processes, and wait until others do their work."""
    stopped = {name: process(name) for name in names}
    for number in stopped.values():
        os.kill(number, signal.SIGSTOP)
    try:
        until(
            lambda: not any(running().get(name, number) == number for name, number in stopped.items()),
            what="they are not replaced", pause_s=0.2,
        )  # fmt: skip
    finally:
        for number in stopped.values():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)


def said(home: Path, prompt: str, **asked: object) -> str:
    """Plain decoding of the target in this process."""
    decoder = AutoDecoder.from_pretrained(home / "target", n_positions=128, amp="f32", backend="eager")
    ids = [ord(letter) - 32 for letter in prompt]
    (row,) = SpeculativeGenerator(None, decoder, k=0, verify_width=5).sample([ids], **asked).tolist()  # type: ignore[arg-type]
    return "".join(chr(32 + token) for token in row[len(ids) :])


def answer_of(client: openai.OpenAI) -> Any:
    """The models' states, or None while no process responds."""
    with suppress(OSError, HTTPException):
        return admin(client, "GET", "")
    return None


def admin(client: openai.OpenAI, method: str, path: str, body: object = None) -> Any:
    """Response of an operator's route."""
    address = str(client.base_url).replace("/v1/", f"/admin/models{path}")
    request = Request(
        address, None if body is None else json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urlopen(request, timeout=90) as answer:
        return json.load(answer)


def statuses(client: openai.OpenAI, model: str) -> list[int]:
    """Responses of sixteen requests on separate connections, so that several processes get some of them."""
    with ThreadPoolExecutor(8) as pool:
        asked = {"model": model, "prompt": "x", "max_tokens": 1}
        sent = [pool.submit(client.completions.with_raw_response.create, **asked) for _ in range(16)]  # type: ignore[call-overload]
        return [getattr(one.exception(180), "status_code", 200) for one in sent]


@contextmanager
def served(groups: Sequence[ReplicaGroupPlan], *, by_proxy: bool = False) -> Iterator[openai.OpenAI]:
    """A client of it, while it is served, as `paceline serve` does it: ``by_proxy`` in a cluster that it joined."""
    draft_timeouts = DraftTimeouts(reply_timeout_s=2)
    fault_policy = FaultPolicy(
        startup_timeout_s=90, stall_timeout_s=30, placement_timeout_s=20, draft_timeouts=draft_timeouts
    )
    with ListeningSocket("127.0.0.1", 0) as listening:
        port, handover = listening.port, listening.handover
        if by_proxy:
            listening.close()
            handover = ""
            serve.start(http_options={"host": "127.0.0.1", "port": port})
        else:
            serve.start(proxy_location="Disabled")
        app = application(groups, fault_policy, handover=handover)
        try:
            serve.run(app, name="paceline", route_prefix="/", external_scaler_enabled=True)
            with openai.OpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60
            ) as connected:
                yield connected
        finally:
            serve.shutdown()
            check_nothing_left(90)  # a replica has 60 seconds to end, the ledger then ten
