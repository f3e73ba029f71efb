"""The backend of docs/extending/backend.md decodes as the eager one does and checks what it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline import SpeculativeGenerator
from paceline.core.errors import BackendError, ConfigurationError
from paceline.decoder.backends.base import make
from paceline.decoder.backends.registry import BACKENDS
from tests.decoder.tiny import Workshop, fresh
from tests.docs.extending import written

PAGE = "docs/extending/backend.md"
PROMPTS = [[3, 4, 5, 3, 4], [7]]


@pytest.fixture
def row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    exec(written(PAGE, "checked", tmp_path, monkeypatch), {})
    yield
    BACKENDS.pop("checked")
    sys.modules.pop("checked", None)


def test_the_example_backend_decodes_and_checks(row: None, workshop: Workshop) -> None:
    folders = [workshop.checkpoint(role) for role in ("draft", "target")]
    draft, target = (fresh(folder, backend="checked", batch_size=[2]) for folder in folders)
    generator = SpeculativeGenerator(draft, target, k=3)
    plain = workshop.decoder(slots=2).sample(PROMPTS, max_new_tokens=20)
    assert torch.equal(generator.sample(PROMPTS, max_new_tokens=20), plain)
    (step,) = (step for (key, _), step in target._steps.items() if key.is_round and key.draft is not None)
    with pytest.raises(BackendError, match="was made for"):
        step(torch.zeros(1, 1, dtype=torch.int32))
    prompt = next(step for (key, _), step in target._steps.items() if key.is_prompt)
    with torch.no_grad():
        target.body.model.norm.weight.fill_(float("nan"))
    with pytest.raises(BackendError, match="gives NaN"):
        prompt(torch.ones(1, 16, dtype=torch.int32), *(torch.tensor([n], dtype=torch.int32) for n in (0, 3, 0)))


def test_operations_missing_in_the_example_backend_are_rejected(row: None, workshop: Workshop, tmp_path: Path) -> None:
    target = fresh(workshop.checkpoint(), backend="checked")
    target.sample(PROMPTS[:1], max_new_tokens=2)
    with pytest.raises(Exception, match="expected one that saves compiled graphs, got 'checked'; use neuron"):
        target.save(tmp_path)
    with pytest.raises(ConfigurationError, match="tp_degree: expected 1 for backend="):
        make("checked", 2)
