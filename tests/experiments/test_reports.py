"""Reports, comparisons and the formats of other tools, from results whose figures are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.core.errors import ConfigurationError
from paceline.experiments.config import cells
from paceline.experiments.measure import Bench
from paceline.experiments.questions import Policy, ask
from paceline.experiments.statistics import compare_rows, length_interval, ratio_interval
from paceline.experiments.store import CellResult, read_config, read_results
from paceline.experiments.trace import load_trace
from paceline.experiments.tuned import models_file
from paceline.placement.planning.model_specs import read_models
from tests.cli.calling import call, refused
from tests.experiments.grids import grid, save_models, save_prompts


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished experiment with traces."""
    home = tmp_path_factory.mktemp("finished")
    save_models(home)
    save_prompts(home / "prompts.jsonl")
    model = {"name": "model", "draft": str(home / "draft"), "k": [1, 3]}
    both = {"name": "one, then the other", "draft": ["suffix", str(home / "draft")]}
    file = home / "exp.yaml"
    values = grid(home, drafters=["none", "suffix", model, both], batch_sizes=[1, 2], traces=True)
    file.write_text(yaml.safe_dump(values))
    result = call("experiment", "run", file, "--out", home / "out")
    assert result.exit_code == 0, result.stderr
    return home / "out"


def test_the_report_page_loads_nothing_external(done: Path) -> None:
    page, text = (done / "report.html").read_text(), (done / "report.md").read_text()
    assert not re.search(r"(?:src|href)=\"(?!#)", page) and "<script" not in page and "@import" not in page
    for heading in (
        "Cells",
        "Acceptance by position, of all drafts",
        "Acceptance by position, of those right up to here",
        "Mean acceptance length by category",
        "Seconds by part; a draft in one graph with its target counts as verify",
    ):
        assert f"<h2>{heading}</h2><table>" in page and f"## {heading}" in text
    assert "| drafter | 1 | 2 | 3 |" in text


def test_what_if_equals_the_counts_of_the_run(done: Path) -> None:
    (trace,) = (done / "traces").glob("*.trace")
    found = json.loads(call("experiment", "whatif", trace, "--drafter", "model", "--k", "1,3", "--json").stdout)
    lines = [json.loads(line) for line in (done / "results.jsonl").read_text().splitlines()]
    for answer, k in zip(found, (1, 3), strict=True):
        rows = [row for row in lines if (row["drafter"], row["k"], row["batch_size"]) == ("model", k, 1)]
        assert answer["num_rounds"] == sum(row["num_rounds"] for row in rows)
        accepted, drafts = (sum(row[n] for row in rows) for n in ("num_accepted_tokens", "num_drafts"))
        assert answer["mean_acceptance_length"] == pytest.approx(1 + accepted / drafts)
    times = str(done / "round_times.json")
    predicted = call("experiment", "whatif", trace, "--drafter", "model", "--k", "2", "--times", times, "--json")
    assert json.loads(predicted.stdout)[0]["tokens_per_second"] > 0
    asked = ["experiment", "whatif", trace, "--drafter", "suffix+model", "--k", "3", "--times", times, "--json"]
    assert json.loads(call(*asked, "--batch-size", "2").stdout)[0]["tokens_per_second"] > 0, "a list is timed as asked"
    competing = ["experiment", "whatif", trace, "--drafter", "model", "--compete", "--times", times, "--json"]
    adaptive = json.loads(call(*competing, "--k", "auto:0,1,3", "--batch-size", "2").stdout)
    assert adaptive[0]["policy"] == "model k=0,1,3, competing" and adaptive[0]["tokens_per_second"] > 0
    assert "--compete: expected --k auto:0,2,4" in " ".join(call(*competing, "--k", "3").stderr.split())
    deep = call("experiment", "whatif", trace, "--k", "2:5", "--json")
    assert [one["policy"] for one in json.loads(deep.stdout)] == ["model k=2", "model k=3"]
    assert "left out: model k=5: k: expected at most 3, the recorded depth of model" in " ".join(deep.stderr.split())
    assert call("experiment", "whatif", trace, "--drafter", "model", "--k", "2:5").exit_code == 2, "asked for by name"
    refused("got 'choice:suffix+model'", *asked, "--drafter", "choice:suffix+model")
    refused("record one with this model", "experiment", "whatif", trace, "--target", done.parent / "draft")


