"""`draft:` of a models file: one grammar, folders relative to the file, memory that is planned for, errors by key."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from paceline.core.errors import ConfigurationError, PlanError
from paceline.placement import INSTANCES, Plan, plan
from paceline.placement.planning.model_specs import ModelSpec, models_of
from tests.decoder.tiny import save_pair
from tests.workers.folders import drafts, save_heads

INF2 = INSTANCES["inf2.48xlarge"]
TAKES_NOTHING = ("none", "ngram", "suffix", "layerskip")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    save_pair(folder)
    save_heads(folder / "target", folder)
    return folder


def read(home: Path, *entries: Mapping[str, object]) -> tuple[ModelSpec, ...]:
    return models_of([{"path": "target", "n_positions": 128, **entry} for entry in entries], folder=home, where="file")


def planned(home: Path, **keys: object) -> Plan:
    return plan(read(home, {"name": "chat", **keys}), INF2)


def test_folders_are_relative_to_the_file(home: Path) -> None:
    (spec,) = read(home, {"name": "chat", "draft": ["ngram", {"path": "draft", "k": 2}], "exact": False})
    assert [draft.path for draft in spec.speculative.draft] == [None, str(home / "draft")]
    assert (spec.speculative.draft[1].k, spec.speculative.exact, spec.k) == (2, False, 4)


@pytest.mark.parametrize(
    ("keys", "k"),
    [
        ({"draft": "ngram"}, "auto"), ({"draft": "draft"}, "auto"), ({"draft": ["suffix", "draft"]}, "auto"),
        ({"draft": {"type": "choice", "drafts": ["ngram", "suffix"]}}, "auto"),
        ({"draft": "ngram", "k": 3}, 3), ({"draft": {"path": "draft", "k": 2}}, None),
        ({"draft": {"type": "choice", "drafts": ["ngram", "suffix"], "k": 2}}, None),
        ({"draft": "none"}, None), ({"draft": "./medusa"}, None), ({"draft": "./eagle"}, None),
        ({"draft": "./dflash"}, "auto"),
        ({"draft": "./pard"}, "auto"), ({}, None),
    ],
    ids=str,
)  # fmt: skip
def test_the_draft_length_is_adaptive_unless_given(home: Path, keys: dict[str, object], k: object) -> None:
    (spec,) = read(home, {"name": "chat", **keys})
    assert spec.speculative.k == k


@pytest.mark.parametrize(
    "name", [*TAKES_NOTHING, "model", "list", "choice", "medusa", "eagle", "pard", "dflash", "mlp_speculator"]
)
def test_an_in_process_draft_takes_memory_and_no_cores(home: Path, name: str) -> None:
    (alone,) = planned(home).placements
    (item,) = planned(home, draft=drafts(Path("draft"), Path())[name]).placements
    assert item.role == "target" and item.cores == alone.cores
    grown = item.footprint.weights > alone.footprint.weights, item.footprint.cache > alone.footprint.cache
    assert grown == ((False, False) if name in TAKES_NOTHING else (True, True))


def test_an_in_process_draft_model_has_the_footprint_of_a_separate_one(home: Path) -> None:
    (target,), (draft,) = planned(home).placements, planned(home, path="draft").placements
    (both,) = planned(home, draft="draft").placements
    assert both.footprint.weights == target.footprint.weights + draft.footprint.weights
    assert both.footprint.cache == target.footprint.cache + draft.footprint.cache


def test_a_draft_can_have_another_degree_than_its_target(home: Path) -> None:
    for degree in (1, 3):
        assert planned(home, draft={"path": "draft", "tp_degree": degree}, tp_degree=4)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"draft": "ngrm"}, "got 'ngrm'"), ({"draft": {"k": 3}}, "expected `type` .* or `path`"),
        ({"draft": "empty"}, "draft: expected a model or heads in '.*empty'"),
        ({"draft": "ngram", "k": -1}, "got -1"), ({"draft": "draft", "exact": 1}, "exact: expected .*, got 1"),
        ({"draft": "draft", "confidence_threshold": 2}, "confidence_threshold: expected .*, got 2"),
        ({"draft": "draft", "fused": "yes"}, "fused: expected .*, got 'yes'"),
        ({"acceptor": "reject"}, "acceptor: expected a drafter"),
        ({"synthetic_acceptance": 0.5, "draft": "ngram"}, "synthetic_acceptance"),
    ],
    ids=str,
)  # fmt: skip
def test_errors_name_the_model_and_the_key(home: Path, keys: dict[str, object], says: str) -> None:
    """All values of a configuration are in `tests/orchestrator/test_config.py`."""
    (home / "empty").mkdir(exist_ok=True)
    with pytest.raises((PlanError, ConfigurationError), match=f"(?s)file, model 'chat'.*{says}"):
        read(home, {"name": "chat", **keys})


def test_a_draft_is_in_process_or_separate(home: Path) -> None:
    own = {"name": "small", "path": "draft", "draft_of": "chat"}
    with pytest.raises(PlanError, match="'chat': expected one draft, got a `draft` in its own process and 'small'"):
        read(home, {"name": "chat", "draft": "ngram"}, own)
    with pytest.raises(PlanError, match="model 'small': acceptor is a key of targets"):
        read(home, {"name": "chat"}, {**own, "acceptor": "match"})
    with pytest.raises(PlanError, match=r"model 'small'.*k"):
        read(home, {"name": "chat"}, {**own, "k": [0, 2]})
    _, draft = read(home, {"name": "chat"}, {**own, "k": 3})
    assert draft.k == 3


def test_a_relative_folder_is_found(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(home / "draft", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    (spec,) = read(home, {"name": "chat", "draft": "elsewhere"})
    assert spec.speculative.draft[0].path == str(tmp_path / "elsewhere")
