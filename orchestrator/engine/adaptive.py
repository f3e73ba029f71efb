"""Draft lengths chosen again in every round, among lengths that all have graphs, and of each request in it.

The cost model is the usual one for speculation (Leviathan et al., arXiv 2211.17192, section 3, with acceptance measured
for every position instead of one alpha): a round of k drafts yields 1 + sum over i <= k of P(first i drafts accepted)
tokens and takes the time measured for that length.

The speed of a machine varies with time by more than lengths differ, and the times of a length are as old as its last
round. So times are kept relative to a level, the current slowness of the machine, which every round shows; and the
lengths next to the chosen one are explored at intervals, to be compared with it at one level.

Where rows that are not used cost nothing, requests compete for the rows of a round: a drafted token is verified if the
probability that it and those before it are accepted is worth more than the time of its row (`DraftLengthController.
allot`). What is known before the drafts are drawn decides, so that the law of every acceptance rule stays.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from paceline.core.types import RoundLimits, RoundResult

DECAY = 0.98
"""Decay per round: about the last fifty rounds count."""

PRIOR = (0.7, 4.0)
"""Acceptance assumed before any round, and the weight of that assumption in drafts."""

KEPT_TIMES = 25
"""Number of times kept for every length. Their median is used."""

ENOUGH_TIMES = 3
"""Number of times from which the first round after a change of length is ignored: code and data are cold."""

MARGIN = 1.03
"""Minimum gain of another length before it is chosen: switching because of noise costs more than it gains."""

LEVEL_ROUNDS = 5
"""Rounds that determine the level of the machine's speed, which changes faster than the ``KEPT_TIMES`` of a length."""

ROUNDS_PER_CHOICE = 32
"""Rounds between two choices, if there is nothing to explore. Code that runs once in some milliseconds is cold and
takes several times as long, and the best length stays the best for longer than this.
"""

EXPLORE_AFTER = (1, 8)
"""Choices after which an adjacent length is explored: the first number, doubled after every exploration up to the
second, and halved when another length is chosen.
"""

EXPLORE_ROUNDS = 2
"""Rounds of an exploration, of which the first one is cold."""

PROBE_AFTER = (64, 4096)
"""Adaptive drafting backs off exponentially when it does not pay: after this many rounds without a draft one is tried
again, twice as many after every trial that failed, up to the second number.
"""


TRIAL_ROUNDS = 8
"""Rounds of a trial after a pause while half of its drafts are accepted; then the cost model decides."""

REQUEST_PRIOR = 2.0
"""Weight, in drafts, of what all requests show against the history of one."""

ROUNDS_PER_ALLOTMENT = 8
"""Rounds between two allotments of rows, unless a request joins or leaves."""

_UNSHARED = 0.5
"""Share of the time between the shortest and the longest length that is taken for the time of their rows, until rounds
of one length with other numbers of rows tell it.
"""


class History:
    """Fates of drafts by position, of one request or of all, decayed.

    Only positions whose predecessors were accepted count. What was drafted after a rejected token is left out: it tells
    of the noise that later drafts are drawn with, and a choice by it would change the law of rejection sampling.

    hits, tries  of proposed tokens: accepted, and all
    asked        of the drafter, and of these ``proposed``
    """

    def __init__(self, positions: int) -> None:
        self.hits, self.tries = [0.0] * positions, [0.0] * positions
        self.asked = self.proposed = 0.0

    def fade(self) -> None:
        """Let a round pass: what is long ago counts less, also of a request that got no row."""
        self.hits, self.tries = [DECAY * x for x in self.hits], [DECAY * x for x in self.tries]
        self.asked, self.proposed = DECAY * self.asked, DECAY * self.proposed

    def count(self, asked: int, proposed: int, accepted: int) -> None:
        decided = min(asked, accepted + 1)
        self.asked, self.proposed = self.asked + decided, self.proposed + min(proposed, decided)
        for place in range(min(proposed, decided)):
            self.tries[place] += 1
            self.hits[place] += place < accepted

    def beliefs(self) -> list[float]:
        """Return the acceptance of a proposed token at each position, if those before it are accepted."""
        found, (belief, worth) = [], PRIOR  # an unknown position has the value of the one before: it changes slowly
        for hits, tries in zip(self.hits, self.tries, strict=True):
            belief = (hits + belief * worth) / (tries + worth)
            found.append(belief)
        return found

    def standing(self, beliefs: Sequence[float], share: float, deepest: int) -> tuple[list[float], float]:
        """Return an entry of `DraftLengthController.standing`; ``beliefs`` and ``share`` are those of all requests."""
        found, chance = list[float](), 1.0
        for hits, tries, belief in zip(self.hits[:deepest], self.tries, beliefs, strict=False):
            chance *= (hits + belief * REQUEST_PRIOR) / (tries + REQUEST_PRIOR)
            found.append(chance)
        return found, (self.proposed + share * REQUEST_PRIOR) / (self.asked + REQUEST_PRIOR)


