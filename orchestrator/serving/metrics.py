"""Metrics of a replica under vLLM's names, for Prometheus, at `/metrics`.

Requests are timed here, at the replica's edge; counts of drafting are the engine's. See also: the dashboard
(`docs/grafana.json`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal

from paceline.core.drafter_statistics import DrafterHealth
from paceline.serving.router import Failed, Item, StreamChunk, StreamStart

if TYPE_CHECKING:
    from paceline.workers.calls import RequestTiming
    from paceline.workers.shared_engine import EngineFigures

_LABELS = ("model_name", "engine")  # of every metric; an engine is a replica
_FAST = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 2.0, 10.0)
_SLOW = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric: a name without `_total`, its kind, and labels in addition to model and engine."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric("vllm:num_requests_running", "gauge", "Requests in slots of the batch."),
    Metric("vllm:num_requests_waiting", "gauge", "Requests that wait for a slot."),
    Metric("vllm:kv_cache_usage_perc", "gauge", "Share of the slots of the KV cache that a request has; 1 is all."),
    Metric("vllm:prompt_tokens", "counter", "Tokens of the prompts of accepted requests."),
    Metric("vllm:generation_tokens", "counter", "Tokens of all answers."),
    Metric("vllm:prefix_cache_queries", "counter", "Tokens of prompts that were looked up, with prefix caching."),
    Metric("vllm:prefix_cache_hits", "counter", "Those of them that were not read again."),
    Metric("vllm:request_success", "counter", "Requests that were answered to their end."),
    Metric("vllm:time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.", (), _SLOW),
    Metric("vllm:inter_token_latency_seconds", "histogram", "Between tokens of an answer.", (), _FAST),
    Metric("vllm:request_time_per_output_token_seconds", "histogram", "The same, mean of an answer.", (), _FAST),
    Metric("vllm:e2e_request_latency_seconds", "histogram", "From a request's arrival to its end.", (), _SLOW),
    Metric("vllm:request_queue_time_seconds", "histogram", "From a request's arrival to its slot.", (), _SLOW),
    Metric("vllm:request_prefill_time_seconds", "histogram", "From its slot to its first token.", (), _SLOW),
    Metric("vllm:request_decode_time_seconds", "histogram", "From its first token to its last.", (), _SLOW),
    Metric("vllm:request_inference_time_seconds", "histogram", "From its slot to its last token.", (), _SLOW),
    Metric("vllm:spec_decode_num_drafts", "counter", "Rounds of requests in which something was drafted."),
    Metric("vllm:spec_decode_num_draft_tokens", "counter", "Drafted tokens."),
    Metric("vllm:spec_decode_num_accepted_tokens", "counter", "Drafted tokens that are in an answer."),
    Metric("vllm:spec_decode_num_accepted_tokens_per_pos", "counter", "The same, by position.", ("position",)),
    Metric("paceline:draft_length_rounds", "counter", "Rounds by the draft length that was chosen.", ("length",)),
    Metric("paceline:drafter_num_drafts", "counter", "Verified proposals of a drafter of a choice.", ("drafter",)),
    Metric("paceline:drafter_num_draft_tokens", "counter", "Tokens of these.", ("drafter",)),
    Metric("paceline:drafter_num_scored", "counter", "Its proposals that were compared with the answer.", ("drafter",)),
    Metric("paceline:drafter_num_scored_tokens", "counter", "First tokens of these that it wrote.", ("drafter",)),
    Metric("paceline:drafter_propose_seconds", "counter", "Time in which it proposed.", ("drafter",)),
    Metric("paceline:drafter_misfit", "gauge", "1: drafts are accepted far less often than pays; the log has causes."),
    Metric("paceline:learner_texts", "counter", "Finished texts that the head has learnt from (learn)."),
    Metric("paceline:learner_heads", "counter", "Heads taken over from the process that learns."),
    Metric("paceline:learner_live_acceptance_length", "gauge", "Tokens a round on new texts, by the head that drafts."),
    Metric("paceline:learner_shipped_acceptance_length", "gauge", "The same, by the head that was given."),
    Metric("paceline:engine_seconds", "counter", "Time of the engine, by what it did.", ("part",)),
    Metric("paceline:requests_failed", "counter", "Requests that failed, by HTTP status.", ("status",)),
    Metric("paceline:drafter_up", "gauge", "1: the draft in its own process answers; 0: rounds go on without it."),
    Metric("paceline:drafter_faults", "counter", "What went wrong with that draft.", ("fault",)),
    Metric("paceline:drafter_restarts", "counter", "Restarts of that draft's process."),
)  # fmt: skip


class MetricSet:
    """Metrics of one replica."""

    def __init__(self, model: str, engine: str) -> None:
        import prometheus_client as prometheus

        self._registry = prometheus.CollectorRegistry()
        self._values = {"model_name": model, "engine": engine}
        self._own: dict[str, Any] = {
            row.name: getattr(prometheus, row.kind.capitalize())(
                row.name,
                row.help,
                (*_LABELS, *row.labels),
                registry=self._registry,
                **({"buckets": row.buckets} if row.buckets else {}),
            )
            for row in METRICS
        }
        self._seen: dict[tuple[str, str], float] = {}

    def observe(self, name: str, value: float) -> None:
        self._own[name].labels(**self._values).observe(value)

    def add(self, name: str, amount: float, **labels: str) -> None:
        if amount > 0:
            self._own[name].labels(**self._values, **labels).inc(amount)

    def show(self, name: str, value: float) -> None:
        self._own[name].labels(**self._values).set(value)

    def reach(self, name: str, total: float, **labels: str) -> None:
        """Raise a counter to a total that is kept elsewhere."""
        key = name, ",".join(labels.values())
        self.add(name, total - self._seen.get(key, 0.0), **labels)
        self._seen[key] = max(total, self._seen.get(key, 0.0))

    def update(self, figures: EngineFigures, health: DrafterHealth | None, *, num_slots: int) -> None:
        self.show("vllm:num_requests_running", figures.running)
        self.show("vllm:num_requests_waiting", figures.waiting)
        self.show("vllm:kv_cache_usage_perc", figures.running / num_slots)
        engine = figures.engine
        self.reach("vllm:generation_tokens", engine.new_tokens)
        for name in ("prefix_cache_queries", "prefix_cache_hits"):
            self.reach(f"vllm:{name}", getattr(engine, name))
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            self.reach(f"vllm:spec_decode_{name}", getattr(engine, name))
        for position, count in enumerate(engine.num_accepted_tokens_per_pos):
            self.reach("vllm:spec_decode_num_accepted_tokens_per_pos", count, position=str(position))
        for length, count in figures.draft_lengths.items():
            self.reach("paceline:draft_length_rounds", count, length=str(length))
        for part in ("prefill", "draft", "verify", "host"):
            self.reach("paceline:engine_seconds", getattr(engine, f"{part}_seconds"), part=part)
        for drafter, counts in figures.drafters.items():
            for name in ("num_drafts", "num_draft_tokens", "num_scored", "num_scored_tokens", "propose_seconds"):
                self.reach(f"paceline:drafter_{name}", getattr(counts, name), drafter=drafter)
        self.show("paceline:drafter_misfit", float(bool(figures.misfit)))
        if figures.learning is not None:
            self.reach("paceline:learner_texts", figures.learning.texts)
            self.reach("paceline:learner_heads", figures.heads)
            for head in ("live", "shipped") if figures.learning.acceptance_length else ():
                self.show(f"paceline:learner_{head}_acceptance_length", figures.learning.acceptance_length[head])
        if health is not None:
            self.show("paceline:drafter_up", float(health.state == "up"))
            self.reach("paceline:drafter_restarts", health.restarts)
            for fault in ("lost", "late", "failed", "invalid"):
                self.reach("paceline:drafter_faults", getattr(health, fault), fault=fault)

    def finished(self, timings: Sequence[RequestTiming]) -> None:
        for one in timings:
            self.observe("vllm:request_queue_time_seconds", one.queue)
            self.observe("vllm:request_prefill_time_seconds", one.prefill)
            self.observe("vllm:request_decode_time_seconds", one.decode)
            self.observe("vllm:request_inference_time_seconds", one.prefill + one.decode)

    def text(self) -> str:
        from prometheus_client import generate_latest

        return generate_latest(self._registry).decode()


class RequestTimes:
    """Records the times of one response. ``resumed``: an earlier replica accepted the request, whose prompt counts
    once.
    """

    def __init__(self, metrics: MetricSet, *, resumed: bool) -> None:
        self._metrics, self._resumed = metrics, resumed
        self._begun = self._last = monotonic()
        self._first: float | None = None
        self._tokens = self._skipped = 0

    def take(self, item: Item) -> None:
        metrics = self._metrics
        if isinstance(item, StreamStart) and not self._resumed:
            metrics.add("vllm:prompt_tokens", item.prompt_tokens)
        elif isinstance(item, Failed):
            metrics.add("paceline:requests_failed", 1, status=str(item.error.status))
        elif isinstance(item, StreamChunk):
            now, total = monotonic(), sum(item.sent)
            if self._first is None:
                self._first, self._skipped = now, total
                metrics.observe("vllm:time_to_first_token_seconds", now - self._begun)
            elif total > self._tokens:
                per_token = (now - self._last) / (total - self._tokens)
                metrics.observe("vllm:inter_token_latency_seconds", per_token)
            self._last, self._tokens = now, total
            if item.last:
                metrics.add("vllm:request_success", 1)
                metrics.observe("vllm:e2e_request_latency_seconds", now - self._begun)
                if total > self._skipped:
                    per_token = (now - self._first) / (total - self._skipped)
                    metrics.observe("vllm:request_time_per_output_token_seconds", per_token)


def merged(texts: Iterable[str]) -> bytes:
    """Merge the metrics of several replicas into one text, in which every metric is described once."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families
    from prometheus_client.registry import Collector

    families: dict[str, Any] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            families.setdefault(family.name, family)
            if families[family.name] is not family:
                families[family.name].samples += family.samples

    class Collected(Collector):
        def collect(self) -> Iterator[Any]:
            return iter(families.values())

    registry = CollectorRegistry()
    registry.register(Collected())
    return generate_latest(registry)
