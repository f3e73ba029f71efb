"""Which outcomes are likeliest, and which of them fit into the idle time."""

from __future__ import annotations

import itertools
import math

import pytest

from paceline.core.types import PAD
from paceline.placement.lookahead import DraftedSlot, IdleBudget, OutcomeModel


def learnt(first: int, second: int, neither: int, gap: float) -> OutcomeModel:
    """Odds after so many choices of one gap."""
    odds, chain = OutcomeModel(), DraftedSlot([5], 1, [6], [gap])
    for token, times in ((5, first), (6, second), (7, neither)):
        for _ in range(times):
            odds.learn(chain, [token])
    return odds


def test_odds_are_shares_of_what_was_seen_and_only_up_to_the_first_rejection() -> None:
    odds = learnt(70, 20, 10, gap=0.6)
    assert odds.of(0.7) == (70.5 / 101, 20.25 / 101) == odds.of(None) and odds.of(3.5) == (0.5, 0.25)
    odds = OutcomeModel()
    odds.learn(DraftedSlot([5, 5, 5], 3, [6, 6, 6], [0.1, 2.5, 0.1]), [5, 6, 5])
    assert odds.of(0.1) == (1.5 / 2, 0.25 / 2) and odds.of(2.5) == (0.5 / 2, 1.25 / 2)
    odds.learn(DraftedSlot([PAD, 5], 2), [PAD, 5])
    assert odds.of(None) == (1.5 / 3, 1.25 / 3)


def test_old_texts_are_forgotten() -> None:
    odds, chain = learnt(2000, 0, 0, gap=0.1), DraftedSlot([5], 1, [6], [0.1])
    for _ in range(1500):
        odds.learn(chain, [6])
    assert odds.of(0.1)[1] > 0.9


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_outcomes_come_by_their_odds_and_all_of_them(slots: int) -> None:
    """Against all products of what may happen in each slot; the odds of all, with the unlikely ones, are at most 1."""
    odds = learnt(60, 20, 20, gap=0.3)
    for _ in range(50):
        odds.learn(DraftedSlot([5], 1, [6], [2.2]), [5])
    chains = [
        DraftedSlot([10, 11, 12], limit, [20, 21, 22], [0.3, 2.2, gap]) for limit, gap in ((2, 0.3), (1, 0.3), (0, 9.9))
    ]
    alone = []
    for chain in chains[:slots]:
        found, so_far = {}, 1.0
        for place in range(chain.limit + 1):
            first, second = odds.of(chain.gaps[place])  # type: ignore[index]
            found[(*chain.drafts[:place], 20 + place)] = so_far * second
            so_far *= first
        found[tuple(chain.drafts[: chain.limit + 1])] = so_far
        alone.append(found)
    wanted = {
        texts: math.prod(one[text] for one, text in zip(alone, texts, strict=True))
        for texts in itertools.product(*alone)
    }
    made = list(odds.outcomes(chains[:slots]))
    assert {one.tokens: pytest.approx(one.odds) for one in made} == {t: p for t, p in wanted.items() if p >= 0.01}
    assert [one.odds for one in made] == sorted((one.odds for one in made), reverse=True)
    full = odds.full(chains[:slots])
    assert full is not None and full.tokens in wanted and full.odds == pytest.approx(wanted[full.tokens])


def test_what_was_not_drafted_is_not_expected() -> None:
    odds, chain = OutcomeModel(), DraftedSlot([5, PAD, PAD], 2, [6, 7, 8], [0.1, 0.1, 0.1])
    assert odds.full([chain]) is None and [one.tokens for one in odds.outcomes([chain])] == [((6,),)]
    assert list(odds.outcomes([chain, DraftedSlot([PAD], 0, [3], [0.1])])) == []


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_work_is_begun_where_it_is_expected_to_save_more_than_it_costs() -> None:
    clock = Clock()
    idle = IdleBudget(clock)
    idle.begin()
    clock.now = 1e6
    assert idle.saves("draft", 0.01) > 0, "nothing is known yet"
    for pause in (20.0, 20.0, 500.0):  # the median: one prompt that was read meanwhile says nothing
        idle.paused(pause)
    for kind, takes in (("draft", 10.0), ("review", 2.0)):
        with idle.timed(kind):
            clock.now += takes
    idle.begin()
    assert idle.saves("draft", 0.25) == idle.saves("draft", 0.25, after="review") == 2.5  # done before the call
    clock.now += 14.0  # 6 of 10 are saved with the odds, 4 lost without
    assert idle.saves("draft", 0.5) == 1.0 and idle.saves("draft", 0.39) < 0 < idle.saves("draft", 0.41)
    assert idle.saves("draft", 0.75, after="review") == 1.5
    clock.now += 6.0
    assert idle.saves("draft", 1.0) == 0.0, "the target calls now"
