"""The report of `paceline doctor`, `selftest` and `verify`: a finding for each thing they looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "FAILED", "lossy", "note", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    status     ok; FAILED; lossy: the acceptance rule declares a deviation, which was measured; note: no promise is
               broken, but users should know; skipped: the reason is in ``seen``
    seen       the result
    tried      the input
    detects    the smallest deviation, as a total variation at a token (or at the tokens in ``tried``), that would have
               been found with a probability of 95 %; None if not applicable
    seconds    duration, compilation included
    """

    name: str
    status: Status
    seen: str
    tried: str = ""
    detects: float | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        return self.status != "FAILED"
