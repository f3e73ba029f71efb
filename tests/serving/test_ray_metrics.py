"""Metrics of a replica are among Ray's own too, under vLLM's names: read where a node of Ray exports them."""

from __future__ import annotations

import time
from typing import Any
from urllib.request import urlopen

import pytest

pytest.importorskip("ray")

import ray
from prometheus_client.parser import text_string_to_metric_families

from paceline.serving.metrics import METRICS

pytestmark = pytest.mark.ray


@ray.remote(num_cpus=0)
class Measuring:
    """A process of the cluster that measures something of every kind."""

    def measure(self) -> None:
        from paceline.serving.metrics import MetricSet
        from paceline.workers.calls import RequestTiming

        metrics = MetricSet("m", "a", ray_too=True)
        metrics.add("vllm:generation_tokens", 7)
        metrics.add("vllm:spec_decode_num_accepted_tokens_per_pos", 3, position="0")
        metrics.show("vllm:num_requests_running", 2)
        metrics.finished([RequestTiming(0.5, 0.25, 2.0)])
        metrics.to_ray()()
        self.metrics = metrics


def test_ray_exports_replica_metrics(cluster: Any) -> None:
    actor = Measuring.remote()
    ray.get(actor.measure.remote())
    (port,) = {node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]}
    found: dict[tuple[str, str], float] = {}
    end = time.monotonic() + 60
    while ("ray_vllm_request_decode_time_seconds_sum", "") not in found:
        assert time.monotonic() < end, sorted(name for name, _ in found)
        time.sleep(0.5)
        text = urlopen(f"http://127.0.0.1:{port}", timeout=10).read().decode()
        lines = [line for line in text.splitlines() if "ray_vllm_" in line]
        found = ours("\n".join(lines) + "\n")
    assert found["ray_vllm_generation_tokens_total", ""] == 7
    assert found["ray_vllm_num_requests_running", ""] == 2
    assert found["ray_vllm_request_decode_time_seconds_count", ""] == 1
    assert found["ray_vllm_spec_decode_num_accepted_tokens_per_pos_total", "0"] == 3
    names = {row.name.replace(":", "_") for row in METRICS}
    assert all(name.removeprefix("ray_").startswith(tuple(names)) for name, _ in found)
    ray.kill(actor)


def ours(text: str) -> dict[tuple[str, str], float]:
    """(name, position) -> value, without the buckets of histograms; Ray adds labels."""
    return {
        (sample.name, sample.labels.get("position", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if (sample.labels.get("model_name"), sample.labels.get("engine")) == ("m", "a") and "le" not in sample.labels
    }