@dataclass(slots=True)
class StepTimes:
    """Time of a round by its length and rows, in seconds at the machine's level of the first rounds. A row takes the
    same time at each length.

    The first ``KEPT_TIMES`` after a change of length are kept: they compare it with the length before. Later ones only
    tell the level; the rounds of a text become slower and those of the next start fast, so a length that ran alone
    would seem slower and slower beside the others.
    """

    _times: dict[int, list[tuple[int, float]]] = field(default_factory=dict)  # rows and seconds
    _ran: set[int] = field(default_factory=set)
    _recent: list[float] = field(default_factory=list)  # of the last rounds, relative to those lengths' typical times
    _last: int | None = None
    _stay: int = 0  # rounds since the last change of length

    def __contains__(self, length: int) -> bool:
        return length in self._times

    def at(self, length: int, rows: int | None = None) -> float:
        """Return the typical time of a round of that length; None: with the rows that such rounds had."""
        times = self._times[length]
        typical = _middle([seconds for _, seconds in times])
        if rows is None:
            return typical
        each = self.row_seconds
        return max(typical / 4, _middle([seconds + each * (rows - had) for had, seconds in times]))

    @property
    def row_seconds(self) -> float:
        """Time of one more row: the slope that rounds of one length share, by least squares."""
        shared = spread = 0.0
        middle: dict[int, tuple[float, float]] = {}
        for length, times in self._times.items():
            rows, typical = sum(had for had, _ in times) / len(times), _middle([seconds for _, seconds in times])
            middle[length] = rows, typical
            bounded = [(had, min(max(seconds, typical / 2), typical * 2)) for had, seconds in times]
            mean = sum(seconds for _, seconds in bounded) / len(times)
            shared += sum((had - rows) * (seconds - mean) for had, seconds in bounded)
            spread += sum((had - rows) ** 2 for had, _ in bounded)
        if not middle:
            return 0.0
        (fewest, shortest), (most, longest) = middle[min(middle)], middle[max(middle)]
        if most <= fewest:
            return max(0.0, shared / spread) if spread else 0.0
        prior, weight = _UNSHARED * (longest - shortest) / (most - fewest), most**2 / 16
        return max(0.0, (shared + prior * weight) / (spread + weight))

    def record(self, length: int, seconds: float | None, rows: int) -> None:
        """Record the time of a round, or of one step if it has several; None if other work is included."""
        warm, self._last = length == self._last, length
        self._stay = self._stay + 1 if warm else 0
        if length not in self._ran:  # it may include compiling a graph
            self._ran.add(length)
            return
        times = self._times.get(length, [])
        if seconds is None or not (warm or len(times) < ENOUGH_TIMES):
            return
        if times and warm:
            same = all(had == rows for had, _ in times)
            usual = self.at(length, None if same else rows)
            self._recent = [*self._recent[1 - LEVEL_ROUNDS :], seconds / usual]
        if self._stay >= KEPT_TIMES == len(times):
            return
        level = _middle(self._recent) if self._recent else 1.0
        self._times[length] = [*times[1 - KEPT_TIMES :], (rows, seconds / level)]


