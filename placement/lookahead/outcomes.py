"""What a target may commit after a proposal, likeliest first, as estimated from what it committed so far.

Some drafts are accepted, and one token of the target's own follows. Where that is not the drafter's choice, it is most
often the drafter's second one: so an outcome is some of the drafts, and the first or the second choice after them.
How likely it is depends on how far apart the two scores were. Pure: no tensors, no time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.core.types import PAD

_EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)  # of gaps between the scores of two choices
_MEMORY = 512  # choices, after which older ones count half, since texts change
_MIN_ODDS = 0.01  # of an outcome; less likely ones are not worth the energy


@dataclass(frozen=True, slots=True)
class Candidate:
    """``tokens`` that the target may commit in every slot, and the ``odds`` (probability) of that."""

    odds: float
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DraftedSlot:
    """What was drafted for one slot.

    drafts   in order; a PAD ends them
    limit    how many of them may be accepted
    seconds  the second choices at the same places, or None
    gaps     how far the scores of these were below those of the drafts, or None
    """

    drafts: Sequence[int]
    limit: int
    seconds: Sequence[int] | None = None
    gaps: Sequence[float] | None = None

    def gap(self, place: int) -> float | None:
        return None if self.gaps is None else self.gaps[place]


class OutcomeModel:
    """How often the target's token was the draft's choice, and how often its second one, for every range of gaps."""

    def __init__(self) -> None:
        # Per range of gaps: choices, first was right, second was right; with a small prior. The last is for any gap.
        self._counts = [[1.0, 0.5, 0.25] for _ in range(len(_EDGES) + 2)]

    def of(self, gap: float | None) -> tuple[float, float]:
        """Odds of the first and of the second choice if everything before was right; None = the gap is not known."""
        times, first, second = self._counts[-1 if gap is None else bisect(_EDGES, gap)]
        return first / times, second / times

    def learn(self, slot: DraftedSlot, committed: Sequence[int]) -> None:
        """What the target committed where this was drafted."""
        for place, (draft, token) in enumerate(zip(slot.drafts, committed, strict=False)):
            if draft == PAD:
                return
            second = slot.seconds is not None and token == slot.seconds[place] != draft
            self._count(None, token == draft, second)
            if slot.gaps is not None:
                self._count(slot.gaps[place], token == draft, second)
            if token != draft:
                return

    def full(self, slots: Sequence[DraftedSlot]) -> Candidate | None:
        """All drafts are accepted, and the target's own token is the next draft; None where there is no such draft."""
        texts = [_first(slot) for slot in slots]
        if any(PAD in tokens for tokens in texts):
            return None
        odds = [self.of(slot.gap(place))[0] for slot, t in zip(slots, texts, strict=True) for place in range(len(t))]
        return Candidate(math.prod(odds), tuple(texts))

    def outcomes(self, slots: Sequence[DraftedSlot]) -> Iterator[Candidate]:
        """Outcomes of all slots together, likeliest first. ``slots`` have second choices."""
        return _jointly([self._of_slot(slot) for slot in slots])

    def _of_slot(self, slot: DraftedSlot) -> list[Candidate]:
        """Outcomes of one slot, likeliest first."""
        assert slot.seconds is not None
        candidates, so_far, drafts = [], 1.0, _first(slot)
        for place, draft in enumerate(drafts):
            if draft == PAD:
                break
            first, second = self.of(slot.gap(place))
            candidates.append(Candidate(so_far * second, ((*drafts[:place], slot.seconds[place]),)))
            so_far *= first
        else:
            candidates.append(Candidate(so_far, (drafts,)))
        return sorted(candidates, key=lambda outcome: -outcome.odds)

    def _count(self, gap: float | None, first: bool, second: bool) -> None:
        counts = self._counts[-1 if gap is None else bisect(_EDGES, gap)]
        if counts[0] >= _MEMORY:
            counts[:] = [number / 2 for number in counts]
        counts[0] += 1
        counts[1] += first
        counts[2] += second


def _first(slot: DraftedSlot) -> tuple[int, ...]:
    """The drafts that may be accepted, and one more."""
    return tuple(slot.drafts[: slot.limit + 1])


def _jointly(slots: Sequence[Sequence[Candidate]]) -> Iterator[Candidate]:
    """Combinations of one outcome of every slot (each list is sorted), likeliest first, down to `_MIN_ODDS`."""
    if not all(slots):
        return
    start = (0,) * len(slots)
    waiting, known = [(-math.prod(slot[0].odds for slot in slots), start)], {start}
    while waiting:
        odds, places = heapq.heappop(waiting)
        if -odds < _MIN_ODDS:
            return
        chosen = [slot[place] for slot, place in zip(slots, places, strict=True)]
        yield Candidate(-odds, tuple(candidate.tokens[0] for candidate in chosen))
        for index, place in enumerate(places):
            after = (*places[:index], place + 1, *places[index + 1 :])
            if place + 1 < len(slots[index]) and after not in known:
                known.add(after)
                odds = math.prod(slot[at].odds for slot, at in zip(slots, after, strict=True))
                heapq.heappush(waiting, (-odds, after))
