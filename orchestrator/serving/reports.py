"""What the processes of HTTP report to the one that decides which models are in memory: who uses what, in batches."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from time import monotonic

from paceline.serving.model_state import Report

PERIOD_S = 0.5  # between the reports of a process
SILENT_S = 10.0  # after which a process that said nothing is taken for dead: its requests are
_SETTLE_S = 4 * PERIOD_S  # in which all that live have found a new decider
_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class _Received:
    report: Report
    at: float


class Reports:
    """The newest of every process. ``awaited``: whether there are other processes at all, which will report soon."""

    def __init__(self, *, awaited: bool = False) -> None:
        self._received: dict[str, _Received] = {}
        self._complete_at = monotonic() + (_SETTLE_S if awaited else 0.0)

    def put(self, process: str, report: Report) -> None:
        """What a process says now."""
        self._received[process] = _Received(report, monotonic())

    def running(self, model: str) -> int:
        """Requests of a model in all processes."""
        return sum(one.report.running.get(model, 0) for one in self._living().values())

    def used(self, model: str) -> float:
        """When a request of it ended last, by `monotonic`."""
        times = [one.at - one.report.idle_s[model] for one in self._received.values() if model in one.report.idle_s]
        return max(times, default=float("-inf"))

    def keys(self, process: str) -> Mapping[str, int]:
        """Requests by key of all processes but this one."""
        total: Counter[str] = Counter()
        for name, one in self._living().items():
            if name != process:
                total.update(one.report.keys)
        return total

    async def acknowledged(self, version: int) -> None:
        """Until every process acts by this version, and so has reported what it began before it knew it."""
        while monotonic() < self._complete_at or any(one.report.seen < version for one in self._living().values()):
            await asyncio.sleep(_LOOK_S)

    def _living(self) -> Mapping[str, _Received]:
        now = monotonic()
        self._received = {name: one for name, one in self._received.items() if now - one.at < SILENT_S}
        return self._received
