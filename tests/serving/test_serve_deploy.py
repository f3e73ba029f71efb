"""A service in a cluster that others use too, where Ray Serve's proxy listens; and how a service ends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
from ray import serve
from ray.cluster_utils import Cluster

from paceline.core.errors import ConfigurationError, WorkerError
from paceline.placement import INSTANCES
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.planning.groups import ReplicaGroupPlan, plan_groups
from paceline.placement.planning.model_specs import models_of
from paceline.serving import launch as serving_run
from paceline.serving.ray_app import deploy_config
from paceline.serving.settings import ApiSettings
from tests.decoder.tiny import save_pair
from tests.serving.served import admin, said, served, statuses, with_tokenizer
from tests.waiting import until

pytestmark = pytest.mark.ray
PROMPT = "def f(a, b):"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_pair(folder)
    with_tokenizer(folder / "target", template=None)
    return folder


@pytest.fixture(scope="module")
def groups(home: Path) -> tuple[ReplicaGroupPlan, ...]:
    entry = {"name": "chat", "path": str(home / "target"), "n_positions": 128, "amp": "f32", "backend": "eager"}
    return plan_groups(models_of([entry], folder=Path(), where="test"), INSTANCES["inf2.48xlarge"])


@pytest.fixture(scope="module")
def client(cluster: object, groups: tuple[ReplicaGroupPlan, ...]) -> Iterator[openai.OpenAI]:
    with served(groups, by_proxy=True) as connected:
        yield connected


def test_rays_proxy_forwards_responses(client: openai.OpenAI, home: Path) -> None:
    asked = {"model": "chat", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    assert client.completions.create(**asked).choices[0].text == said(home, PROMPT, max_new_tokens=40)
    chunks = client.completions.create(stream=True, **asked)
    assert "".join(chunk.choices[0].text for chunk in chunks) == said(home, PROMPT, max_new_tokens=40)


@pytest.mark.full
def test_a_config_file_deploys_the_builder(client: openai.OpenAI, cluster: Cluster, home: Path) -> None:
    """Deployed with Ray's own command, next to another application, below a prefix, and with two HTTP processes."""
    shape = "n_positions: 128, amp: f32, backend: eager"
    (home / "models.yaml").write_text(f"models:\n  - {{name: again, path: {home / 'target'}, {shape}}}\n")
    config = deploy_config(
        home / "models.yaml", "inf2.48xlarge", ApiSettings(), host="127.0.0.1", port=client.base_url.port or 0
    )
    second = {**config["applications"][0], "name": "second", "route_prefix": "/second"}  # type: ignore[index]
    second["deployments"] = [{"name": "openai", "num_replicas": 2}]
    (home / "serve.yaml").write_text(json.dumps({**config, "applications": [second]}))  # JSON is YAML too
    line = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking", "--address", str(cluster.address)]
    done = subprocess.run([*line, str(home / "serve.yaml")], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    below = client.with_options(base_url=str(client.base_url).replace("/v1", "/second/v1"))
    until(lambda: serve.status().applications["second"].status == "RUNNING", 180, what=serve.status, pause_s=0.2)
    assert [model.id for model in below.models.list()] == ["again"]
    for action, status in (("unload", 503), ("load", 200)):  # who is not told of it waits for a replica, and hangs
        assert admin(below, "POST", f"/{action}", {"model": "again"})["state"] == f"{action}ed"
        assert statuses(below, "again") == [status] * 16
    asked = {"model": "again", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}
    stream = iter(below.completions.create(stream=True, **asked))  # type: ignore[call-overload]
    parts = [next(stream).choices[0].text]
    with ThreadPoolExecutor(1) as pool:  # what SIGTERM does (`test_launch`): answers under way are drained
        ended = pool.submit(serve.delete, "second")
        text = "".join(parts + [chunk.choices[0].text for chunk in stream])
        ended.result(90)
    assert text == said(home, PROMPT, max_new_tokens=100) and "second" not in serve.status().applications


def test_other_applications_are_kept(client: openai.OpenAI, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`paceline serve --address`: it is rejected what it cannot have, and takes down nothing but its own."""
    monkeypatch.setattr(serving_run, "connect", lambda *_, **__: None)
    monkeypatch.setattr(serving_run, "ray", SimpleNamespace(shutdown=lambda: None))
    entry = {"name": "more", "path": str(home / "target"), "n_positions": 128, "amp": "f32", "backend": "eager"}
    groups = plan_groups(models_of([entry], folder=Path(), where="test"), INSTANCES["inf2.48xlarge"])
    port = client.base_url.port or 0
    asked = {"host": "127.0.0.1", "address": "here", "ready": pytest.fail}
    with pytest.raises(ConfigurationError, match=f"listens on 127.0.0.1:{port}, not 127.0.0.1:{port + 1}"):
        serving_run.serve_groups(groups, FaultPolicy(), port=port + 1, **asked)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="an application 'paceline' already runs"):
        serving_run.serve_groups(groups, FaultPolicy(), port=port, **asked)  # type: ignore[arg-type]
    monkeypatch.setattr(serving_run, "APPLICATION", "more")
    with pytest.raises(WorkerError, match=r"the service did not start \(Prefix / is being used"):
        serving_run.serve_groups(groups, FaultPolicy(), port=port, **asked)  # type: ignore[arg-type]
    applications = serve.status().applications
    assert applications["paceline"].status == "RUNNING" and "more" not in applications
    assert sorted(model.id for model in client.models.list()) == ["chat"]
