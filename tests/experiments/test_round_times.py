"""Times of rounds: lines between what was measured, refused where there is none, each target and sampling apart; and
plans made of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import ConfigurationError, TraceError
from paceline.experiments.config import ExperimentConfig, load_config
from paceline.experiments.questions import LoadPlan, SpeedEstimate, expected_tokens, from_rates, ranked
from paceline.experiments.round_times import RoundTimes, load_times, measured, policy_name, save_times
from paceline.experiments.store import CellResult
from paceline.experiments.trace import Trace
from tests.docs.pages import ROOT


def test_round_times_are_interpolated_and_extrapolated_linearly() -> None:
    times = RoundTimes({("it", 1, 1): 1.0, ("it", 3, 1): 2.0, ("it", 1, 2): 1.5, ("it", 3, 2): 2.5})
    assert times.seconds("it", 2, 1) == 1.5 and times.seconds("it", 4, 2) == 3.0 and times.seconds("it", 1, 3) == 2.0
    uneven = RoundTimes({("it", 1, 1): 1.0, ("it", 2, 1): 1.0, ("it", 8, 1): 4.0})
    assert uneven.seconds("it", 4, 1) == 2.0, "between its neighbours, though 1 is nearer than 8"


def test_a_single_depth_makes_a_line_with_plain_decoding() -> None:
    alone = RoundTimes({("it", 4, 1): 2.0})
    with pytest.raises(ConfigurationError, match=r"only with 4 draft tokens .* k: \[4, 8\]"):
        alone.seconds("it", 8, 1)
    beside = RoundTimes({**alone.rounds, ("none", 0, 1): 1.0})
    assert (beside.seconds("it", 8, 1), beside.seconds("it", 4, 1), beside.seconds("it", 2, 1)) == (3.0, 2.0, 1.5)


def test_one_batch_size_does_not_predict_another() -> None:
    times = RoundTimes({("it", 4, 1): 2.0, ("none", 0, 1): 1.0})
    for drafter, k in (("it", 4), ("none", 0)):
        with pytest.raises(ConfigurationError, match=r"only at batch size 1.*batch_sizes: \[1, 4\]"):
            times.seconds(drafter, k, 4)
    with pytest.raises(ConfigurationError, match=r"expected one of it, none, .* got 'other'"):
        times.seconds("other", 1, 1)


def test_fitted_round_times_are_positive_and_non_decreasing() -> None:
    steep = RoundTimes({("it", 4, 1): 1.0, ("it", 5, 1): 9.0, ("it", 6, 1): 8.0})
    assert steep.seconds("it", 1, 1) == 0.25 and steep.seconds("it", 9, 1) == 8.0


def cell(target: str, sampling: str, drafter: str, *, k: int | None, seconds: float) -> CellResult:
    """Two prompts together, of 5 and 10 rounds, in ``seconds`` and 0.5 of prefill."""
    rows: list[dict[str, Any]] = [{"group": 0, "num_rounds": n, "per_step_drafted": [2] * n} for n in (5, 10)]
    names = {"target": target, "sampling": sampling, "drafter": drafter, "k": k, "batch_size": 2, "acceptor": "match"}
    totals = {"seconds": seconds + 0.5, "prefill_seconds": 0.5, "draft_lengths": []}
    return CellResult(f"{names}", names, rows, totals)


def trace(target: str, temperature: float) -> Trace:
    return Trace(target, "0", {"temperature": temperature}, (64,), 96, (), (), {})


def test_targets_and_samplings_are_kept_apart(tmp_path: Path) -> None:
    config = ExperimentConfig(
        targets=[{"path": "a"}, {"path": "b"}],  # type: ignore[arg-type]
        drafters=["none", "ngram"],  # type: ignore[arg-type]
        prompt_sets="x.jsonl",  # type: ignore[arg-type]
    )
    results = [
        cell("a", "greedy", "ngram", k=4, seconds=10.0),
        cell("a", "greedy", "ngram", k=4, seconds=20.0),  # another prompt set
        cell("a", "T=1", "ngram", k=4, seconds=30.0),
        cell("b", "greedy", "ngram", k=4, seconds=70.0),
        CellResult("x", {}, error="it failed"),
    ]
    path = tmp_path / "round_times.json"
    path.write_text(save_times(measured(config, results)))
    times = load_times(path)
    assert times == measured(config, results)
    for target, temperature, seconds in (("a", 0.0, 1.5), ("a", 1.0, 3.0), ("a", 0.7, 2.25), ("b", 0.0, 7.0)):
        assert times.of(trace(target, temperature)).seconds("ngram", 4, 2) == seconds
        assert times.of(trace(target, temperature)).prefill == 0.25
    with pytest.raises(ConfigurationError, match=r"expected one of a, b, .* got c"):
        times.of(trace("c", 0.0))
    with pytest.raises(ConfigurationError, match="several targets"):
        times.alone()
    for wrong, message in (
        ('{"rounds": [], "prefill": 0}', "expected a file of this version"),
        ("[]", "expected the times of rounds"),
        ("{", "expected the times of rounds"),
    ):
        path.write_text(wrong)
        with pytest.raises(TraceError, match=message):
            load_times(path)


def test_drafter_names_equal_those_of_trace_questions() -> None:
    """So that a list is timed and asked by one name, whatever the experiment calls it."""
    config = load_config(ROOT / "examples" / "experiments" / "quick.yaml")
    names = {one.label: policy_name(one, config) for one in config.drafters}
    assert names["suffix + model"] == "suffix+draft model" and names["EAGLE-3"] == "EAGLE-3"
    assert names["none"] == "none" and names["suffix"] == "suffix"
    values = {"targets": "a", "prompt_sets": "x.jsonl"}
    drafters = [
        {"name": "far", "draft": "ngram:prompt_lookup_max=6"},
        {"name": "heads", "draft": "heads"},
        {"name": "either", "draft": {"type": "choice", "drafts": ["ngram", {"path": "heads", "k": 2}]}},
        {"name": "both", "draft": ["suffix", "elsewhere"]},
    ]
    other = ExperimentConfig(**values, drafters=drafters)  # type: ignore[arg-type]
    found = [policy_name(one, other) for one in other.drafters]
    assert found == ["ngram:prompt_lookup_max=6", "heads", "choice:ngram+heads", "suffix+elsewhere"]


# ---- plans of speed: arithmetic that can be checked by hand


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
