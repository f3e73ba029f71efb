"""Plans of speed by arithmetic, and the parts of a round against whole rounds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.neuron import chips
from paceline.neuron.round_cost import PartTimes, round_cost
from paceline.placement.planning.instances import instance
from tests.cli.calling import call
from tests.neuron.test_round_cost import fields, setup


def test_the_parts_of_a_round_add_up_to_the_round() -> None:
    """Between the corners too: depth and slots are linear."""
    pair, chip = setup("Llama-3.2-1B", "Llama-3.2-1B", k=3), instance("inf2.48xlarge")
    verify = PartTimes(pair, chip, drafts=False, depths=(0, 3), slots=1)
    drafts = PartTimes(pair, chip, drafts=True, depths=(1, 3), slots=1)
    whole: Any = round_cost(setup("Llama-3.2-1B", "Llama-3.2-1B", k=2), chip)
    for name in ("expected", "worst"):
        time = getattr(verify.at(2, 1).plus(drafts.at(2, 1)), name) + chips.LAUNCH.value
        assert time * 1e3 == pytest.approx(whole["round"][f"{name}_ms"], rel=0.02)


def test_a_plan_by_arithmetic(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields("Llama-3.2-1B")))
    asked = ["plan-speed", "--target", tmp_path, "--draft", tmp_path, "--instance", "inf2.48xlarge", "--tp-degree", "8"]
    asked += ["--max-depth", "1"]
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
    assert unread.exit_code == 2
    assert "--batch-sizes: expected numbers from 1 on, got 'many'" in " ".join(unread.stderr.split())
    refused = call(*asked, "--acceptance", "0.9", "--verify")
    assert refused.exit_code == 2 and "--verify: expected --experiment and" in " ".join(refused.stderr.split())
    assert "--acceptance: expected --target, --draft and --acceptance" in " ".join(call(*asked).stderr.split())
