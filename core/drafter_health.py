"""How a drafter in another process is doing: counts for the statistics of a call. Values and counting only."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Literal

State = Literal["up", "late", "broken", "down", "closed"]
Fault = Literal["lost", "late", "failed", "invalid"]


@dataclass(frozen=True, slots=True)
class DrafterHealth:
    """What happened since the drafter was made.

    state       up; late (an answer is overdue); broken (it failed too often and rests); down (being restarted); closed
    asked       rounds it was asked in; of these were
    answered    answered in time with something usable
    ahead       answered with what was ready before it was asked for
    skipped     rounds it was not asked in, because it was not up
    lost        connections that broke: the process died or was killed
    late        answers past the deadline
    failed      answers that said why there is no proposal
    invalid     answers with a wrong shape, or ids outside the vocabulary
    restarts    times the process was started anew
    rereads     texts it had to read again
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
        """Answers that were ready before they were asked for, of all; 0 without answers."""
        return self.ahead / self.answered if self.answered else 0.0

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON, ``hit_rate`` included."""
        return asdict(self) | {"hit_rate": self.hit_rate}

    def since(self, before: DrafterHealth) -> DrafterHealth:
        """The counts from ``before`` on, with the state of now."""
        mine, theirs = asdict(self), asdict(before)
        counts = {name: value - theirs[name] for name, value in mine.items() if isinstance(value, int)}
        return replace(self, **counts)


COUNTED = tuple(field.name for field in fields(DrafterHealth) if field.name not in ("state", "restarts", "last_error"))
"""What `RemoteDraft` counts itself; the rest is known to whoever keeps the connection."""
