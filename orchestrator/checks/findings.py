"""The report of `paceline doctor`, `selftest` and `verify`: a finding for each thing they looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "FAILED", "lossy", "note", "skipped"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at.

    status     ok; FAILED; lossy: the acceptance rule says of itself that it deviates, and by how much was measured;
               note: no promise is broken, and somebody should know; skipped: why stands in ``seen``
    seen       what came of it
    tried      on what
    detects    the smallest deviation, as a total variation at a token (or at the tokens that ``tried`` names), that
               would have been found with a probability of 95 %; None where this has no meaning
    seconds    that it took, compilation included
    """

    name: str
    status: Status
    seen: str
    tried: str = ""
    detects: float | None = None
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it did not fail."""
        return self.status != "FAILED"
