"""How well each of several drafters guesses a text: their proposals against what the target wrote then.

A proposal is a forecast of the text. It is compared with the tokens that are committed after it, whether or not it was
the one that was verified, so that nothing has to be tried out to be known. Means forget slowly, for texts change.
Not here: who proposes (`paceline.draft.choice`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

from paceline.core.drafter_counts import DrafterCounts

_FORGETS_TEXT, _FORGETS_ALL = 0.9, 0.99  # weight of what is one forecast older, in a text and of all texts
_PRIOR = 2.0  # forecasts that all other texts count as, in a text
_FIRST = 1.0  # accepted tokens of a drafter that nothing is known of
_SMOOTHING, _OUTLIER = 0.9, 4.0  # of times


@dataclass(slots=True)
class _Mean:
    """A mean that forgets."""

    weight: float = 0.0
    total: float = 0.0

    def add(self, value: float, keeps: float) -> None:
        self.weight, self.total = self.weight * keeps + 1, self.total * keeps + value

    def value(self, prior: float, strength: float) -> float:
        return (self.total + prior * strength) / (self.weight + strength)


@dataclass(slots=True)
class _Forecast:
    """A proposal, of which the first ``right`` tokens have come."""

    drafter: int
    chain: Sequence[int]
    right: int = 0


@dataclass(slots=True)
class _TextScores:
    """What is known of one text."""

    means: list[_Mean]
    open: list[_Forecast] = field(default_factory=list)


class ShadowScores:
    """Scores of ``count`` drafters over all texts in slots. Drafters of several depths share one."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._texts: dict[int, _TextScores] = {}
        self._all = [_Mean() for _ in range(count)]
        self.counts = [DrafterCounts()] * count
        self._propose_seconds: list[float | None] = [None] * count
        self._rest_seconds: float | None = None
        self._handed_over: float | None = None
        self.rounds = 0

    def begin(self, slot: int) -> None:
        """A text begins in a slot."""
        self._texts[slot] = _TextScores([_Mean() for _ in range(self._count)])

    def end(self, slot: int) -> None:
        """The text in a slot is over; forecasts that reach behind its end do not count."""
        self._texts.pop(slot, None)

    def move(self, slot: int, to: int) -> None:
        """The text in a slot goes on in another one."""
        if slot in self._texts:
            self._texts[to] = self._texts.pop(slot)

    def known(self, slot: int, drafter: int) -> bool:
        """Whether a forecast of this drafter was compared with the text, or is being so."""
        text = self._texts.get(slot)
        return text is not None and (
            text.means[drafter].weight > 0 or any(forecast.drafter == drafter for forecast in text.open)
        )

    def forecast(self, slot: int, drafter: int, chain: Sequence[int]) -> None:
        """A drafter says how the text in a slot goes on. Nothing said is nothing to compare."""
        if chain and slot in self._texts:
            self._texts[slot].open.append(_Forecast(drafter, chain))

    def drafted(self, drafter: int, tokens: int) -> None:
        """A proposal of this drafter is verified."""
        self.counts[drafter] = self.counts[drafter].plus(num_drafts=1, num_draft_tokens=tokens)

    def wrote(self, slot: int, tokens: Sequence[int]) -> None:
        """The text in a slot goes on."""
        text = self._texts.get(slot)
        if text is None:
            return
        still_open = []
        for forecast in text.open:
            over = False
            for token in tokens:
                over = forecast.chain[forecast.right] != token
                forecast.right += not over
                over = over or forecast.right == len(forecast.chain)
                if over:
                    break
            if over:
                self._score(text, forecast)
            else:
                still_open.append(forecast)
        text.open = still_open

    def _score(self, text: _TextScores, forecast: _Forecast) -> None:
        self.counts[forecast.drafter] = self.counts[forecast.drafter].plus(
            num_scored=1, num_scored_tokens=forecast.right
        )
        text.means[forecast.drafter].add(forecast.right, _FORGETS_TEXT)
        self._all[forecast.drafter].add(forecast.right, _FORGETS_ALL)

    def expected(self, slot: int, drafter: int) -> float:
        """How many tokens of a proposal of this drafter the target will write."""
        over_all = self._all[drafter].value(_FIRST, _PRIOR)
        text = self._texts.get(slot)
        return over_all if text is None else text.means[drafter].value(over_all, _PRIOR)

    def took(self, drafter: int, seconds: float) -> None:
        """Proposing took so long."""
        self._propose_seconds[drafter] = _smoothed(self._propose_seconds[drafter], seconds)
        self.counts[drafter] = self.counts[drafter].plus(propose_seconds=seconds)

    def rest_took(self, seconds: float) -> None:
        """All of a round but proposing took so long."""
        self._rest_seconds = _smoothed(self._rest_seconds, seconds)

    def handed_over(self) -> None:
        """Proposals of a round are ready: now it is verified."""
        self._handed_over = perf_counter()

    def back(self) -> None:
        """The next commit is here."""
        if self._handed_over is not None:
            self.rest_took(perf_counter() - self._handed_over)
            self._handed_over = None

    def speed(self, slot: int, drafter: int) -> float:
        """Expected tokens of a round in which this drafter proposes, for every second; or for a round, before times
        are known.
        """
        tokens = 1 + self.expected(slot, drafter)
        propose_seconds, other_seconds = self._propose_seconds[drafter], self._rest_seconds
        return (
            tokens if propose_seconds is None or other_seconds is None else tokens / (propose_seconds + other_seconds)
        )


def _smoothed(before: float | None, now: float) -> float:
    """Without pauses, which are no part of a round."""
    return now if before is None else _SMOOTHING * before + (1 - _SMOOTHING) * min(now, _OUTLIER * before)