def test_group_rounds_equal_those_of_the_run(done: Path) -> None:
    """The faster of two prompts that run together waits; in one call with all, the next would begin."""
    (file,) = (done / "traces").glob("*.trace")
    trace, seen = load_trace(file), set[bool]()
    policies = {"suffix": Policy(("suffix",), 2), "one, then the other": Policy(("suffix", "model"), 2)}
    for result in read_results(done):
        names = result.names
        policy = policies.get(str(names["drafter"]))
        if names["drafter"] == "model":
            policy = Policy(("model",), int(str(names["k"])))
        if policy is None or names["batch_size"] != 2:
            continue
        groups = [[row["num_rounds"] for row in result.rows if row["group"] == number] for number in (0, 1)]
        grouped = ask(trace, policy, batch_size=2, grouped=True).replayed
        assert len(grouped.rounds) == sum(map(max, groups))
        assert [one.num_rounds for one in grouped.requests] == [*groups[0], *groups[1]]
        seen.add(len(ask(trace, policy, batch_size=2).replayed.rounds) < len(grouped.rounds))
    assert True in seen, "it makes a difference here"


@pytest.mark.parametrize("layout", ["spec-bench", "aiperf", "vllm"])
def test_exports_have_the_rows_of_the_run(done: Path, tmp_path: Path, layout: str) -> None:
    assert call("experiment", "export", done, layout, "--out", tmp_path).exit_code == 0
    files = sorted(tmp_path.iterdir())
    assert len(files) == 10
    if layout == "vllm":
        assert all("vllm:spec_decode_num_drafts_total{" in file.read_text() for file in files)
        return
    rows = [json.loads(line) for line in files[0].read_text().splitlines()]
    assert len(rows) == 4
    if layout == "spec-bench":
        choice = rows[0]["choices"][0]
        assert choice["turns"][0] and sum(choice["accept_lengths"]) + 1 >= choice["new_tokens"][0]
        return
    for record in (row["spec_decode_acceptance"] for row in rows):
        drafts = [(d, a) for d, a in zip(record["per_step_drafted"], record["per_step_accepted"], strict=True) if d]
        assert sum(record["acceptance_histogram"].values()) == record["num_spec_steps"] == len(drafts)
        accepted = sum(a for _, a in drafts) / max(1, len(drafts))
        assert record["mean_acceptance_length"] == pytest.approx(1 + accepted)


def rows(values: list[float]) -> list[dict[str, Any]]:
    return [{"prompt": str(i), "seconds": 1.0, "new_tokens": v} for i, v in enumerate(values)]


def test_a_paired_test_detects_only_real_differences() -> None:
    a = rows([10.0, 20, 30, 40, 50, 60, 70, 80])
    better = rows([11.0, 21, 31, 41, 51, 61, 71, 81])
    seen = compare_rows(a, better, "tokens_per_second")
    assert seen.difference.value == pytest.approx(1) and seen.p_value == pytest.approx(2 / 2**8)
    none = compare_rows(a, rows([11.0, 19, 31, 39, 51, 59, 71, 79]), "tokens_per_second")
    assert none.difference.value == 0 and none.p_value == 1
    with pytest.raises(ConfigurationError, match="no prompt in common"):
        compare_rows(a, [{"prompt": "x"}], "seconds")


