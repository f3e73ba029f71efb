"""The service, called by OpenAI's own client: planned models with HTTP, on real Ray Serve."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from urllib.request import urlopen

import openai
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.cluster_utils import Cluster

from benchmarks.service_processes import count_processes
from paceline.placement import INSTANCES
from paceline.placement.cluster.core_allocator import call_allocator
from paceline.placement.cluster.nodes import NAMESPACE
from paceline.placement.planning.groups import plan_groups
from paceline.placement.planning.model_specs import models_of
from paceline.serving.serve_lifecycle import actor_name
from tests.decoder.tiny import save_pair
from tests.serving.served import (
    admin,
    answer_of,
    check_it_answers_when_idle,
    process,
    replica,
    said,
    served,
    stop_until_replaced,
    struck,
    with_tokenizer,
)
from tests.waiting import until

pytestmark = pytest.mark.ray
PROMPT = "def f(a, b):"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{% endfor %}a:"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_pair(folder)
    with_tokenizer(folder / "target", template=TEMPLATE)
    with_tokenizer(folder / "draft", template=None)
    return folder


@pytest.fixture(scope="module")
def client(cluster: object, home: Path) -> Iterator[openai.OpenAI]:
    """Two models: one on two ranks, with a draft, and the draft as a model, which has no chat template."""
    shape = {"n_positions": 128, "amp": "f32", "backend": "eager", "tp_degree": 1, "batch_size": 2}
    entries = [
        {"name": "chat", "path": str(home / "target"), **shape, "tp_degree": 2},
        {"name": "chat-draft", "path": str(home / "draft"), "draft_of": "chat", **shape},
        {"name": "small", "path": str(home / "draft"), **shape},
        {"name": "late", "path": str(home / "draft"), "load": "on_demand", **shape},
    ]
    groups = plan_groups(models_of(entries, folder=Path(), where="test"), INSTANCES["inf2.48xlarge"])
    with served(groups) as connected:
        yield connected


def test_a_model_is_loaded_on_demand_and_releases_its_cores(client: openai.OpenAI) -> None:
    """The deployment begins without replicas; the service is ready all the same. A draft cannot be asked for."""
    with pytest.raises(openai.NotFoundError, match="chat-draft"):
        client.models.retrieve("chat-draft")
    assert client.models.retrieve("chat").owned_by == "paceline"
    states = {one["name"]: one["state"] for one in admin(client, "GET", "")["models"]}
    assert states == {"chat": "loaded", "small": "loaded", "late": "unloaded"}
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    patient = client.with_options(timeout=180)  # a process has to start
    texts = [patient.completions.create(model=model, **asked).choices[0].text for model in ("small", "late")]  # type: ignore[call-overload]
    assert texts[0] == texts[1]
    assert sorted(model.id for model in client.models.list()) == ["chat", "late", "small"]
    taken = sum(map(len, call_allocator("taken", timeout=30).values()))
    assert admin(client, "POST", "/unload", {"model": "late"})["state"] == "unloaded"
    assert "paceline-late" not in serve.status().applications
    assert sum(map(len, call_allocator("taken", timeout=30).values())) == taken - 1
    assert sorted(model.id for model in client.models.list()) == ["chat", "small"]
    assert patient.completions.create(model="late", **asked).choices[0].text == texts[1], "it is loaded again"  # type: ignore[call-overload]
    assert admin(client, "POST", "/unload", {"model": "late"})["state"] == "unloaded"


def test_pins_survive_the_death_of_the_http_process(client: openai.OpenAI) -> None:
    assert admin(client, "POST", "/pin", {"model": "small"})["pinned"]
    os.kill(ingress := process("ingress"), signal.SIGKILL)
    until(lambda: process("ingress") != ingress, 90, pause_s=0.1)
    found = until(lambda: answer_of(client), 90, pause_s=0.1)
    decides = ray.get_actor(actor_name("paceline"), namespace=NAMESPACE)
    os.kill(process("lifecycle"), signal.SIGKILL)  # who decides is started again, and asked again
    assert {one["name"]: one["pinned"] for one in found["models"]} == {"chat": False, "small": True, "late": False}
    assert not admin(client, "POST", "/pin", {"model": "small", "pinned": False})["pinned"]
    assert ray.get_actor(actor_name("paceline"), namespace=NAMESPACE) == decides, "no other one took its place"


def test_a_model_is_one_process_whose_counts_and_logs_are_found(client: openai.OpenAI, cluster: Cluster) -> None:
    """The ingress is that of all models, and writes a line of JSON with the id of a request; no proxy runs."""
    kinds = count_processes(os.getpid())
    assert kinds["model:small"] == kinds["ingress"] == 1 and not kinds["proxy"]
    address = str(client.base_url).replace("/v1/", "/metrics")

    def tokens() -> float:
        families = text_string_to_metric_families(urlopen(address, timeout=30).read().decode())
        samples = [sample for family in families for sample in family.samples]
        own = [one for one in samples if one.name == "vllm:generation_tokens_total"]
        return sum(one.value for one in own if one.labels["model_name"] == "small")

    before = tokens()
    asked = {"model": "small", "prompt": PROMPT, "max_tokens": 7, "extra_headers": {"x-request-id": "find-me-7"}}
    client.completions.create(**asked)  # type: ignore[call-overload]
    assert tokens() == before + 7
    folder = Path(cluster.head_node.get_session_dir_path()) / "logs" / "serve"

    def logged() -> list[str]:
        lines = (line for file in folder.glob("*openai*") for line in file.read_text().splitlines())
        return [line for line in lines if "find-me-7" in line]

    (line,) = map(json.loads, until(logged, 20))
    assert (line["request_id"], line["access"]["request_id"]) == ("find-me-7", "find-me-7")
    assert (line["access"]["status"], line["access"]["completion_tokens"]) == (200, 7)


def test_a_disconnect_frees_the_model_for_the_next_request(client: openai.OpenAI, home: Path) -> None:
    """Those whose answer has begun, and those whose has not: the worker stands still while four of them hang up."""
    asked = {"model": "chat", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}
    for _ in range(3):
        stream = client.completions.create(stream=True, **asked)
        next(iter(stream))
        stream.close()
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: client.completions.create(**asked).choices[0].text, range(4)))
    assert set(texts) == {said(home, PROMPT, max_new_tokens=100)}
    before = replica("chat").progress.remote().result()
    client.completions.create(**asked)
    alone = replica("chat").progress.remote().result() - before
    with struck("model:chat", signal.SIGSTOP):
        with ThreadPoolExecutor(4) as pool:
            for one in [pool.submit(client.with_options(timeout=2).completions.create, **asked) for _ in range(4)]:
                with pytest.raises(openai.APITimeoutError):
                    one.result(30)
        time.sleep(1)
    assert client.completions.create(**asked).choices[0].text == texts[0]
    # A round gives a text 5 tokens at most, so a whole one has 20 events. Left to run, two of the four end before it.
    assert replica("chat").progress.remote().result() - before < 2 * alone + 2 * 20


def test_streams_survive_the_death_of_their_model(client: openai.OpenAI, home: Path) -> None:
    """Requests without a seed too, which get one from the HTTP process; and the model is available again afterwards."""
    asked = {"model": "chat", "prompt": PROMPT, "max_tokens": 100, "temperature": 1.2, "stream": True}

    def text(seed: int | None, begun: Barrier) -> str:
        more = {} if seed is None else {"seed": seed}
        stream = iter(client.completions.create(**asked, **more))
        parts = [next(stream).choices[0].text]
        begun.wait()
        return "".join(parts + [chunk.choices[0].text for chunk in stream])

    with ThreadPoolExecutor(4) as pool:
        begun = Barrier(4)
        streams = [pool.submit(text, seed, begun) for seed in (1, 2, None)]
        begun.wait()
        target = process("model:chat")
        os.kill(target, signal.SIGKILL)
        texts = [stream.result(90) for stream in streams]
    for seed in (1, 2):
        wanted = said(home, PROMPT, max_new_tokens=100, do_sample=True, temperature=1.2, seed=seed)
        assert texts[seed - 1] == wanted
    assert len(texts[2]) == 100
    answer = client.completions.create(model="chat", prompt=PROMPT, max_tokens=20, temperature=0)
    assert answer.choices[0].text == said(home, PROMPT, max_new_tokens=20)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_streams_continue_without_their_draft(client: openai.OpenAI, home: Path, number: int) -> None:
    asked = {"model": "chat", "prompt": PROMPT, "max_tokens": 100, "temperature": 1.2, "seed": 5, "stream": True}
    parts = [next(stream := client.completions.create(**asked)).choices[0].text]
    with struck("draft", number):
        parts += [chunk.choices[0].text for chunk in stream]
    assert "".join(parts) == said(home, PROMPT, max_new_tokens=100, do_sample=True, temperature=1.2, seed=5)


def test_a_suspended_http_process_blocks_no_model(client: openai.OpenAI, home: Path) -> None:
    """At the end of a stream, Ray waits for its caller, and starts no other call of that replica."""
    stream = client.completions.create(model="chat", prompt=PROMPT, max_tokens=60, temperature=0, stream=True)
    parts = [next(stream).choices[0].text]
    with struck("ingress", signal.SIGSTOP):
        check_it_answers_when_idle(replica("chat"))
    assert "".join(parts + [one.choices[0].text for one in stream]) == said(home, PROMPT, max_new_tokens=60)


def test_suspended_controllers_and_allocators_are_replaced(client: openai.OpenAI, home: Path) -> None:
    """Ray Serve's controller and the core allocator, whose health only our replicas check."""
    stop_until_replaced("controller", "allocator")
    assert call_allocator("taken", timeout=30), "it knows the cores of models that run"
    answer = client.completions.create(model="chat", prompt=PROMPT, max_tokens=20, temperature=0)
    assert answer.choices[0].text == said(home, PROMPT, max_new_tokens=20)