@dataclass(slots=True)
class Exploration:
    """Exploration of the lengths next to the chosen one."""

    left: int = 0  # remaining rounds of the current exploration
    _after: int = EXPLORE_AFTER[0]
    _since: int = 0
    _deeper: bool = False

    def begin(self) -> None:
        """Another length was chosen."""
        self._after, self._since, self.left = max(EXPLORE_AFTER[0], self._after // 2), 0, 0

    def ran(self, rounds: int) -> None:
        self.left = max(0, self.left - rounds)

    def instead(self, length: int, draft_lengths: Sequence[int]) -> int:
        """Return the length to use: the chosen one, or one next to it."""
        if not self.left:
            self._since += 1
            if self._since < self._after:
                return length
            self._since, self._after = 0, min(2 * self._after, EXPLORE_AFTER[1])
            self.left, self._deeper = EXPLORE_ROUNDS, not self._deeper
        place = draft_lengths.index(length)
        beside = [*draft_lengths[:place][-1:], *draft_lengths[place + 1 :][:1]]
        return beside[-1 if self._deeper else 0] if beside else length


@dataclass(slots=True)
class Rest:
    """Drafting that pauses: rounds since then, rounds after which it is tried, and rounds of that trial."""

    idle: int = 0
    after: int = PROBE_AFTER[0]
    tried: int = 0


class DraftLengthController:
    """Chooses one of ``draft_lengths`` (ascending, 0 = no draft) for the rounds that come next.

    It has no model and no clock: it receives every round's result and time, and the same trace gives the
    same choices.

    Every length is tried twice first, from the longest down: the first round of a length may include making its
    graph and is not counted. A trial after a pause continues for some rounds while half of its drafts are accepted, so
    that a draft that has become useful is soon used.

    rounds    number of rounds of the last choice
    standing  for every request, the probability that its first 1, 2, ... proposed tokens are accepted, and the share of
              the tokens asked of the drafter that it proposes. Empty: requests do not compete for rows
    """

    standing: Sequence[tuple[Sequence[float], float]] = ()

    def __init__(self, draft_lengths: tuple[int, ...]) -> None:
        self.draft_lengths = draft_lengths
        self._history = History(draft_lengths[-1])  # siblings share it
        self._begin()

    def _begin(self) -> None:
        """Forget the times and the choice, but not the acceptance statistics."""
        self.rounds, self._length, self._settled = 1, self.draft_lengths[-1], False
        self._step_times, self._exploration = StepTimes(), Exploration()
        self._recorded: list[tuple[int, list[int], list[int], float | None, int]] = []
        self._rest = Rest()

    @property
    def resting(self) -> bool:
        """Whether drafting pauses, but for trials."""
        return self._length == 0

    def sibling(self) -> Self:
        """Return a controller for rounds of other costs: it shares the acceptance statistics, and has no times yet."""
        sibling = copy.copy(self)
        sibling._begin()
        return sibling

    def choose(self, deepest: int) -> int:
        """Return the draft length of the next round, in which no slot can accept more than ``deepest`` tokens.

        No length is chosen above the first one that covers them; that may be 0, if nothing can be accepted.
        """
        if self._settled and len(self._recorded) < ROUNDS_PER_CHOICE and deepest >= self._length:
            return self._length
        self._learn()
        longest = next((k for k in self.draft_lengths if k >= deepest), self.draft_lengths[-1])
        taken = self._chosen([k for k in self.draft_lengths if k <= longest])
        self._settled = taken == self._length and taken in self._step_times
        self.rounds = ROUNDS_PER_CHOICE if self._settled else max(1, self._exploration.left)
        return taken

    def allot(self, length: int) -> list[int] | None:
        """Return how many drafts of each request to verify in a round of the chosen length; None: all, since the
        length is on trial.
        """
        if self.resting or length not in self._step_times:
            return None
        least = self._best(length)[1]
        return [sum(chance >= least for chance in chances[:length]) for chances, _ in self.standing]

    def _best(self, length: int) -> tuple[float, float]:
        """Return tokens/s of rounds of a length, and the least acceptance probability of a draft that pays."""
        times, requests = self._step_times, len(self.standing)
        if not requests:
            return self.expected(length)[length] / times.at(length), 0.0
        tokens, seconds, each = float(requests), times.at(length, requests), times.row_seconds
        offers = sorted(
            ((chance, share) for chances, share in self.standing for chance in chances[:length]), reverse=True
        )
        least = 1.0
        for chance, share in offers:
            if chance * seconds <= each * tokens:
                break
            tokens, seconds, least = tokens + share * chance, seconds + share * each, chance
        else:
            least = 0.0
        return tokens / seconds, least

    def _chosen(self, draft_lengths: list[int]) -> int:
        untimed = next((k for k in reversed(draft_lengths) if k not in self._step_times), None)
        if untimed is not None:
            return untimed
        if self._length == 0 and self._rest.idle < self._rest.after:
            return 0  # nothing is learnt until then
        rates = {k: self._best(k)[0] for k in draft_lengths}
        best = max(draft_lengths, key=rates.__getitem__)
        if self._length not in draft_lengths:  # only near an end
            return best
        if best != self._length and rates[best] > MARGIN * rates[self._length]:
            self._length = best
            self._exploration.begin()
        if self._length == 0:
            return next((k for k in draft_lengths if k), 0)
        return self._exploration.instead(self._length, draft_lengths)

    def expected(self, deepest: int) -> list[float]:
        """Return the expected tokens of a round of length 0, 1, ...: 1 + the sum over positions of the probability that
        all drafts up to that position are accepted.
        """
        self._learn()
        standing, expected = 1.0, [1.0]
        for belief in self._history.beliefs()[:deepest]:
            standing *= belief
            expected.append(expected[-1] + standing)
        return expected

    def record(
        self, length: int, *, requested: list[int], accepted: list[int], seconds: float | None, rows: int = 0
    ) -> None:
        """Record a round of this length: drafts requested by every slot, drafts accepted, and rows that were computed.

        A draft that was requested and not proposed, because of low confidence or no match, counts as rejected.
        ``seconds`` is None if other work is included. At length 0 ``accepted`` counts plain steps after the first, if a
        round takes several: each of them is a round in the cost model.
        """
        self._recorded.append((length, requested, accepted, seconds, rows))

    def _learn(self) -> None:
        self._exploration.ran(len(self._recorded))
        for length, requested, accepted, seconds, rows in self._recorded:
            steps = 1 + max(accepted) if length == 0 else 1
            self._step_times.record(length, None if seconds is None else seconds / steps, rows)
            if length == 0:
                self._rest.idle += steps
            elif self._length:
                self._rest = Rest()
            else:
                self._rest.tried += 1
                if self._rest.tried == TRIAL_ROUNDS or 2 * sum(accepted) < sum(requested):
                    self._rest = Rest(after=min(2 * self._rest.after, PROBE_AFTER[1]))
            if any(requested):
                self._history.fade()
                for asked, stood in zip(requested, accepted, strict=True):
                    self._history.count(asked, asked, stood)
        self._recorded = []


def _middle(numbers: list[float]) -> float:
    """The median; the larger one of the middle two."""
    return sorted(numbers)[len(numbers) // 2]


class DraftLengthPolicy:
    """Chooses the draft length of every round and of every request in it, and learns from its result.

    The cost of a round, and so the best length, depends on the number of requests in it: there is a controller for
    every fill. Fills within a factor of two share one, and all share the acceptance statistics.

    controller  chooses the length; those of other batch fills are its siblings
    batch_for   batch rows of the graph that serves a number of slots (0 = all), if they determine a round's cost; None:
                the number of requests does
    competes    whether rows that are not used cost nothing, so that requests compete for them
    """

    def __init__(
        self,
        controller: DraftLengthController,
        *,
        batch_for: Callable[[int | None], int] | None = None,
        competes: bool = False,
    ) -> None:
        self._first = self._controller = controller
        self._competes, self._positions = competes, controller.draft_lengths[-1]
        self._all, self._own = History(self._positions), dict[int, History]()
        self._seated: list[int] = []
        self._standing: list[tuple[int, tuple[list[float], float]]] = []  # of slots, for some rounds
        self._allotted: dict[int, list[int]] = {}  # drafts of each of these in rounds of a length
        self._rounds_left = 0
        self._batch_for, self._by_fill = batch_for, dict[int, DraftLengthController]()
        self._lagging: set[int] = set()  # slots with commits that the drafter has not read

    @property
    def resting(self) -> bool:
        """Whether rounds of some fill draft nothing at present."""
        return any(controller.resting for controller in self._by_fill.values())

    def begin(self, slot: int, *, unread: bool = False) -> None:
        """A request takes part from now on; ``unread``: the drafter has not read its prompt."""
        (self._lagging.add if unread else self._lagging.discard)(slot)
        self._own[slot] = History(self._positions)
        self._rounds_left = 0  # rows were allotted to the request before it in this slot

    def move(self, slot: int, to: int) -> None:
        self._own[to] = self._own.pop(slot, History(self._positions))
        if slot in self._lagging:
            self._lagging.remove(slot)
            self._lagging.add(to)

    def at(self, seated: int) -> DraftLengthController:
        """Return the controller for rounds with ``seated`` requests."""
        fill = 1 << max(0, seated - 1).bit_length()
        controller = self._by_fill.get(fill)
        if controller is None:
            controller = self._by_fill[fill] = self._first.sibling() if self._by_fill else self._first
        return controller

    def choose(self, limits: RoundLimits, seated: Collection[int]) -> tuple[int, RoundLimits]:
        """Return the length of the next round, and its limits: no more rounds than the choice covers.

        seated  slots that take part
        """
        fill = len(seated) if self._batch_for is None else self._batch_for(limits.used_slots) or len(limits.max_accept)
        self._controller = controller = self.at(fill)
        self._seated = sorted(seated)
        competes = self._competes and len(seated) > 1
        if not competes:
            controller.standing = ()
        elif self._rounds_left <= 0 or [slot for slot, _ in self._standing] != self._seated:
            self._weigh(limits.max_accept)
            controller.standing, self._allotted = [one for _, one in self._standing], {}
        length = controller.choose(max(limits.max_accept))
        if competes and length:
            limits = replace(limits, max_accept=self._limited(length, limits.max_accept))
        return length, limits if limits.max_rounds == 1 else replace(limits, max_rounds=controller.rounds)

    def _weigh(self, most: list[int]) -> None:
        """Estimate how far the drafts of every request stand."""
        beliefs, share = self._all.beliefs(), (1 + self._all.proposed) / (1 + self._all.asked)
        self._standing = [(slot, self._own[slot].standing(beliefs, share, most[slot])) for slot in self._seated]
        self._rounds_left = ROUNDS_PER_ALLOTMENT

    def _limited(self, length: int, most: list[int]) -> list[int]:
        """Return the limits of slots in a round of a length, within the rows that were allotted to them."""
        counts = self._allotted.get(length)
        if counts is None:
            counts = self._controller.allot(length)
            if counts is None:
                return most
            self._allotted[length] = counts
        limits = [0] * len(most)
        for slot, count in zip(self._seated, counts, strict=True):
            limits[slot] = min(most[slot], count)
        return limits

    def learn(self, length: int, result: RoundResult, limits: RoundLimits, *, early: bool) -> None:
        """Report the results of rounds of this length to the controller.

        ``early``: the first of them also read earlier commits, so its time is not typical of its length.
        """
        max_accept, remaining = limits.max_accept, limits.remaining or limits.max_accept
        for number, report in enumerate(result.reports):
            drafted = [min(length, limit, max(0, left)) for limit, left in zip(max_accept, remaining, strict=True)]
            catches_up = any(drafted[slot] for slot in self._lagging) or (early and length > 0 and number == 0)
            if any(drafted) or length == 0:
                accepted = [len(tokens) - 1 for tokens in report.tokens]
                seconds = None if catches_up else report.seconds
                rows = len(self._seated) + sum(report.drafted[slot] for slot in self._seated)
                self._controller.record(length, requested=drafted, accepted=accepted, seconds=seconds, rows=rows)
            if self._competes and any(drafted):
                self._count(drafted, report.drafted, accepted)
            if length == 0:
                self._lagging = set(range(len(drafted)))
            elif self._lagging:
                self._lagging = {slot for slot in self._lagging if not drafted[slot]}
            remaining = [left - len(tokens) for left, tokens in zip(remaining, report.tokens, strict=True)]

    def _count(self, asked: list[int], proposed: list[int], accepted: list[int]) -> None:
        self._rounds_left -= 1
        self._all.fade()
        for slot in self._seated:
            own = self._own[slot]
            own.fade()
            if asked[slot]:
                for one in (own, self._all):
                    one.count(asked[slot], min(proposed[slot], asked[slot]), accepted[slot])
