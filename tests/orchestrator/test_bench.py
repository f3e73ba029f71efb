"""What the benchmark runs beside our own modes works on the same checkpoints; no time is looked at."""

from __future__ import annotations

import json
from pathlib import Path

from paceline import SpeculativeGenerator
from paceline.experiments import bench
from paceline.outputs import Statistics
from tests.decoder.tiny import fresh, save_pair


def test_hugging_face_takes_a_checkpoint_whose_list_of_end_ids_is_empty(tmp_path: Path) -> None:
    save_pair(tmp_path)
    for path in tmp_path.glob("*/*config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": []}))
    modes = bench._hugging_face(str(tmp_path / "target"), str(tmp_path / "draft"), 6)
    texts = {mode.name: mode.run([5, 9, 5]).tokens for mode in modes}
    ours = fresh(tmp_path / "target").sample([[5, 9, 5]], max_new_tokens=6)
    assert texts["transformers generate f32"] == texts["transformers assisted f32"] == ours[0, 3:].tolist()  # type: ignore[union-attr]
    assert all(len(text) == 6 for text in texts.values())


def test_all_modes_count_the_same_new_tokens(tmp_path: Path) -> None:
    """Rule C45: new ids, the end id included and nothing behind it, in our modes and in Hugging Face's."""
    save_pair(tmp_path)
    prompt, draft, target = [5, 9, 5], fresh(tmp_path / "draft"), fresh(tmp_path / "target")
    free = target.sample([prompt], max_new_tokens=12)[0, len(prompt) :].tolist()  # type: ignore[union-attr]
    end = free[7]
    for path in tmp_path.glob("*/*config.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": end}))
    draft, target = fresh(tmp_path / "draft"), fresh(tmp_path / "target")
    ours = [SpeculativeGenerator(source, target, k=3) for source in (None, draft, "ngram")]
    runs = [bench.generator_run(one, 12) for one in ours]
    runs += [mode.run for mode in bench._hugging_face(*(str(tmp_path / r) for r in ("target", "draft")), 12)[2:]]
    counted = [run(prompt).tokens for run in runs]
    assert counted == [free[: free.index(end) + 1]] * len(runs)


def test_a_speed_is_all_new_tokens_over_the_sum_of_the_median_times() -> None:
    """Rule C45: one slow repeat moves nothing, and a long text weighs more than a short one."""
    mode = bench.Mode("any", run=lambda row: bench.Outcome(row))
    mode.seen = [
        [bench.Outcome([1] * 10, seconds=s) for s in (2.0, 90.0, 1.0)],
        [bench.Outcome([1] * 30, seconds=s) for s in (3.0, 2.5, 50.0)],
    ]
    assert mode.tokens_per_second() == 40 / (2.0 + 3.0)
    assert "tau" not in mode.summary()


def test_acceptance_by_position_has_the_proposals_of_that_place_for_a_denominator() -> None:
    """Rule C44, as printed by the benchmark: pooled over the prompts, not a mean of means."""
    few = Statistics(
        num_rounds=2,
        num_drafts=2,
        num_draft_tokens=4,
        num_accepted_tokens=1,
        num_accepted_tokens_per_pos=[1, 0],
        num_draft_tokens_per_pos=[2, 2],
    )
    many = Statistics(
        num_rounds=8,
        num_drafts=8,
        num_draft_tokens=8,
        num_accepted_tokens=8,
        num_accepted_tokens_per_pos=[8],
        num_draft_tokens_per_pos=[8],
    )
    mode = bench.Mode("any", run=lambda row: bench.Outcome(row))
    mode.seen = [[bench.Outcome([1], one, seconds=1.0)] for one in (few, many)]
    assert mode.summary()["tau"] == 1 + 9 / 10
    assert mode.summary()["acceptance_by_position"] == [0.9, 0.0]


def test_a_text_that_ends_with_its_first_token_has_no_round_to_time() -> None:
    ended, other = Statistics(), Statistics(num_rounds=4, draft_seconds=1.0, verify_seconds=3.0)
    mode = bench.Mode("any", run=lambda row: bench.Outcome(row))
    mode.seen = [[bench.Outcome([1], one, seconds=1.0)] for one in (ended, other)]
    assert mode.summary()["ms_per_round"] == 1000.0
