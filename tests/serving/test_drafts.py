"""Every drafter of a models file, in its target's process on real Ray: the tokens are those of plain decoding."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.placement import INSTANCES, launch, plan
from paceline.placement.cluster.fault_policy import FaultPolicy
from paceline.placement.planning.model_specs import read_models
from tests.decoder.tiny import save_pair
from tests.placement.launched import PROMPTS, SAMPLED
from tests.simulation import check_nothing_left
from tests.workers.folders import drafts, save_heads

pytestmark = pytest.mark.ray


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A models file with a target for each drafter; folders are relative to the file."""
    import yaml

    save_pair(tmp_path)
    save_heads(tmp_path / "target", tmp_path)
    shape = {"path": "target", "n_positions": 128, "amp": "f32", "backend": "eager", "tp_degree": 1}
    entries = [{"name": name, **shape, "draft": draft} for name, draft in drafts(Path("draft"), Path()).items()]
    entries.append({"name": "remote", **shape})
    entries.append({"name": "remote-draft", **shape, "path": "draft", "draft_of": "remote", "k": 3})
    (tmp_path / "models.yaml").write_text(yaml.safe_dump({"models": entries}))
    return tmp_path / "models.yaml"


def test_no_draft_of_a_models_file_changes_a_token(cluster: object, models: Path) -> None:
    planned = plan(read_models(models), INSTANCES["inf2.48xlarge"])
    policy = FaultPolicy(startup_timeout_s=200, stall_timeout_s=60, placement_timeout_s=30)
    with launch(planned, fault_policy=policy) as running:
        texts = {name: running.sample(name, PROMPTS, max_new_tokens=40, **SAMPLED) for name in running.models}
        statistics = {name: running.statistics(name) for name in running.models}
    assert set(texts) == {"none", "ngram", "suffix", "model", "list", "choice", "medusa", "eagle", "remote"}
    assert [name for name, text in texts.items() if text != texts["none"]] == []
    assert [name for name, counts in statistics.items() if not counts["num_draft_tokens"]] == ["none"]
    check_nothing_left()
