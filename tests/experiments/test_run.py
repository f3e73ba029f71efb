"""Experiments: refused before work starts, finished cells kept, failing cells isolated, every layout of prompts
read.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.core.errors import CheckpointError, ConfigurationError, ContextError, PromptError, StorageError
from paceline.experiments import report, runner
from paceline.experiments.config import ExperimentConfig, PromptSet, load_config, parse_config
from paceline.experiments.prompts import load_prompts, read_prompts
from paceline.experiments.questions import Policy, ask
from paceline.experiments.record_traces import record_traces
from paceline.experiments.store import Store, read_results
from paceline.experiments.trace import load_trace
from paceline.text.tokenizer import load_tokenizer
from tests.cli.calling import call, last
from tests.experiments.grids import grid, save_models, save_prompts
from tests.full_disk import full_disk


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_models(folder)
    save_prompts(folder / "prompts.jsonl")
    return folder


def silent(label: str, done: int, total: int) -> None:
    """Ignore all progress."""


def run(values: dict[str, Any], out: Path) -> list[Any]:
    store = Store(out)
    return runner.run(runner.plan(ExperimentConfig(**values), store), store, silent)


def test_a_grid_has_every_cell_with_provenance_and_the_tokens_of_plain_decoding(home: Path, tmp_path: Path) -> None:
    drafters = ["none", {"name": "model", "draft": str(home / "draft"), "k": 3}]
    values = grid(home, drafters=drafters, batch_sizes=[1, 2], samplings={"temperature": 1, "top_p": 0.9})
    results = run(values, tmp_path)
    assert len(results) == 2 * 2 and not runner.failed(results)
    drafted = [row for result in results if result.names["drafter"] != "none" for row in result.rows]
    assert all(row["same_tokens_as_plain"] for row in drafted)
    by_batch = {
        size: [row["tokens"] for r in results if r.names["batch_size"] == size for row in r.rows] for size in (1, 2)
    }
    assert by_batch[1] == by_batch[2]  # a prompt's seed does not depend on the batch size
    report.write_rows(tmp_path, results)
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert len(lines) == 4 * 4 and all(line["torch"] and line["time"] and line["machine"] for line in lines)
    parquet = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "results.parquet").to_pylist()
    assert [row["per_step_accepted"] for row in parquet] == [line["per_step_accepted"] for line in lines]
    assert [result.key for result in read_results(tmp_path)] == [result.key for result in results]


def test_only_failed_cells_run_again(home: Path, tmp_path: Path) -> None:
    values = grid(home, drafters=["none", {"draft": str(home / "draft"), "k": [3, 500]}])
    results = run(values, tmp_path)
    assert [result.error is None for result in results] == [True, True, False]
    assert "verified tokens (k + 1), got 501" in str(results[2].error)
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    again = run({**values, "name": "other"}, tmp_path)
    changed = {path.name for path in (tmp_path / "cells").iterdir() if path.stat().st_mtime_ns != times[path.name]}
    assert changed == {f"{results[2].key}.json"} and [r.rows for r in again] == [r.rows for r in results]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"drafter": ["none"]}, ConfigurationError, "drafter"),
        ({"drafters": ["nogram:k=2"]}, CheckpointError, "nogram"),
        ({"targets": "no/such/model"}, CheckpointError, "no/such/model"),
        ({"acceptors": ["mtach"]}, ConfigurationError, "mtach"),
        ({"k": -1}, ConfigurationError, "^exp.yaml: k: expected a number from 0 on"),
        ({"max_new_tokens": 500}, ContextError, "n_positions: expected at most"),
        ({"prompt_sets": "no/such/file.jsonl"}, PromptError, "file.jsonl"),
        ({"samplings": [{"temprature": 1}]}, ConfigurationError, "temprature"),
        ({"drafters": ["ngram", "none", "ngram"]}, ConfigurationError, "'ngram' twice; give each a different `name`$"),
        ({"samplings": [{"temperature": 0}, {"top_k": 3}]}, ConfigurationError, "samplings: .*'greedy' twice"),
    ],
)
def test_bad_input_is_rejected_by_name_before_work_starts(
    home: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    values = grid(home, **changes)
    with pytest.raises(error, match=message):
        runner.plan(parse_config(values, "exp.yaml"), Store(tmp_path))
    assert not list(tmp_path.glob("cells/*.json"))


def test_a_full_disk_is_a_named_error_and_keeps_finished_cells(home: Path, tmp_path: Path) -> None:
    values = grid(home, drafters=["none", "suffix"])
    run(grid(home, drafters=["none"]), tmp_path)
    kept = sorted(path.name for path in (tmp_path / "cells").iterdir())
    store = Store(tmp_path)
    planned = runner.plan(ExperimentConfig(**values), store)
    with full_disk(room=500), pytest.raises(StorageError, match="cannot be written"):
        runner.run(planned, store, silent)
    assert sorted(path.name for path in (tmp_path / "cells").iterdir()) == kept
    assert not runner.failed(run(values, tmp_path))
    with full_disk(room=1_000), pytest.raises(StorageError):
        Store(tmp_path / "other")


CHILD = """
import sys
from pathlib import Path
import torch
from paceline.experiments import runner
from paceline.experiments.config import load_config
from paceline.experiments.store import Store
torch.set_num_threads(1)
config = load_config(Path(sys.argv[1]))
import os
store = Store(Path(sys.argv[2]))  # once here, so that whatever is imported and made at first use is there
runner.run(runner.plan(config, store), store, lambda *_: None)
for line in sys.stdin:
    if os.fork() == 0:
        store = Store(Path(line.strip()))
        runner.run(runner.plan(config, store), store, lambda *_: None)
        os._exit(0)
    print(flush=True)
