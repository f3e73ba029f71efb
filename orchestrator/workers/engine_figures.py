"""Metrics of a shared engine: plain numbers over all calls since it was built. Names follow vLLM's.

See also: how they are exported (`paceline.serving.metrics`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.drafter_statistics import DrafterCounts
from paceline.outputs import Statistics
from paceline.workers.calls import RequestTiming

_RECENT = 1 << 16  # timings kept until they are taken; they may never be


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """Snapshot of the metrics. Counts and seconds are sums over all calls.

    running, waiting  requests in slots, and requests without one
    finished          requests served to their end
    queue_seconds     from arrival to a slot, over finished requests
    prefill_seconds, decode_seconds   over finished requests: from there to the first token, and on to the end
    engine            counts and seconds of the engine, all runs together
    draft_lengths     number of rounds for each draft length, if the length is chosen per round
    drafters          counts of each drafter, by name, if several are chosen from; empty otherwise
    misfit            why the drafter does not fit the target; "" = it does, or is not judged yet
    """

    running: int
    waiting: int
    finished: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    engine: Statistics
    draft_lengths: dict[int, int]
    drafters: Mapping[str, DrafterCounts] = field(default_factory=dict)
    misfit: str = ""


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
            self._sum, self._lengths, self._added = self._sum.plus(run), self._lengths + _lengths(run), run

    def figures(
        self, running: int, waiting: int, run: Statistics, *, drafters: Mapping[str, DrafterCounts]
    ) -> EngineFigures:
        """Return a snapshot. ``run``: the engine's last run, which may be under way."""
        over = run is self._added
        total = self._sum if over else self._sum.plus(run)
        lengths = self._lengths if over else self._lengths + _lengths(run)
        counted = dict(sorted(lengths.items()))
        return EngineFigures(running, waiting, self._requests, *self._seconds, total, counted, drafters)


def _lengths(run: Statistics) -> Counter[int]:
    return Counter(list(run.draft_lengths))
