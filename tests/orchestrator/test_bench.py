"""Other modes that the benchmark runs work on the same checkpoints; no time is checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from paceline.experiments import bench, measure
from paceline.experiments.config import ExperimentConfig
from paceline.experiments.measure import Timed
from paceline.experiments.prompts import Prompt, Prompts
from paceline.outputs import RequestOutput, Statistics
from tests.decoder.tiny import fresh, save_pair

PROMPT = (5, 9, 5)


def prompts(*rows: tuple[int, ...]) -> Prompts:
    return Prompts("own", tuple(Prompt(str(n), "", row) for n, row in enumerate(rows)), ())


def ended_by(folder: Path, end: object) -> None:
    for path in folder.glob("*/*config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": end}))


def test_hugging_face_accepts_an_empty_list_of_end_ids(tmp_path: Path) -> None:
    save_pair(tmp_path)
    ended_by(tmp_path, [])
    engines = bench.hugging_face(str(tmp_path / "target"), str(tmp_path / "draft"), 6)
    texts = {name: engine([*PROMPT]) for name, engine in engines}
    ours = fresh(tmp_path / "target").sample([[*PROMPT]], max_new_tokens=6)
    assert texts["transformers generate f32"] == texts["transformers assisted f32"] == ours[0, 3:].tolist()  # type: ignore[union-attr]
    assert all(len(text) == 6 for text in texts.values())


def test_all_modes_count_the_same_new_tokens(tmp_path: Path) -> None:
    """Rule C45: new ids, the end id included and nothing after it, in our modes and in Hugging Face's."""
    save_pair(tmp_path)
    target = fresh(tmp_path / "target")
    free = target.sample([[*PROMPT]], max_new_tokens=12)[0, len(PROMPT) :].tolist()  # type: ignore[union-attr]
    ended_by(tmp_path, free[7])
    drafters = [{"name": "plain", "draft": "none"}, {"draft": str(tmp_path / "draft"), "k": 3}, "ngram"]
    load = {"max_new_tokens": 12, "backend": "eager", "amp": "f32"}
    values = {"targets": str(tmp_path / "target"), "drafters": drafters, "prompt_sets": "own", **load}
    found = bench.run_cells(ExperimentConfig.model_validate(values), prompts(PROMPT))
    for name, engine in list(bench.hugging_face(*(str(tmp_path / role) for role in ("target", "draft")), 12))[2:]:
        found[name] = bench.run_engine(engine, prompts(PROMPT), found["plain"])
    assert len(found) == 5
    assert all(rows[0]["tokens"] == free[: free.index(free[7]) + 1] for rows in found.values())
    assert not any(bench.figures(rows)["texts_unlike_plain"] for rows in found.values())


def row(group: int, **figures: Any) -> dict[str, Any]:
    steps = {"per_step_drafted": [], "per_step_accepted": [], "num_rounds": 0, "round_seconds": 0.0, "group_rounds": 0}
    times = {"seconds": 1.0, "prefill_seconds": 0.0, "plain_seconds": 3.0, "plain_prefill_seconds": 1.0}
    return {"group": group, "new_tokens": 1, "same_tokens_as_plain": True, **steps, **times, **figures}


def test_a_speed_is_all_new_tokens_over_the_sum_of_the_times_of_groups() -> None:
    """Rule C45: a long text weighs more than a short one, and prompts of one group share its time."""
    rows = [row(0, new_tokens=10, seconds=2.0), row(1, new_tokens=25, seconds=3.0), row(1, new_tokens=5, seconds=3.0)]
    found = bench.figures(rows)
    assert found["tokens_per_second"] == 40 / (2.0 + 3.0) and found["over_plain"] == 6 / 5
    assert found["decode_over_plain"] == 4 / 5 and "tau" not in found
    assert bench.figures([row(0, same_tokens_as_plain=False), row(1)])["texts_unlike_plain"] == 1
    plain = {"plain_seconds": None, "plain_prefill_seconds": None, "same_tokens_as_plain": None}
    assert bench.figures([row(0, **plain)])["over_plain"] == bench.figures([row(0, **plain)])["decode_over_plain"] == 1


def test_one_slow_repeat_changes_no_result() -> None:
    """Rule C45."""
    runs = [Timed([[RequestOutput(0, (1,), 0, "length")]], seconds, 0.5, Statistics()) for seconds in (2.0, 90.0, 1.0)]
    (found,) = measure._rows([Prompt("0", "", PROMPT)], runs, runs[:1], number=0)
    assert (found["seconds"], found["plain_seconds"]) == (2.0, 2.0)


def test_acceptance_by_position_is_divided_by_the_proposals_at_it() -> None:
    """Rule C44, as printed by the benchmark: pooled over the prompts, not a mean of means."""
    few = row(0, num_rounds=2, group_rounds=2, per_step_drafted=[2, 2], per_step_accepted=[1, 0])
    many = row(1, num_rounds=8, group_rounds=8, per_step_drafted=[1] * 8, per_step_accepted=[1] * 8)
    found = bench.figures([few, many])
    assert found["tau"] == 1 + 9 / 10
    assert found["acceptance_by_position"] == [0.9, 0.0]


def test_a_text_of_one_token_has_no_timed_round() -> None:
    found = bench.figures([row(0), row(1, num_rounds=4, group_rounds=4, round_seconds=4.0)])
    assert found["ms_per_round"] == 1000.0