"""


def test_killed_at_random_points_it_loses_no_finished_cell(home: Path, tmp_path: Path) -> None:
    """SIGKILL, 20 times: while it starts, or a little after one or two more cells, however slow the machine is. Where
    all is done, another folder begins. A child that has loaded everything, and run it once, is forked for every try,
    or starting would take all the time.
    """
    values = grid(home, k=[1, 2, 3], drafters=["none", "suffix", "ngram"], baseline=False, max_new_tokens=3)
    file, number = tmp_path / "exp.yaml", 0
    file.write_text(yaml.safe_dump(values))
    dice, kept, cut = random.Random(5), dict[str, bytes](), 0
    command = [sys.executable, "-c", CHILD, str(file), str(tmp_path / "before")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as mother:
        assert mother.stdin is not None and mother.stdout is not None
        for _ in range(20):
            out = tmp_path / f"out{number}"
            mother.stdin.write(f"{out}\n")
            mother.stdin.flush()
            mother.stdout.readline()
            more = dice.choice((0, 1, 1, 2))
            end = time.monotonic() + 60
            while len(list((out / "cells").glob("*.json"))) < min(CELLS, len(kept) + more):
                assert time.monotonic() < end, "no cell is finished"
                time.sleep(0.001)
            time.sleep(dice.uniform(0.0, 0.02 if more else 0.2))
            for child in Path(f"/proc/{mother.pid}/task/{mother.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            now = {path.name: path.read_bytes() for path in (out / "cells").glob("*.json")}
            assert kept.items() <= now.items(), "a finished cell was lost or done again"
            cut += len(kept) < len(now) < CELLS
            kept, number = (now, number) if len(now) < CELLS else ({}, number + 1)
        assert cut, "never killed with some cells done and some not"
        store = Store(tmp_path / f"out{number}")
        whole = runner.plan(load_config(file), store)
        assert sum(one.finished for one in whole.cells) == len(kept)
        results = runner.run(whole, store, silent)
    assert len(results) == CELLS and not runner.failed(results)
    assert kept.items() <= {path.name: path.read_bytes() for path in (store.folder / "cells").glob("*.json")}.items()


CELLS = 7
"""Plain decoding, and two drafters at three depths."""


LAYOUTS: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "jsonl": ("jsonl", [{"prompt": "a b", "category": "x", "id": "1"}]),
    "messages": ("jsonl", [{"id": "1", "category": "x", "messages": [{"role": "user", "content": "a b"}]}]),
    "spec-bench": ("spec-bench", [{"question_id": 1, "category": "x", "turns": ["a b", "more"]}]),
    "speed-bench": (
        "speed-bench",
        [{"question_id": "1", "category": "x", "sub_category": "y", "turns": ["a b"], "multiturn": False}],
    ),
    "aiperf single turn": ("aiperf", [{"text": "a b", "category": "x", "id": "1"}]),
    "aiperf texts": ("aiperf", [{"texts": ["a b", "c"], "category": "x", "id": "1"}]),
    "aiperf multi turn": ("aiperf", [{"session_id": "1", "category": "x", "turns": [{"text": "a b"}, {"text": "c"}]}]),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("automatic", [False, True])
def test_every_layout_of_prompts_is_read(name: str, automatic: bool, tmp_path: Path) -> None:
    layout, rows = LAYOUTS[name]
    file = tmp_path / "x.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    (read,) = read_prompts(file, "auto" if automatic else layout)  # type: ignore[arg-type]
    assert (read.key, read.category, read.messages[-1]["content"]) == ("1", "x", "a b")


def test_learning_drafters_start_empty_in_every_measurement(home: Path, tmp_path: Path) -> None:
    """Unmeasured runs and repeats leave nothing in a drafter: a run counts what a new drafter would."""
    learning = "suffix:max_cached_tokens=4000,min_match=1"
    values = grid(home, drafters=[learning], batch_sizes=[1, 2], repeats=2, baseline=False, traces=True)
    config, store = ExperimentConfig(**values), Store(tmp_path)
    planned = runner.plan(config, store)
    results = runner.run(planned, store, silent)
    (file,) = record_traces(planned, store, silent)
    trace = load_trace(file)
    for result, size in zip(results, (1, 2), strict=True):
        answer = ask(trace, Policy((learning,), 2), batch_size=size, grouped=True)
        assert [one.num_rounds for one in answer.replayed.requests] == [row["num_rounds"] for row in result.rows]
        assert answer.acceptance.num_accepted_tokens == sum(row["num_accepted_tokens"] for row in result.rows)


def test_a_damaged_listing_or_cell_names_the_remedy(home: Path, tmp_path: Path) -> None:
    (result,) = run(grid(home, drafters=["none"], baseline=False, max_new_tokens=2), tmp_path)
    (tmp_path / "experiment.json").write_text("{")
    with pytest.raises(ConfigurationError, match="writes it and keeps finished cells"):
        read_results(tmp_path)
    (tmp_path / "cells" / f"{result.key}.json").write_text('{"version": 1, "key": "x"}')
    with pytest.raises(StorageError, match="remove it to run the cell again"):
        Store(tmp_path).load(result.key)


def test_files_without_text_are_rejected(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 0, "input_length": 100, "output_length": 5}\n')
    with pytest.raises(PromptError, match="lengths without text"):
        list(read_prompts(file))


def test_suspicious_prompts_cause_warnings(home: Path, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer(home / "target")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"turns": ["<|im_start|>" + "~z{" * 20, "later"], "category": "x"}))
    said = " ".join(load_prompts(PromptSet(path=str(file), layout="spec-bench"), tokenizer, 96).warnings)
    for part in ("further turns", "put into the target's as well", "splits into 7 tokens", "random tokens"):
        assert part in said
    file.write_text('{"prompt": "&*&*"}\n')
    (unsure,) = load_prompts(PromptSet(path=str(file)), tokenizer, 96).warnings
    assert "set chat: true, or chat: false if that is meant" in unsure
    assert load_prompts(PromptSet(path=str(file), chat=False), tokenizer, 96).warnings == ()
    tokenizer.chat_template = None
    assert load_prompts(PromptSet(path=str(home / "prompts.jsonl")), tokenizer, 96).warnings == ()


def test_the_command_writes_results_and_keeps_cells_of_another_commit_with_a_warning(
    home: Path, tmp_path: Path
) -> None:
    file, out = tmp_path / "exp.yaml", tmp_path / "out"
    file.write_text(yaml.safe_dump(grid(home, drafters=["none", "suffix"])))
    dry: dict[str, Any] = last(call("experiment", "run", file, "--dry-run", "--json"))
    assert len(dry["cells"]) == 2 and not out.exists() and dry["estimated_seconds"] >= 0
    for _ in range(2):
        done = call("experiment", "run", file, "--out", out, "--json")
        assert "another version" not in done.stderr
        found: dict[str, Any] = last(done)
        assert found["failed"] == 0 and found["cells"][1]["texts_unlike_plain"] == 0
    cell = next((out / "cells").glob("*.json"))
    values = json.loads(cell.read_text())
    values["provenance"]["git_commit"] = "0123abc"
    cell.write_text(json.dumps(values))
    said = " ".join(call("experiment", "run", file, "--out", out, "--json").stderr.split())
    assert "finished cells were made by another version: 1 by paceline" in said and "commit 0123abc" in said
    assert "to run all again, name another folder or remove" in said
    assert json.loads(cell.read_text()) == values
