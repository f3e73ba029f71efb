"""A target's worker: it has the drafter of its settings, as every other place; `test_served_process` has its tokens."""

from __future__ import annotations

import json
import pickle
import shutil
import threading
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.cli import decode
from paceline.cli.options import checked
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError, PairingError, SamplingError
from paceline.decoder.options import LoadOptions
from paceline.draft_checks import prepared, recognise
from paceline.engine.request import SamplingParams
from paceline.engine.rounds import Rounds
from paceline.experiments.config import cells, parse_config, speculative_options
from paceline.loadable import Loadable, loadable
from paceline.placement.planning.model_specs import models_of
from paceline.registry import DRAFTERS
from paceline.text.stop_strings import StopStrings
from paceline.workers.calls import call_params
from paceline.workers.config import WorkerConfig
from paceline.workers.draft import make_drafters
from paceline.workers.target import make_target
from tests.cli.calling import call, last
from tests.decoder.tiny import Workshop, save_pair
from tests.draft.tokenizers_of_two import bytes_merged, every_byte
from tests.experiments.grids import save_tokenizer
from tests.workers.folders import KINDS, drafts, save_heads

ROWS = [
    "none", "ngram", "suffix", "model", "list", "choice", "medusa", "eagle", "pard", "dflash", "mtp", "mlp_speculator",
    "layerskip", "gemma4_assistant",
]  # fmt: skip


def settings(folder: Path, **more: object) -> dict[str, object]:
    load = asdict(LoadOptions(amp="f32", batch_size=2, n_positions=128))
    return {**load, "backend": "eager", "folder": str(folder), **more}


def test_every_registry_row_of_a_models_file_is_served() -> None:
    named = {row.name for row in DRAFTERS.values() if row.given_as in ("name", "target", "folder")}
    assert named == {*ROWS} - {"list", "choice"}


def generated(target: Path, draft: object, monkeypatch: pytest.MonkeyPatch) -> SpeculativeConfig:
    """Configuration of a `paceline generate` that has printed its text."""
    seen: list[SpeculativeConfig] = []

    def noted(folder: Path, options: LoadOptions, config: SpeculativeConfig) -> Loadable:
        seen.append(config)
        return checked(folder, options, config)

    with monkeypatch.context() as patch:
        patch.setattr(decode, "checked", noted)
        text = draft if isinstance(draft, str) else json.dumps(draft)
        asked = ("--target", target, "--draft", text, "--prompt", "&*&*", "--max-new-tokens", 6)
        done = call("generate", *asked, "--backend", "eager", "--amp", "f32", "--n-positions", 96, "--json")
    statistics = last(done)["statistics"]
    assert isinstance(statistics, dict) and statistics["new_tokens"] == 6
    (config,) = seen
    return config


@pytest.mark.parametrize("row", ROWS)
def test_a_drafter_is_the_same_in_every_place(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str
) -> None:
    """The contract suite makes all of them in Python, for several texts at a time; those that can be fused are."""
    target = shutil.copytree(workshop.checkpoint(kind=KINDS.get(row, "grouped")), tmp_path / "target")
    save_tokenizer(target)
    save_heads(target, tmp_path)
    draft = drafts(workshop.checkpoint("draft"), tmp_path)[row]
    (model,) = models_of([{"name": "m", "path": str(target), "draft": draft}], folder=Path(), where="the file")
    grid = {"targets": [str(target)], "drafters": [{"draft": draft}], "prompt_sets": ["p"]}
    experiment = parse_config(grid, "the file")
    places = {
        "Python": SpeculativeConfig(draft=draft),
        "command line": generated(target, draft, monkeypatch),
        "models file": model.speculative,
        "worker": WorkerConfig.from_settings(settings(target, draft=draft)).speculative,
        "experiment": SpeculativeConfig(**speculative_options(experiment, next(cells(experiment)))),
    }
    asked = loadable(target, LoadOptions(n_positions=96))
    found = {place: prepared(config, asked).draft for place, config in places.items()}
    names = {
        place: [leaf.name or recognise(str(leaf.path)) for spec in specs for leaf in spec.leaves()]
        for place, specs in found.items()
    }
    several = {"none": [], "list": ["ngram", "model"], "choice": ["ngram", "model"]}
    assert names == dict.fromkeys(places, several.get(row, [row]))


def test_the_target_is_loaded_in_a_thread_that_has_ended(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else OpenMP would have a team of threads for it, and one for the engine: more than there are CPUs."""
    threads: list[threading.Thread] = []
    load = WorkerConfig.load
    monkeypatch.setattr(WorkerConfig, "load", lambda self: (threads.append(threading.current_thread()), load(self))[1])
    make_target(settings(workshop.checkpoint(), draft="ngram"), None)
    assert [thread.is_alive() for thread in threads] == [False]


@pytest.mark.parametrize("fused", [None, False])
def test_an_in_process_draft_is_fused_unless_configured_otherwise(workshop: Workshop, fused: bool | None) -> None:
    host = make_target(settings(workshop.checkpoint(), draft=str(workshop.checkpoint("draft")), fused=fused), None)
    rounds = host.generator.engine.rounds
    assert isinstance(rounds, Rounds) and [plan.fused is not None for plan in rounds.plans.values()] == [fused is None]


def test_tokenizers_are_compared_wherever_the_draft_runs(tmp_path: Path) -> None:
    save_pair(tmp_path)
    every_byte().save_pretrained(tmp_path / "target")
    bytes_merged(90).save_pretrained(tmp_path / "draft")
    target, draft = tmp_path / "target", tmp_path / "draft"
    for load in (
        lambda: make_target(settings(target, draft=str(draft)), None),
        lambda: make_drafters(settings(draft, targets=[str(target)])),
    ):
        with pytest.raises(PairingError, match="use a draft trained with the target's tokenizer, or set"):
            load()
    assert make_drafters(settings(draft, targets=[]))  # a target that is not known yet


def test_parameters_cross_processes_or_are_rejected_by_name() -> None:
    params = call_params(SamplingParams(seed=3), {"stop_strings": StopStrings(("a",), scope="output")})
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(SamplingError, match="streamer: not a sampling parameter"):
        call_params(None, {"streamer": 1})
    for name, value in (("tokenizer", every_byte()), ("logits_processor", [len]), ("stopping_criteria_list", [len])):
        with pytest.raises(ConfigurationError, match=f"{name}: objects cannot be sent"):
            call_params(None, {name: value})
