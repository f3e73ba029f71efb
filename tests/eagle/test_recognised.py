"""A config.json says which kind of heads its folder holds."""

from __future__ import annotations

import json

import pytest

from paceline.decoder.models.config import ModelConfig
from paceline.eagle import formats
from paceline.eagle.config import is_eagle_config
from paceline.medusa.config import is_medusa_config
from tests.decoder.tiny import Workshop
from tests.eagle.heads import config
from tests.shipped import FOLDER


@pytest.fixture
def target(workshop: Workshop) -> ModelConfig:
    return workshop.decoder(slots=1).config


@pytest.mark.parametrize(
    ("folder", "medusa", "eagle"),
    [("target", False, False), ("draft", False, False), ("medusa", True, False), ("eagle3", False, True)],
)
def test_shipped_head_folders_are_recognised(folder: str, medusa: bool, eagle: bool) -> None:
    fields = json.loads((FOLDER / folder / "config.json").read_text())
    assert (is_medusa_config(fields), is_eagle_config(fields)) == (medusa, eagle)


@pytest.mark.parametrize("layout", ["eagle", "nxd", "speculators"])
@pytest.mark.parametrize("version", [1, 3])
def test_heads_in_other_layouts_are_recognised(target: ModelConfig, layout: str, version: int) -> None:
    fields = formats.written(config(target, version), layout)
    assert is_eagle_config(fields) and not is_medusa_config(fields)
