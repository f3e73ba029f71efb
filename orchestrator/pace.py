"""How many tokens to draft next: the choice of a rung on a ladder of compiled depths.

A pure controller: it is told what every round did and how long it took, and the same trace gives the same choices.
It knows no model and no clock. The cost model is the usual one for speculation (Leviathan et al., arXiv 2211.17192,
section 3, with acceptance measured for every position instead of one alpha): a round at depth k yields
1 + sum over i <= k of P(first i drafts accepted) tokens and takes the time measured for that rung.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from paceline import values
from paceline.core.errors import ConfigurationError

LADDER = (0, 1, 2, 4, 8)
"""Depths to choose among, by default."""

DECAY = 0.98
"""Weight of a round against the next one: about the last fifty count."""

PRIOR = (0.7, 4.0)
"""Acceptance assumed before anything is seen, and how many drafts that belief is worth."""

KEPT_TIMES = 9
MARGIN = 1.03
"""How much better another rung must look before it is taken: switching for noise costs more than it gains."""

PROBE_AFTER = (64, 4096)
"""Rounds without any draft after which one is tried, since nothing is learnt about acceptance in between: so many at
first, and twice as many after every trial that failed, up to the second number.
"""


@dataclass(slots=True)
class Pace:
    """Chooses a rung of ``ladder`` (ascending depths, 0 = no draft) for every round.

    Every rung is tried twice first, from the deepest down: the first time of a rung may include its compilation and
    is not counted. A trial after a rest goes on for as long as half of its drafts stand, so that a draft that has
    become useful is soon known to be.
    """

    ladder: tuple[int, ...]
    _hits: list[float] = field(init=False)
    _tries: list[float] = field(init=False)
    _times: dict[int, list[float]] = field(init=False)
    _runs: dict[int, int] = field(init=False)
    _rung: int = field(init=False)
    _idle: int = field(init=False, default=0)
    _rest: int = field(init=False, default=PROBE_AFTER[0])

    def __post_init__(self) -> None:
        self._hits, self._tries = [0.0] * self.ladder[-1], [0.0] * self.ladder[-1]
        self._times, self._runs = {k: [] for k in self.ladder}, dict.fromkeys(self.ladder, 0)
        self._rung = self.ladder[-1]

    def choose(self, deepest: int) -> int:
        """The depth of the next round, of which no slot can accept more than ``deepest`` tokens.

        No rung is taken that is deeper than the first one that holds them; that may be 0, if nothing can be accepted.
        """
        most = next((k for k in self.ladder if k >= deepest), self.ladder[-1])
        ladder = [k for k in self.ladder if k <= most]
        untimed = next((k for k in reversed(ladder) if not self._times[k]), None)
        if untimed is not None:
            return untimed
        if self._rung == 0 and self._idle < self._rest:
            return 0  # nothing is learnt meanwhile
        best = max(ladder, key=self.rate)
        if self._rung not in ladder:  # only near an end
            return best
        if best != self._rung and self.rate(best) > MARGIN * self.rate(self._rung):
            self._rung = best
        return self._rung or next((k for k in ladder if k), 0)

    def rate(self, rung: int) -> float:
        """Tokens per second expected of a rung that has been timed."""
        return self.tokens(rung) / median(self._times[rung])

    def tokens(self, rung: int) -> float:
        """Tokens expected of a round: 1 + the sum over positions of the chance that all up to there stand."""
        standing, expected = 1.0, 1.0
        belief, worth = PRIOR
        for place in range(rung):
            # What is not known of a place is taken from the one before it: acceptance changes slowly with depth.
            belief = (self._hits[place] + belief * worth) / (self._tries[place] + worth)
            standing *= belief
            expected += standing
        return expected

    def record(self, rung: int, *, asked: list[int], accepted: list[int], seconds: float | None) -> None:
        """What a round at a rung did: for every slot, how many drafts were asked for and how many stood; and its time.

        A draft that was asked for and not made, by a drafter in doubt or without a match, is one that did not stand.
        ``seconds`` is None if they say nothing of what the rung takes. At rung 0 ``accepted`` counts plain steps
        besides the first, where a round takes several: each of them is a round to the cost model.
        """
        steps = 1 + max(accepted) if rung == 0 else 1
        self._runs[rung] += 1
        if self._runs[rung] > 1 and seconds is not None:
            self._times[rung] = [*self._times[rung][-(KEPT_TIMES - 1) :], seconds / steps]
        if rung == 0:
            self._idle += steps
        elif self._rung:
            self._idle, self._rest = 0, PROBE_AFTER[0]
        elif 2 * sum(accepted) < sum(asked):
            self._idle, self._rest = 0, min(2 * self._rest, PROBE_AFTER[1])
        if not any(asked):
            return
        self._hits = [DECAY * x for x in self._hits]
        self._tries = [DECAY * x for x in self._tries]
        for wanted, stood in zip(asked, accepted, strict=True):
            for place in range(min(wanted, stood + 1)):  # behind the first rejection nothing was decided
                self._tries[place] += 1
                self._hits[place] += place < stood


def of(k: int | Sequence[int]) -> tuple[int, Pace | None]:
    """The deepest proposal that ``k`` asks for, and what chooses among its depths if there are several.

    Raises:
        ConfigurationError: a depth is negative, or they do not ascend.
    """
    number = values.whole(k)
    if number is not None:
        return number, None
    given = [values.whole(depth) for depth in k] if isinstance(k, (list, tuple)) else []
    ladder = tuple(depth for depth in given if depth is not None)
    if not ladder or len(ladder) < len(given) or ladder[0] < 0 or any(a >= b for a, b in pairwise(ladder)):
        raise ConfigurationError(f"k must be a number or ascending numbers of drafted tokens, not {k!r}")
    return ladder[-1], Pace(ladder) if len(ladder) > 1 else None
