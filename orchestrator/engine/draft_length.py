"""How many tokens to draft next: the choice of a rung on a ladder of compiled depths.

A pure controller: it is told what every round did and how long it took, and the same trace gives the same choices.
It knows no model and no clock. The cost model is the usual one for speculation (Leviathan et al., arXiv 2211.17192,
section 3, with acceptance measured for every position instead of one alpha): a round at depth k yields
1 + sum over i <= k of P(first i drafts accepted) tokens and takes the time measured for that rung.

A machine is faster at one time than at another, by more than rungs differ, and a rung's times are known from when it
was last taken. So times are kept relative to a level, how slow the machine is just now, which every round tells; and
the neighbours of the rung that is taken are visited now and then, to be compared with it at one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from paceline.core.errors import ConfigurationError
from paceline.engine import validation

DRAFT_LENGTHS = (0, 1, 2, 4, 8)
"""Depths to choose among, by default."""

DECAY = 0.98
"""Weight of a round against the next one: about the last fifty count."""

PRIOR = (0.7, 4.0)
"""Acceptance assumed before anything is seen, and how many drafts that belief is worth."""

KEPT_TIMES = 25
"""Of every rung. Their median counts."""

SURE = 3
"""Times of a rung from which on one that follows another rung's round is left out: it finds code and data cold."""

MARGIN = 1.03
"""How much better another rung must look before it is taken: switching for noise costs more than it gains."""

LEVEL_OF = 5
"""Rounds that say how slow the machine is: few of ``KEPT_TIMES`` have seen a change before the level has."""

TOGETHER = 32
"""Rounds between two choices, if there is nothing to be tried. What runs once in some milliseconds finds its code cold
and takes several times as long as it has to, and a rung that was best is best for longer than this.
"""

VISIT_AFTER = (1, 8)
"""Choices after which a neighbour is visited: so many at first, twice as many after every visit, up to the second
number, and half as many when another rung is chosen.
"""

VISIT = 2
"""Rounds of a visit, of which the first one is cold."""

PROBE_AFTER = (64, 4096)
"""Rounds without any draft after which, at the next choice, one is tried, since nothing is learnt about acceptance in
between: so many at first, and twice as many after every trial that failed, up to the second number.
"""


@dataclass(slots=True)
class StepTimes:
    """How long a round takes at every rung: ``typical``, in seconds of the machine at the level of its first times."""

    typical: dict[int, float] = field(default_factory=dict)
    _times: dict[int, list[float]] = field(default_factory=dict)
    _ran: set[int] = field(default_factory=set)
    _recent: list[float] = field(default_factory=list)  # times of the last rounds over what is typical of their rungs
    _last: int | None = None

    def record(self, rung: int, seconds: float | None) -> None:
        """The time of a round, or of a step where it has several; None if it says nothing of what the rung takes."""
        warm, self._last = rung == self._last, rung
        if rung not in self._ran:  # it may include a compilation
            self._ran.add(rung)
            return
        times = self._times.get(rung, [])
        if seconds is None or not (warm or len(times) < SURE):
            return
        if times and warm:
            self._recent = [*self._recent[1 - LEVEL_OF :], seconds / self.typical[rung]]
        level = _middle(self._recent) if self._recent else 1.0
        self._times[rung] = times = [*times[1 - KEPT_TIMES :], seconds / level]
        self.typical[rung] = _middle(times)


