"""Streams of the target that a head reads: the default by size, and the user's option over the file's."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.auto_drafter import AutoDrafter, make_drafter
from paceline.config import SpeculativeConfig
from paceline.core.errors import ConfigurationError, PairingError, WeightShapeError
from paceline.decoder.models.config import ModelConfig
from paceline.eagle import checkpoint, train
from paceline.eagle.config import EagleHeadOptions, default_layers, parse_layers
from paceline.eagle.drafter import EagleDrafter
from paceline.heads.options import CachedTextOptions
from paceline.registry import DRAFTERS, options_of
from tests.decoder.tiny import Workshop
from tests.eagle.heads import config, random_head


def test_default_layers_are_those_of_eagle() -> None:
    assert [default_layers(count) for count in (7, 8, 32, 80)] == [(2, 3, 4), (2, 4, 5), (2, 16, 29), (2, 40, 77)]


@pytest.mark.parametrize("count", [1, 6])
def test_a_small_target_requires_the_option(workshop: Workshop, count: int) -> None:
    said = rf"for a target of {count} layers; give streams from 0 to {count} \(--aux-layers"
    with pytest.raises(ConfigurationError, match=said):
        default_layers(count)
    sizes = replace(ModelConfig.from_pretrained(workshop.checkpoint()), num_layers=count)
    texts = CachedTextOptions(length=24, prompt=6)
    with pytest.raises(ConfigurationError, match="not three different ones"):
        train.check(EagleHeadOptions(version=3), texts, sizes)
    train.check(EagleHeadOptions(version=3, layers=(0, 1)), texts, sizes)
    train.check(EagleHeadOptions(version=1), texts, sizes)


def test_aux_layers_accepts_text_or_numbers() -> None:
    for given in ("2,16,29", (2, 16, 29), [2, 16, 29], " 2, 16 ,29"):
        assert parse_layers(given) == (2, 16, 29)
    assert parse_layers(5) == parse_layers("5") == (5,) and parse_layers(None) is None
    for wrong in ("2,x", "", (), "-1,2", (2.5,), (True,), 1.0, {"a": 1}):
        with pytest.raises(ConfigurationError, match="aux_layers: expected residual streams of the target as"):
            parse_layers(wrong)


@pytest.mark.parametrize("layout", ["paceline", "eagle", "speculators"])
def test_the_option_wins(workshop: Workshop, tmp_path: Path, layout: str, caplog: pytest.LogCaptureFixture) -> None:
    """By argument and in the grammar; the log says both."""
    caplog.set_level(logging.INFO, "paceline")
    target = workshop.decoder(slots=1)
    checkpoint.save(tmp_path, random_head(config(target.config, 3, layers=(0, 1, 2))), layout=layout)
    assert EagleDrafter.from_pretrained(tmp_path, target).reads.layers == (0, 1, 2)
    for made in (
        EagleDrafter.from_pretrained(tmp_path, target, aux_layers=(1, 2, 2)),
        AutoDrafter.from_pretrained(tmp_path, target, aux_layers=[1, 2, 2]),
        make_drafter(SpeculativeConfig(draft=f"{tmp_path}:aux_layers=1,2,2,k=3"), target)[0],
        make_drafter(SpeculativeConfig(draft={"path": str(tmp_path), "aux_layers": [1, 2, 2]}), target)[0],
    ):
        assert isinstance(made, EagleDrafter) and made.reads.layers == (1, 2, 2)
    said = "reads residual streams [1, 2, 2] of the target, as set by aux_layers; the file has [0, 1, 2]"
    assert caplog.text.count(said) == 4
    with pytest.raises(PairingError, match="got one of 2 layers"):
        EagleDrafter.from_pretrained(tmp_path, target, aux_layers=(1, 2, 3))
    with pytest.raises(WeightShapeError, match=r"fc.weight"):
        EagleDrafter.from_pretrained(tmp_path, target, aux_layers=(1, 2))


def test_aux_layers_is_an_option_of_eagle_3_heads_only(workshop: Workshop, tmp_path: Path) -> None:
    assert "aux_layers" in options_of(DRAFTERS["eagle"]) and "aux_layers" not in options_of(DRAFTERS["medusa"])
    target = workshop.decoder(slots=1)
    for layout in ("paceline", "eagle"):
        checkpoint.save(tmp_path / layout, random_head(config(target.config, 1)), layout=layout)
        with pytest.raises(ConfigurationError, match=r"aux_layers: expected none for an EAGLE-1 head, .* got \[1, 2\]"):
            EagleDrafter.from_pretrained(tmp_path / layout, target, aux_layers="1,2")
    with pytest.raises(ConfigurationError, match="'amp' is not an option; use one of draft_tree, aux_layers, divided"):
        make_drafter(SpeculativeConfig(draft=f"{tmp_path / 'eagle'}:amp=f32"), target)


def test_a_file_without_layer_ids_needs_the_option_for_a_small_target(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.decoder(slots=1)
    checkpoint.save(tmp_path, random_head(config(target.config, 3)), layout="eagle")
    told = json.loads((tmp_path / "config.json").read_text())
    del told["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises(ConfigurationError, match="for a target of 2 layers; give streams from 0 to 2"):
        EagleDrafter.from_pretrained(tmp_path, target)
    assert EagleDrafter.from_pretrained(tmp_path, target, aux_layers="0,1,2").reads.layers == (0, 1, 2)
