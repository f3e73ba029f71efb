"""Plans of speed: arithmetic that can be checked by hand, and the parts of a round on Neuron against whole rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.experiments.round_times import RoundTimes
from paceline.experiments.speed_plan import Candidate, LoadPlan, expected_tokens, from_rates, ranked
from paceline.neuron import engines
from paceline.neuron.round_cost import PartTimes, round_cost
from paceline.placement.planning.instances import instance
from tests.cli.calling import call
from tests.neuron.test_round_cost import fields, setup


def test_tokens_of_a_round_follow_from_the_rates() -> None:
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
def test_what_is_said_is_as_sure_as_the_figures(seconds: float, verdict: str) -> None:
    pair = Candidate("speculative", "a", 1, 1, 1.5, seconds), Candidate("plain", "", 0, 1, 1.0, 1.0)
    assert ranked(1, [(one, 0.1) for one in pair]).verdict.startswith(verdict)
    assert LoadPlan(1, (pair[1],)).verdict.startswith("do not speculate: nothing")


def test_the_parts_of_a_round_add_up_to_the_round() -> None:
    """Between the corners too: depth and slots are linear."""
    pair, chip = setup("Llama-3.2-1B", "Llama-3.2-1B", k=3), instance("inf2.48xlarge")
    verify = PartTimes(pair, chip, drafts=False, depths=(0, 3), slots=1)
    drafts = PartTimes(pair, chip, drafts=True, depths=(1, 3), slots=1)
    whole: Any = round_cost(setup("Llama-3.2-1B", "Llama-3.2-1B", k=2), chip)
    for name in ("expected", "worst"):
        time = getattr(verify.at(2, 1).plus(drafts.at(2, 1)), name) + engines.LAUNCH.value
        assert time * 1e3 == pytest.approx(whole["round"][f"{name}_ms"], rel=0.02)


def test_a_plan_by_arithmetic(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields("Llama-3.2-1B")))
    asked = ["plan-speed", "--target", tmp_path, "--draft", tmp_path, "--tp", "8", "--max-depth", "1"]
    said = call(*asked, "--acceptance", "0.9", "--json")
    assert said.exit_code == 0, said.stderr
    values = json.loads(said.stdout)
    (load,) = values["loads"]
    modes = {(one["mode"], *one["cores"]) for one in load["candidates"]}
    assert modes == {("plain", 8, 0), ("shared cores", 8, 0), ("separate cores", 8, 1), ("separate cores", 8, 8)}
    assert all(one["low"] <= one["speedup"] <= one["high"] for one in load["candidates"])
    assert values["times"] == "arithmetic, not measured"
    # The draft is as large as its target: all that a round saves is a launch, and that is not sure.
    assert load["verdict"].startswith("uncertain: shared cores: draft model, k 1, 8 cores is 1.")
    unread = call(*asked, "--acceptance", "0.9", "--batch-sizes", "many")
    assert unread.exit_code == 2 and "--batch-sizes 'many' are no numbers" in " ".join(unread.stderr.split())
    refused = call(*asked, "--acceptance", "0.9", "--verify")
    assert refused.exit_code == 2 and "it needs --experiment and --trace" in " ".join(refused.stderr.split())
    assert "needs --target, --draft and --acceptance" in " ".join(call(*asked).stderr.split())
