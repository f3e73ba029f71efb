"""Metrics of a shared engine: plain numbers over all calls since it was built. Names follow vLLM's.

See also: how they are exported (`paceline.serving.metrics`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from paceline.core.drafter_statistics import DrafterCounts
from paceline.outputs import Statistics
from paceline.workers.calls import RequestTiming

_RECENT = 1 << 16  # timings kept until they are taken; they may never be


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Snapshot of the metrics. Counts and seconds are sums over all calls.

    running, waiting             requests in slots, and requests without one
    finished                     requests served to their end
    generation_tokens            tokens of all outputs
    num_drafts, num_draft_tokens, num_accepted_tokens, num_accepted_tokens_per_pos   see `paceline.outputs.Statistics`
    draft_lengths                number of rounds for each draft length, if the length is chosen per round
    queue_seconds                from arrival to a slot, over finished requests
    prefill_seconds, decode_seconds   over finished requests: from there to the first token, and on to the end
    engine_prefill_seconds       engine time in prefill; engine_draft_seconds, engine_verify_seconds,
                                 engine_host_seconds: in drafting, verification and everything else
    prefix_cache_queries, prefix_cache_hits   see `paceline.outputs.Statistics`
    drafters                     counts of each drafter, by name, if several are chosen from; empty otherwise
    """

    running: int
    waiting: int
    finished: int
    generation_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    draft_lengths: dict[int, int]
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    engine_prefill_seconds: float
    engine_draft_seconds: float
    engine_verify_seconds: float
    engine_host_seconds: float
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    drafters: Mapping[str, DrafterCounts] = field(default_factory=dict)


@dataclass(slots=True)
class Totals:
    """Sums over ended runs of the engine and over finished requests."""

    _sum: Statistics = field(default_factory=Statistics)
    _lengths: Counter[int] = field(default_factory=Counter)
    _added: Statistics | None = None  # the last run, which is part of the sums
    _requests: int = 0
    _seconds: tuple[float, float, float] = (0.0, 0.0, 0.0)
    _recent: deque[RequestTiming] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def finished(self, timings: Sequence[RequestTiming]) -> None:
        """Add requests that were served to their end."""
        for one in timings:
            queue, prefill, decode = self._seconds
            self._requests += 1
            self._recent.append(one)
            self._seconds = (queue + one.queue, prefill + one.prefill, decode + one.decode)

    def take_timings(self) -> Sequence[RequestTiming]:
        """Return the timings of the requests that finished since the last call."""
        taken = tuple(self._recent)
        self._recent.clear()
        return taken

    def add(self, run: Statistics) -> None:
        """Add an ended run of the engine."""
        if run is not self._added:
            self._sum, self._lengths, self._added = _plus(self._sum, run), self._lengths + _lengths(run), run

    def figures(
        self, running: int, waiting: int, run: Statistics, *, drafters: Mapping[str, DrafterCounts]
    ) -> EngineFigures:
        """Return a snapshot. ``run``: the engine's last run, which may be under way."""
        over = run is self._added
        total = self._sum if over else _plus(self._sum, run)
        lengths = self._lengths if over else self._lengths + _lengths(run)
        return EngineFigures(
            running,
            waiting,
            self._requests,
            total.new_tokens,
            total.num_drafts,
            total.num_draft_tokens,
            total.num_accepted_tokens,
            tuple(total.num_accepted_tokens_per_pos),
            dict(sorted(lengths.items())),
            *self._seconds,
            total.prefill_seconds,
            total.draft_seconds,
            total.verify_seconds,
            total.host_seconds,
            total.prefix_cache_queries,
            total.prefix_cache_hits,
            drafters,
        )


def _lengths(run: Statistics) -> Counter[int]:
    return Counter(list(run.draft_lengths))


def _plus(one: Statistics, other: Statistics) -> Statistics:
    def summed(name: str) -> list[int]:
        return [a + b for a, b in zip_longest(getattr(one, name), getattr(other, name), fillvalue=0)]

    return Statistics(
        num_rounds=one.num_rounds + other.num_rounds,
        num_drafts=one.num_drafts + other.num_drafts,
        num_draft_tokens=one.num_draft_tokens + other.num_draft_tokens,
        num_accepted_tokens=one.num_accepted_tokens + other.num_accepted_tokens,
        num_draft_tokens_per_pos=summed("num_draft_tokens_per_pos"),
        num_accepted_tokens_per_pos=summed("num_accepted_tokens_per_pos"),
        new_tokens=one.new_tokens + other.new_tokens,
        prefix_cache_queries=one.prefix_cache_queries + other.prefix_cache_queries,
        prefix_cache_hits=one.prefix_cache_hits + other.prefix_cache_hits,
        prefill_seconds=one.prefill_seconds + other.prefill_seconds,
        draft_seconds=one.draft_seconds + other.draft_seconds,
        verify_seconds=one.verify_seconds + other.verify_seconds,
        host_seconds=one.host_seconds + other.host_seconds,
    )
