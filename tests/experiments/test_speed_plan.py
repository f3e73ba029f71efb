"""Plans of speed: arithmetic that can be checked by hand."""

from __future__ import annotations

import pytest

from paceline.experiments.questions import LoadPlan, SpeedEstimate, expected_tokens, from_rates, ranked
from paceline.experiments.round_times import RoundTimes


def test_tokens_per_round_follow_from_the_rates() -> None:
    alpha = 0.7
    for k in range(6):
        assert expected_tokens([alpha], k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))
    assert expected_tokens([0.5, 0.25], 3) == 1 + 0.5 + 0.125 + 0.03125


def test_the_best_depth_is_where_another_token_costs_more_than_it_gives() -> None:
    times = {("none", 0, 1): 1.0, ("draft", 1, 1): 1.2, ("draft", 5, 1): 2.0, ("none", 0, 8): 1.0, ("draft", 1, 8): 4.0}
    plan = from_rates(RoundTimes(times), "draft", [0.8], batch_size=1, max_depth=5, error=0.1)
    by_hand = {k: expected_tokens([0.8], k) / (1.0 + 0.2 * k) for k in range(1, 6)}
    assert plan.best.k == max(by_hand, key=lambda k: by_hand[k])
    assert plan.best.speedup == pytest.approx(max(by_hand.values()))
    assert plan.verdict.startswith("speculate: ") and plan.best.low == pytest.approx(0.9 * plan.best.speedup)
    busy = from_rates(RoundTimes(times), "draft", [0.8], batch_size=8, max_depth=1, error=0.1)
    assert busy.best.plain and busy.verdict.startswith("do not speculate: the best, speculative: draft, k 1")


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(1.0, "speculate"), (1.45, "uncertain"), (1.6, "do not"), (2.0, "do not speculate: ")]
)
def test_the_verdict_reflects_the_uncertainty(seconds: float, verdict: str) -> None:
    pair = SpeedEstimate("speculative", "a", 1, 1, 1.5, seconds), SpeedEstimate("plain", "", 0, 1, 1.0, 1.0)
    assert ranked(1, [(one, 0.1) for one in pair]).verdict.startswith(verdict)
    assert LoadPlan(1, (pair[1],)).verdict.startswith("do not speculate: nothing")