def test_prompts_of_one_batch_are_one_unit_of_timing() -> None:
    """Their seconds are the same, so that more of them are no more evidence."""
    many = [{**row, "group": index // 2, "num_drafts": index} for index, row in enumerate(rows([10.0] * 8))]
    faster = [{**row, "seconds": 0.5, "num_drafts": row["num_drafts"] + 1} for row in many]
    speed = compare_rows(many, faster, "tokens_per_second")
    assert (speed.prompts, speed.units, speed.first, speed.second) == (8, 4, 20.0, 40.0)
    assert speed.p_value == pytest.approx(2 / 2**4)
    counts = compare_rows(many, faster, "num_drafts")
    assert counts.units == 8 and counts.p_value == pytest.approx(2 / 2**8)


def test_intervals_contain_their_figure() -> None:
    one = ratio_interval([1.0, 2, 3, 4], [1.0, 1, 1, 1])
    assert one.low < one.value == 2.5 < one.high
    assert length_interval([{"num_accepted_tokens": 0, "num_drafts": 0}]).value == 1.0
    assert CellResult("k", {}).error is None


def test_compare_reports_differences_of_two_runs(done: Path) -> None:
    same = json.loads(call("experiment", "compare", done, done, "--json").stdout)
    assert len(same) == 10 and all(one["difference"] == 0 and one["p_value"] == 1 for one in same)
    assert call("experiment", "compare", done, done, "--figure", "beauty").exit_code == 2


def test_a_failing_run_writes_no_models_file(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise ConfigurationError("no such luck")

    (trace,) = (done / "traces").glob("*.trace")
    file = tmp_path / "tuned.yaml"
    monkeypatch.setattr(Bench, "measure", failing)
    asked = ["plan-speed", "--experiment", done, "--trace", trace, "--out", file]
    failed = call(*asked, "--verify")
    assert failed.exit_code == 2 and "no such luck" in failed.stderr and not file.exists()
    untimed = call(*asked, "--batch-sizes", "3")
    assert untimed.exit_code == 0 and file.exists(), "on the line through 1 and 2"
    assert call(*asked, "--batch-sizes", "0").exit_code == 2
    assert "--batch-sizes: expected one with --out, got 2" in call(*asked, "--batch-sizes", "1,2").stderr


def test_the_fastest_is_written_as_what_serve_reads(done: Path, tmp_path: Path) -> None:
    (trace,) = (done / "traces").glob("*.trace")
    file = tmp_path / "tuned.yaml"
    asked = ["plan-speed", "--experiment", done, "--trace", trace, "--out", file, "--json"]
    (load,) = json.loads(call(*asked).stdout.splitlines()[-1])["loads"]
    tried = load["candidates"]
    seen = {(one["drafter"], one["k"]) for one in tried}
    assert {("", None), ("model", 1), ("model", 3)} <= seen
    assert {("suffix", 4), ("suffix+model", 4)} <= seen, "lists and text drafters too"
    plan = call("plan", file, "--instance", "cpu")
    assert plan.exit_code == 0, plan.stderr


def test_a_plan_of_speed_is_made_of_measured_times_and_run(done: Path) -> None:
    (trace,) = (done / "traces").glob("*.trace")
    asked = ["plan-speed", "--experiment", done, "--max-depth", "3", "--json"]
    found = json.loads(call(*asked, "--trace", trace, "--batch-sizes", "1,2", "--verify").stdout.splitlines()[-1])
    assert [one["batch_size"] for one in found["loads"]] == [1, 2] and found["times"] == "measured"
    for load in found["loads"]:
        speeds = [one["tokens_per_second"] for one in load["candidates"]]
        assert speeds == sorted(speeds, reverse=True) and load["best"] == load["candidates"][0]
        assert any(one["mode"] == "plain" and one["speedup"] == 1 for one in load["candidates"])
        assert all(one["low"] <= one["speedup"] <= one["high"] for one in load["candidates"])
    assert len(found["verified"]) == 4 and all(one["measured"] > 0 for one in found["verified"])
    rated = json.loads(call(*asked, "--acceptance", "0.5,0.25", "--drafter", "model").stdout)["loads"][0]["candidates"]
    assert {one["k"]: one["tokens_per_round"] for one in rated} == {0: 1.0, 1: 1.5, 2: 1.625, 3: 1.65625}
    for wrong, message in (
        (["--acceptance", "2", "--drafter", "model"], "--acceptance: expected numbers from 0 to 1, got '2'"),
        (["--acceptance", "0.5"], "expected one of model, suffix, suffix+model with --acceptance, got none"),
        ([], "--acceptance: expected either --trace or --acceptance, got neither"),
        (["--acceptance", "0.5", "--drafter", "other"], "got 'other'"),
        (["--acceptance", "0.5", "--drafter", "model", "--verify"], "--verify: expected --experiment and --trace"),
        (["--trace", trace, "--target", done.parent / "target"], "expected --experiment for measured times"),
    ):
        refused(message, *asked, *wrong)


@pytest.mark.parametrize(
    "policy", [Policy(("model",), 2), Policy(("suffix", "model"), 3), Policy(("suffix",), 2), Policy(())]
)
def test_models_files_of_every_drafter_are_written(done: Path, tmp_path: Path, policy: Policy) -> None:
    config, file = read_config(done), tmp_path / "tuned.yaml"
    file.write_text(models_file(config, policy, next(cells(config))))
    (model,) = read_models(file)
    assert model.speculative.k == policy.k and len(model.speculative.draft) == len(policy.drafters)