@dataclass(slots=True)
class Exploration:
    """When a neighbour of the rung that was chosen is taken in its place."""

    left: int = 0  # rounds of the visit that is under way
    _after: int = VISIT_AFTER[0]
    _since: int = 0
    _deeper: bool = False

    def begin(self) -> None:
        """Another rung was chosen."""
        self._after, self._since, self.left = max(VISIT_AFTER[0], self._after // 2), 0, 0

    def ran(self, rounds: int) -> None:
        """So many rounds since this was last told."""
        self.left = max(0, self.left - rounds)

    def instead(self, rung: int, ladder: Sequence[int]) -> int:
        """The rung to take: the one that was chosen, or one beside it on the ladder."""
        if not self.left:
            self._since += 1
            if self._since < self._after:
                return rung
            self._since, self._after = 0, min(2 * self._after, VISIT_AFTER[1])
            self.left, self._deeper = VISIT, not self._deeper
        place = ladder.index(rung)
        beside = [*ladder[:place][-1:], *ladder[place + 1 :][:1]]
        return beside[-1 if self._deeper else 0] if beside else rung


@dataclass(slots=True)
class DraftLengthController:
    """Chooses a rung of ``ladder`` (ascending depths, 0 = no draft) for the rounds that come next.

    Every rung is tried twice first, from the deepest down: the first time of a rung may include its compilation and
    is not counted. A trial after a rest goes on for as long as half of its drafts stand, so that a draft that has
    become useful is soon known to be. ``rounds``: how many the last choice is meant for.
    """

    ladder: tuple[int, ...]
    rounds: int = field(init=False, default=1)
    _hits: list[float] = field(init=False)
    _tries: list[float] = field(init=False)
    _costs: StepTimes = field(init=False, default_factory=StepTimes)
    _visits: Exploration = field(init=False, default_factory=Exploration)
    _rung: int = field(init=False)
    _heard: list[tuple[int, list[int], list[int], float | None]] = field(init=False, default_factory=list)
    _settled: bool = field(init=False, default=False)
    _idle: int = field(init=False, default=0)
    _rest: int = field(init=False, default=PROBE_AFTER[0])

    def __post_init__(self) -> None:
        self._hits, self._tries = [0.0] * self.ladder[-1], [0.0] * self.ladder[-1]
        self._rung = self.ladder[-1]

    def choose(self, deepest: int) -> int:
        """The depth of the next round, of which no slot can accept more than ``deepest`` tokens.

        No rung is taken that is deeper than the first one that holds them; that may be 0, if nothing can be accepted.
        """
        if self._settled and len(self._heard) < TOGETHER and deepest >= self._rung:
            return self._rung
        self._learn()
        most = next((k for k in self.ladder if k >= deepest), self.ladder[-1])
        taken = self._chosen([k for k in self.ladder if k <= most])
        self._settled = taken == self._rung and taken in self._costs.typical
        self.rounds = TOGETHER if self._settled else max(1, self._visits.left)
        return taken

    def _chosen(self, ladder: list[int]) -> int:
        typical = self._costs.typical
        untimed = next((k for k in reversed(ladder) if k not in typical), None)
        if untimed is not None:
            return untimed
        if self._rung == 0 and self._idle < self._rest:
            return 0  # nothing is learnt meanwhile
        tokens = self.expected(ladder[-1])
        rates = {k: tokens[k] / typical[k] for k in ladder}
        best = max(ladder, key=rates.__getitem__)
        if self._rung not in ladder:  # only near an end
            return best
        if best != self._rung and rates[best] > MARGIN * rates[self._rung]:
            self._rung = best
            self._visits.begin()
        if self._rung == 0:
            return next((k for k in ladder if k), 0)
        return self._visits.instead(self._rung, ladder)

    def expected(self, deepest: int) -> list[float]:
        """Tokens expected of a round at depth 0, 1, ...: 1 + the sum over positions of the chance that all up to there
        stand.
        """
        self._learn()
        standing, expected = 1.0, [1.0]
        belief, worth = PRIOR
        for hits, tries in zip(self._hits[:deepest], self._tries, strict=False):
            # What is not known of a place is taken from the one before it: acceptance changes slowly with depth.
            belief = (hits + belief * worth) / (tries + worth)
            standing *= belief
            expected.append(expected[-1] + standing)
        return expected

    def record(self, rung: int, *, asked: list[int], accepted: list[int], seconds: float | None) -> None:
        """What a round at a rung did: for every slot, how many drafts were asked for and how many stood; and its time.

        A draft that was asked for and not made, by a drafter in doubt or without a match, is one that did not stand.
        ``seconds`` is None if they say nothing of what the rung takes. At rung 0 ``accepted`` counts plain steps
        besides the first, where a round takes several: each of them is a round to the cost model.
        """
        self._heard.append((rung, asked, accepted, seconds))

    def _learn(self) -> None:
        """From all that was recorded."""
        self._visits.ran(len(self._heard))
        for rung, asked, accepted, seconds in self._heard:
            steps = 1 + max(accepted) if rung == 0 else 1
            self._costs.record(rung, None if seconds is None else seconds / steps)
            if rung == 0:
                self._idle += steps
            elif self._rung:
                self._idle, self._rest = 0, PROBE_AFTER[0]
            elif 2 * sum(accepted) < sum(asked):
                self._idle, self._rest = 0, min(2 * self._rest, PROBE_AFTER[1])
            if any(asked):
                self._count(asked, accepted)
        self._heard = []

    def _count(self, asked: list[int], accepted: list[int]) -> None:
        self._hits = [DECAY * x for x in self._hits]
        self._tries = [DECAY * x for x in self._tries]
        for wanted, stood in zip(asked, accepted, strict=True):
            for place in range(min(wanted, stood + 1)):  # behind the first rejection nothing was decided
                self._tries[place] += 1
                self._hits[place] += place < stood


def _middle(numbers: list[float]) -> float:
    """The median; the larger one of the middle two."""
    return sorted(numbers)[len(numbers) // 2]


def of(k: int | Sequence[int]) -> tuple[int, DraftLengthController | None]:
    """The deepest proposal that ``k`` asks for, and what chooses among its depths if there are several.

    Raises:
        ConfigurationError: a depth is negative, or they do not ascend.
    """
    number = validation.whole(k)
    if number is not None:
        return number, None
    given = [validation.whole(depth) for depth in k] if isinstance(k, (list, tuple)) else []
    ladder = tuple(depth for depth in given if depth is not None)
    if not ladder or len(ladder) < len(given) or ladder[0] < 0 or any(a >= b for a, b in pairwise(ladder)):
        raise ConfigurationError(f"k must be a number or ascending numbers of drafted tokens, not {k!r}")
    return ladder[-1], DraftLengthController(ladder) if len(ladder) > 1 else None
