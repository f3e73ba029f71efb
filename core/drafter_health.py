"""How a drafter in another process is doing: counts for the statistics of a call. Values and counting only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

State = Literal["up", "late", "broken", "down", "closed"]
Fault = Literal["lost", "late", "failed", "invalid"]


@dataclass(frozen=True, slots=True)
class DrafterHealth:
    """What happened since the drafter was made.

    state       up; late (a reply is overdue); broken (it failed too often and is left alone); down (being restarted);
                closed
    asked       rounds in which it was asked; of these were
    answered    answered in time with a usable proposal
    ahead       answered with a proposal that was ready before it was asked for
    skipped     rounds in which it was not asked, because it was not up
    lost        connections that broke: the process died or was killed
    late        replies after the deadline
    failed      replies that said why there is no proposal
    invalid     replies with a wrong shape, or ids outside the vocabulary
    restarts    restarts of the process
    rereads     sequences it had to read again
    last_error  the last reason, for people
    """

    state: State = "down"
    asked: int = 0
    answered: int = 0
    ahead: int = 0
    skipped: int = 0
    lost: int = 0
    late: int = 0
    failed: int = 0
    invalid: int = 0
    restarts: int = 0
    rereads: int = 0
    last_error: str = ""

    @property
    def faults(self) -> int:
        """Everything that went wrong."""
        return self.lost + self.late + self.failed + self.invalid

    @property
    def hit_rate(self) -> float:
        """Share of the answers that were ready before they were asked for; 0 without answers."""
        return self.ahead / self.answered if self.answered else 0.0

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, ``hit_rate`` included."""
        return asdict(self) | {"hit_rate": self.hit_rate}

    def since(self, before: DrafterHealth) -> DrafterHealth:
        """The counts since ``before``, with the state of now."""
        now, then = asdict(self), asdict(before)
        return replace(self, **{name: value - then[name] for name, value in now.items() if isinstance(value, int)})


class HealthCounters:
    """Counts what `DrafterHealth` reports, but for what only the owner of the connection knows."""

    def __init__(self) -> None:
        elsewhere = ("state", "restarts", "last_error")
        self._counts = {field.name: 0 for field in fields(DrafterHealth) if field.name not in elsewhere}
        self.last_error = ""

    def count(self, name: str, times: int = 1) -> None:
        """Add to one of the counts."""
        self._counts[name] += times

    def fault(self, kind: Fault, reason: str) -> None:
        """Count a fault and keep its reason."""
        self._counts[kind] += 1
        self.last_error = reason

    def snapshot(self, state: State, restarts: int, last_error: str) -> DrafterHealth:
        """The health of now."""
        return DrafterHealth(state=state, restarts=restarts, last_error=last_error, **self._counts)
