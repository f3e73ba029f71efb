"""Traces of an experiment: all texts at the same time, a file after every drafter, and only changed ones recorded
again.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigurationError, TraceError
from paceline.experiments import record_traces, runner, trace
from paceline.experiments.config import ExperimentConfig, parse_config
from paceline.experiments.questions import Policy, ask, chain_policies, regret
from paceline.experiments.store import Store
from paceline.experiments.trace import load_trace
from paceline.experiments.tuned import verifying
from paceline.registry import DRAFTERS
from tests.cli.calling import call
from tests.decoder.tiny import Workshop
from tests.docs.pages import ROOT
from tests.experiments.grids import grid, save_models, save_prompts, save_tokenizer
from tests.workers.folders import KINDS, drafts, save_heads


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A target, and two drafters that are of equal files until one is changed."""
    torch.set_num_threads(1)
    save_models(tmp_path)
    save_prompts(tmp_path / "prompts.jsonl", 5)
    shutil.copytree(tmp_path / "draft", tmp_path / "other")
    return tmp_path


def traced(home: Path, names: tuple[str, ...] = ("draft", "other"), **changes: Any) -> ExperimentConfig:
    drafters = ["suffix", *({"name": name, "draft": str(home / name), "k": 3} for name in names)]
    values = grid(home, drafters=drafters, traces=True, runs=False, batch_sizes=2, samplings={"temperature": 1})
    return ExperimentConfig(**{**values, **changes})


def record(config: ExperimentConfig, out: Path, **options: Any) -> tuple[list[Path], list[str]]:
    """-> the files that are complete, and the drafters that were recorded now"""
    store, seen = Store(out), list[str]()
    plan = runner.plan(config, store)
    files = record_traces.record_traces(plan, store, lambda label, *_: seen.append(label), **options)
    return files, [label.partition("+ ")[2].partition(" ")[0] for label in seen]


def perturb(folder: Path) -> None:
    """Other weights of the same shapes."""
    (file,) = folder.glob("*.safetensors")
    save_file({name: value.flip(0).contiguous() for name, value in load_file(file).items()}, file)


def test_only_missing_or_changed_traces_are_recorded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out = traced(home), home / "out"
    clock: Iterator[float] = iter([0.0, 2.0])
    with monkeypatch.context() as patch:
        patch.setattr(record_traces, "monotonic", lambda: next(clock))
        assert record(config, out, deadline=1.0) == ([], ["draft"])
    (path,) = (out / "traces").iterdir()
    assert [one.name for one in load_trace(path).drafters] == ["draft"], "a file after every drafter"
    assert record(config, out) == ([path], ["other"])
    assert record(config, out) == ([path], [])
    whole = load_trace(path)
    ours, theirs = whole.drafters
    assert ours.proposals == theirs.proposals, "beside the target, or along the texts that are known"
    perturb(home / "other")
    assert record(config, out) == ([path], ["other"])
    changed = load_trace(path)
    assert changed.texts == whole.texts and changed.drafters[0] == ours
    assert changed.drafters[1].key != theirs.key and changed.drafters[1].proposals != theirs.proposals
    assert record(traced(home, ("other",)), out) == ([path], [])
    assert load_trace(path).drafters == changed.drafters[1:], "what is not in the experiment any more is not in it"
    (longer,), _ = record(traced(home, ("other",), max_new_tokens=7), out)
    assert longer != path, "other texts, another file"
    assert not list((out / "cells").iterdir()), "no cell was run"


def test_recorded_texts_do_not_depend_on_the_batch_size(home: Path) -> None:
    """5 texts, one at a time, and in groups of 2 with a single last one. They end at different places."""
    found = []
    for size in (1, 2):
        (path,), _ = record(traced(home, ("draft",), batch_sizes=size), home / str(size))
        found.append(load_trace(path))
    assert found[0].texts == found[1].texts and len(found[0].texts) == 5
    assert found[0].drafters[0].proposals == found[1].drafters[0].proposals


