"""Whether a drafter fits its target: after its first drafts, acceptance is compared once with what pays.

A round of drafts pays where it commits more tokens than plain steps would in its time. A head with wrong layer ids, or
for another base model, is accepted nearly never, and the text is the same: nobody would know.
"""

from __future__ import annotations

import logging
from statistics import median

from paceline.core.types import RoundResult

log = logging.getLogger("paceline")

ENOUGH_DRAFTS = 200
"""Drafts after which a drafter is judged."""

LEAST_GAIN = 0.1
"""Accepted tokens of a draft below which no drafter with weights pays, whatever the times."""

_FAR_BELOW = 0.5
"""A drafter is warned about below this share of the accepted tokens that would pay."""

ENOUGH_TIMES = 3
"""Plain steps from which their times are used."""


class DraftFit:
    """Watches the rounds of one drafter.

    name     of the drafter, for messages
    causes   what is likely wrong where it does not fit
    judged   whether there were enough drafts: no round has to be shown any more
    warning  the message once it was given; "" = none so far
    """

    def __init__(self, name: str, causes: str) -> None:
        self.name, self.causes, self.judged, self.warning = name, causes, False, ""
        self._drafts = self._accepted = 0
        self._drafted: list[float] = []  # seconds of rounds with drafts
        self._plain: list[float] = []  # of plain steps
        self._verify: list[float] = []  # of verifications in a graph of their own

    @property
    def gained(self) -> float:
        """Mean accepted tokens of a draft."""
        return self._accepted / self._drafts if self._drafts else 0.0

    @property
    def needed(self) -> float | None:
        """Accepted tokens of a draft from which rounds pay at the measured times; None: not known.

        Without plain steps, the verification of a draft stands for one: it takes no less.
        """
        steps = self._plain if len(self._plain) >= ENOUGH_TIMES else self._verify
        if len(steps) < ENOUGH_TIMES or not self._drafted:
            return None
        return max(0.0, median(self._drafted) / max(median(steps), 1e-9) - 1)

    @property
    def fits(self) -> bool:
        """Whether acceptance is not far below what pays."""
        return self.gained >= max(LEAST_GAIN, _FAR_BELOW * (self.needed or 0.0))

    def learn(self, result: RoundResult, *, fused: bool) -> None:
        """Take in rounds, drafted and verified in one graph if ``fused``; warn once, where the drafter does not fit."""
        if self.judged:
            return
        for report in result.reports:
            if not any(report.drafted):
                self.plain(report.seconds / max(1, *(len(tokens) for tokens in report.tokens)))
                continue
            self._drafted.append(report.seconds)
            if not fused:  # such a result has one round
                self._verify.append(result.verify_seconds)
            for drafted, tokens in zip(report.drafted, report.tokens, strict=True):
                if drafted:
                    self._drafts += 1
                    self._accepted += min(drafted, max(0, len(tokens) - 1))
        self.judged = self._drafts >= ENOUGH_DRAFTS
        if self.judged and not self.fits:
            self.warning = f"draft: {self.name} does not fit this target: {self}; likely causes: {self.causes}"
            log.warning("%s", self.warning)

    def plain(self, seconds: float) -> None:
        self._plain.append(seconds)

    def __str__(self) -> str:
        pays = max(LEAST_GAIN, self.needed or 0.0)
        return f"{self.gained:.2f} accepted tokens a draft in {self._drafts} drafts, and rounds pay from {pays:.2f} on"
