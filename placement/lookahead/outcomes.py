"""What a target may commit after a proposal, likeliest first, by what was seen of target and draft so far.

Some drafts are accepted, and one token of the target's own follows. Where that is not the drafter's choice, it is most
often the drafter's second one: so an outcome is some of the drafts, and the first or the second choice behind them.
How likely that is depends on how far apart the two scores were. Pure: no tensors, no time.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paceline.core.types import PAD

_EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)  # of gaps between the scores of two choices
_MEMORY = 512  # choices, after which older ones count half: texts change
_LEAST = 0.01  # of an outcome's odds; below it is not worth the electricity


@dataclass(frozen=True, slots=True)
class Candidate:
    """``tokens`` the target may commit, in every slot, and how likely that is."""

    odds: float
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class DraftedSlot:
    """What was drafted for one slot.

    drafts   in order; from a PAD on nothing was
    limit    how many of them may be accepted
    seconds  the second choices at the same places, and ``gaps``, by how much their scores fell behind; or None
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
        # Looked at, first, second: as if a little had been seen already. The last one is for all choices, of any gap.
        self._seen = [[1.0, 0.5, 0.25] for _ in range(len(_EDGES) + 2)]

    def of(self, gap: float | None) -> tuple[float, float]:
        """Odds of the first and of the second choice, if all before was right; None = the gap is not known."""
        times, first, second = self._seen[-1 if gap is None else bisect(_EDGES, gap)]
        return first / times, second / times

    def learn(self, chain: DraftedSlot, committed: Sequence[int]) -> None:
        """What a target committed behind a chain's beginning."""
        for place, (draft, token) in enumerate(zip(chain.drafts, committed, strict=False)):
            if draft == PAD:
                return
            second = chain.seconds is not None and token == chain.seconds[place] != draft
            self._count(None, token == draft, second)
            if chain.gaps is not None:
                self._count(chain.gaps[place], token == draft, second)
            if token != draft:
                return

    def full(self, chains: Sequence[DraftedSlot]) -> Candidate | None:
        """All is accepted, and the target's own token is the draft behind; None where none was drafted."""
        found = [_first(chain) for chain in chains]
        if any(PAD in tokens for tokens in found):
            return None
        odds = [self.of(chain.gap(place))[0] for chain, t in zip(chains, found, strict=True) for place in range(len(t))]
        return Candidate(math.prod(odds), tuple(found))

    def outcomes(self, chains: Sequence[DraftedSlot]) -> Iterator[Candidate]:
        """Of all slots together, likeliest first. ``chains`` have second choices."""
        return _jointly([self._alone(chain) for chain in chains])

    def _alone(self, chain: DraftedSlot) -> list[Candidate]:
        """Of one slot, likeliest first."""
        assert chain.seconds is not None
        found, so_far, drafts = [], 1.0, _first(chain)
        for place, draft in enumerate(drafts):
            if draft == PAD:
                break
            first, second = self.of(chain.gap(place))
            found.append(Candidate(so_far * second, ((*drafts[:place], chain.seconds[place]),)))
            so_far *= first
        else:
            found.append(Candidate(so_far, (drafts,)))
        return sorted(found, key=lambda outcome: -outcome.odds)

    def _count(self, gap: float | None, first: bool, second: bool) -> None:
        seen = self._seen[-1 if gap is None else bisect(_EDGES, gap)]
        if seen[0] >= _MEMORY:
            seen[:] = [number / 2 for number in seen]
        seen[0] += 1
        seen[1] += first
        seen[2] += second


def _first(chain: DraftedSlot) -> tuple[int, ...]:
    """As many drafts as may be accepted, and one more."""
    return tuple(chain.drafts[: chain.limit + 1])


def _jointly(slots: Sequence[Sequence[Candidate]]) -> Iterator[Candidate]:
    """The products of one outcome from every slot's, which are sorted, likeliest first; none that hardly happens."""
    if not all(slots):
        return
    start = (0,) * len(slots)
    waiting, known = [(-math.prod(slot[0].odds for slot in slots), start)], {start}
    while waiting:
        odds, places = heapq.heappop(waiting)
        if -odds < _LEAST:
            return
        chosen = [slot[place] for slot, place in zip(slots, places, strict=True)]
        yield Candidate(-odds, tuple(one.tokens[0] for one in chosen))
        for index, place in enumerate(places):
            after = (*places[:index], place + 1, *places[index + 1 :])
            if place + 1 < len(slots[index]) and after not in known:
                known.add(after)
                odds = math.prod(slot[at].odds for slot, at in zip(slots, after, strict=True))
                heapq.heappush(waiting, (-odds, after))