def test_a_trace_of_an_older_version_is_recorded_again(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out = traced(home, ("draft",)), home / "out"
    with monkeypatch.context() as patch:
        patch.setattr(trace, "VERSION", trace.VERSION - 1)
        (path,), _ = record(config, out)
    with pytest.raises(TraceError, match="of version"):
        load_trace(path)
    assert record(config, out) == ([path], ["draft"])
    assert len(load_trace(path).drafters) == 1


def test_a_trace_of_another_experiment_is_rejected_by_name(home: Path) -> None:
    few = save_prompts(home / "few.jsonl", 2)
    config = traced(home, ("draft",), prompt_sets=[str(home / "prompts.jsonl"), str(few)])
    policy = Policy(("draft",), 2)
    files, _ = record(config, home / "out")
    (short,) = (one for one in map(load_trace, files) if len(one.texts) == 2)
    own = verifying(config, replace(short, sampling={"temperature": 0.5}), policy, batch_size=1)
    assert own.samplings[0].temperature == 0.5 and own.k == (2,), "the trace's sampling, not the experiment's"
    assert [one.path for one in own.prompt_sets] == [str(few)], "and its prompts alone"
    for wrong, message in (
        ({"target": "somebody"}, "expected one of target, .* got one of somebody"),
        ({"fingerprint": "0"}, "record one with this model"),
        ({"texts": short.texts[:1]}, "the experiment's prompts .prompts, few."),
    ):
        with pytest.raises(TraceError, match=message):
            verifying(config, replace(short, **wrong), policy, batch_size=1)  # type: ignore[arg-type]


def test_a_drafter_that_fails_to_record_keeps_the_texts(home: Path) -> None:
    """And the report of the cells is written, in which it failed too."""
    file, out = home / "exp.yaml", home / "out"
    drafters = [{"name": "far", "draft": str(home / "draft"), "k": 500}]
    file.write_text(yaml.safe_dump(grid(home, drafters=drafters, traces=True, baseline=False)))
    done = call("experiment", "run", file, "--out", out)
    assert done.exit_code == 1 and "verified tokens (k + 1), got 501" in " ".join(done.stderr.split())
    assert "verified tokens (k + 1), got 501" in (out / "report.md").read_text()
    (path,) = (out / "traces").iterdir()
    assert not load_trace(path).drafters
    assert ask(load_trace(path), Policy(("suffix",), 3)).acceptance.num_rounds > 0


ANEW = {
    "none": "none", "ngram": "ngram:prompt_lookup_max=3,k=3", "suffix": "suffix:min_match=1,k=3",
    "fallback": "ngram+model", "choice": "choice:ngram+model",
}  # fmt: skip
"""What `whatif` is asked where nothing is recorded: it runs the drafter, or combines recorded ones."""
REJECTED = {
    "none": "expected a recorded one .*or a text drafter, got 'none'",
    "function": "expected text in the file of an experiment, got an object",
    "remote": "expected one of none, ngram, .* got 'remote'",
}
FEW = {"suffix", "model", "eagle", "dflash", "choice", *REJECTED}
"""What `make test` asks."""


@pytest.mark.parametrize("kind", [pytest.param(x, marks=() if x in FEW else pytest.mark.full) for x in DRAFTERS])
def test_what_if_answers_for_every_kind_of_drafter(workshop: Workshop, tmp_path: Path, kind: str) -> None:
    """With the counts of the run. Plain decoding has none, and others than a file can name are rejected by name."""
    for role in ("target", "draft"):
        shutil.copytree(workshop.checkpoint(role, KINDS.get(kind, "grouped")), tmp_path / role)
        save_tokenizer(tmp_path / role, first=7 * (kind == "retokenizing" and role == "draft"))
    save_heads(tmp_path / "target", tmp_path)
    save_prompts(tmp_path / "prompts.jsonl", 2)
    own = str(tmp_path / "draft")
    made: dict[str, dict[str, object]] = {
        "fallback": {"draft": ["ngram", own]},
        "choice": {"draft": {"type": "choice", "drafts": ["ngram", own], "choose_by": "length"}},
        "retokenizing": {"draft": own, "vocabulary": "retokenize"},
        "function": {"draft": list},
        "remote": {"draft": "remote"},
    }
    asked = made.get(kind) or {"draft": drafts(tmp_path / "draft", tmp_path)[kind]}
    others = [{"name": "model", "draft": own}] if kind in ("fallback", "choice") else []
    values = grid(tmp_path, drafters=[{"name": "it", **asked}, *others], traces=True, baseline=False)
    if kind in ("function", "remote"):
        with pytest.raises(ConfigurationError, match=REJECTED[kind]):
            parse_config(values, "the file")
        return
    config, store = parse_config(values, "the file"), Store(tmp_path / "out")
    (path,), _ = record(config, store.folder)
    recorded = [one.name for one in load_trace(path).drafters]
    assert recorded == ([one["name"] for one in others] if kind in ANEW else ["it"])
    answer = call("experiment", "whatif", path, "--draft", ANEW.get(kind, "it"), *["--k", 2] * bool(others), "--json")
    if kind == "none":
        assert answer.exit_code == 2 and re.search(REJECTED[kind], " ".join(answer.stderr.split()))
        return
    cells = runner.run(runner.plan(config, store), store, lambda *_: None)
    rows = [row for cell in cells if cell.names["drafter"] == "it" for row in cell.rows]
    (found,) = json.loads(answer.stdout)
    rounds, each, accepted = (sum(row[x] for row in rows) for x in ("num_rounds", "num_drafts", "num_accepted_tokens"))
    assert [found["num_rounds"], found["num_drafts"]] == [rounds, each] and each
    assert found["mean_acceptance_length"] == 1 + accepted / each


def test_regret_of_a_choice_is_reported(home: Path) -> None:
    perturb(home / "other")
    (path,), _ = record(traced(home), home / "out")
    whole = load_trace(path)
    assert list(chain_policies(whole, 2)) == ["draft", "other", "suffix", "ngram"]
    found = regret(whole, k=2)
    rounds = {name: ask(whole, Policy((name,), 2)).acceptance.num_rounds for name in found.fixed}
    best, worst = min(rounds.values()), max(rounds.values())
    choice = ask(whole, Policy.parse("choice:draft+other+suffix+ngram", 2)).acceptance.num_rounds
    assert found.perfect.num_rounds <= best < worst and rounds[found.best] == best
    said = json.loads(call("experiment", "regret", path, "--k", "2", "--json").stdout)
    assert said == found.to_dict() and said["rounds"] == {**rounds, "choice": choice}
    assert said["regret_against_best_fixed"] == choice / best - 1
    assert said["regret_against_worst_fixed"] == choice / worst - 1
    shown = call("experiment", "regret", path, "--drafter", "draft", "--drafter", "ngram", "--k", "3")
    assert shown.exit_code == 0 and "the choice: " in shown.stdout
    alone = call("experiment", "regret", path, "--drafter", "draft")
    assert alone.exit_code == 2 and "at least two" in alone.stderr


def test_study_figures_come_from_the_trace(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a folder as scripts/study leaves it to every table of docs/study.md."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import study_figures
    import study_tables

    perturb(home / "other")
    (path,), _ = record(traced(home), home / "build" / "study-counts")
    values = grid(home, acceptors=["match", "reject"], drafters={"name": "draft", "draft": str(home / "draft"), "k": 3})
    store = Store(home / "build" / "study-rules")
    runner.run(runner.plan(ExperimentConfig(**values), store), store, lambda *_: None)
    figures = json.loads(json.dumps(study_figures.collect(home / "build")))
    (one,) = figures["traces"]
    whole, before = load_trace(path), Policy(("suffix", "draft"), study_figures.DEPTH)
    assert one["drafters"]["suffix, then draft"]["rounds"] == ask(whole, before).acceptance.num_rounds
    assert one["depths"]["draft"].keys() == {"1", "2"} and one["depths"]["ngram"].keys() == {"1", "2", "4", "6"}
    assert one["batches"]["draft"]["1"] == pytest.approx(one["drafters"]["draft"]["tokens_per_round"], rel=0.2)
    assert [rule["drafter"] for rule in figures["rules"]] == ["draft"] and figures["cells"] != []
    page = "\n".join(block(figures) for block in study_tables.BLOCKS.values())
    for said in ("| ngram | ", "| target | T = 1 | draft | ", "| target | draft | 3 | ", "recorded on"):
        assert said in page
