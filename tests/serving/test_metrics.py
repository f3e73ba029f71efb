"""Metrics have vLLM's names, count what happened, and are those that the dashboard asks for."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from paceline.core.drafter_statistics import DrafterCounts, DrafterHealth
from paceline.eagle.learning import LearningProgress
from paceline.outputs import Statistics
from paceline.serving.errors import RefusedError
from paceline.serving.metrics import MetricSet, RequestTimes, merged
from paceline.serving.router import Failed, Item, StreamChunk, StreamStart
from paceline.workers.calls import RequestTiming
from paceline.workers.shared_engine import EngineFigures

ENGINE = Statistics(
    new_tokens=40, num_drafts=10, num_draft_tokens=30, num_accepted_tokens=20, num_accepted_tokens_per_pos=[9, 7, 4],
    prefill_seconds=1.0, draft_seconds=2.0, verify_seconds=3.0, host_seconds=0.5, prefix_cache_queries=50,
    prefix_cache_hits=32,
)  # fmt: skip
FIGURES = EngineFigures(
    running=2, waiting=3, engine=ENGINE, draft_lengths={0: 1, 3: 9},
    drafters={"ngram": DrafterCounts(6, 18, 9, 20, 0.25), "model": DrafterCounts(4, 12, 5, 9, 0.5)},
    heads=2, learning=LearningProgress(60, 4000, {"shipped": 2.0, "live": 2.5, "learner": 2.4}),
)  # fmt: skip


def filled(engine: str = "a") -> MetricSet:
    """Metrics of a replica in which everything has happened."""
    metrics = MetricSet("m", engine)
    metrics.update(FIGURES, DrafterHealth(state="up", lost=1, restarts=2), num_slots=4)
    chunks = StreamChunk(b"x", (1, 0)), StreamChunk(b"y", (3, 2)), StreamChunk(b"", (3, 4), last=True)
    consume([StreamStart(7), *chunks], metrics)
    consume([Failed(RefusedError(400, "no"))], metrics)
    metrics.finished([RequestTiming(0.5, 0.25, 2.0), RequestTiming(1.5, 0.25, 4.0)])
    return metrics


def consume(items: list[Item], metrics: MetricSet, *, resumed: bool = False) -> None:
    times = RequestTimes(metrics, resumed=resumed)
    for item in items:
        times.take(item)


def samples(text: str) -> dict[tuple[str, str], float]:
    """(name, label beyond model and engine) -> the sum over engines."""
    found: dict[tuple[str, str], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine", "le")]
            key = sample.name, ",".join(own)
            found[key] = found.get(key, 0.0) + sample.value
    return found


def test_counts_equal_the_engines_after_any_number_of_updates() -> None:
    metrics = filled()
    metrics.update(FIGURES, None, num_slots=4)
    found = samples(metrics.text())
    assert found["vllm:spec_decode_num_drafts_total", ""] == 10
    assert [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", str(at)] for at in range(3)] == [9, 7, 4]
    assert found["vllm:num_requests_waiting", ""] == 3 and found["vllm:kv_cache_usage_perc", ""] == 0.5
    assert found["vllm:generation_tokens_total", ""] == 40 and found["vllm:prompt_tokens_total", ""] == 7
    assert found["paceline:drafter_faults_total", "lost"] == 1 and found["paceline:drafter_up", ""] == 1
    assert found["paceline:requests_failed_total", "400"] == found["vllm:request_success_total", ""] == 1
    assert found["vllm:prefix_cache_queries_total", ""] == 50 and found["vllm:prefix_cache_hits_total", ""] == 32
    drafters = [found[f"paceline:drafter_{name}_total", "ngram"] for name in ("num_drafts", "num_scored_tokens")]
    assert drafters == [6, 20] and found["paceline:drafter_propose_seconds_total", "model"] == 0.5
    assert found["paceline:learner_texts_total", ""] == 60 and found["paceline:learner_heads_total", ""] == 2
    lengths = [found[f"paceline:learner_{head}_acceptance_length", ""] for head in ("live", "shipped")]
    assert lengths == [2.5, 2.0]
    for part, total in {"queue": 2.0, "prefill": 0.5, "decode": 6.0, "inference": 6.5}.items():
        name = f"vllm:request_{part}_time_seconds"
        assert (found[f"{name}_sum", ""], found[f"{name}_count", ""]) == (total, 2), part
    assert found["vllm:time_to_first_token_seconds_count", ""] == 1
    assert found["vllm:inter_token_latency_seconds_count", ""] == 2


def test_a_drafter_that_does_not_fit_is_1_until_it_does() -> None:
    metrics = MetricSet("m", "a")
    for misfit in ("it does not fit", ""):
        metrics.update(replace(FIGURES, misfit=misfit), None, num_slots=4)
        assert samples(metrics.text())["paceline:drafter_misfit", ""] == bool(misfit)


def test_a_resumed_request_counts_its_prompt_once() -> None:
    metrics = MetricSet("m", "a")
    consume([StreamStart(7), StreamChunk(b"z", (9,), last=True)], metrics, resumed=True)
    assert samples(metrics.text()).get(("vllm:prompt_tokens_total", ""), 0) == 0


def test_metrics_of_replicas_are_merged() -> None:
    text = merged([filled("a").text(), filled("b").text()]).decode()
    assert text.count("# TYPE vllm:num_requests_running gauge") == 1
    assert samples(text)["vllm:num_requests_running", ""] == 4
