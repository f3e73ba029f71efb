"""Configurations of published Medusa heads: read right, or refused with the reason. Where from is in the files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import UnknownArchitectureError
from paceline.medusa import checkpoint
from paceline.medusa.config import is_medusa_config

FOLDER = Path(__file__).parent / "published"
HIDDEN, VOCABULARY = 6, 9


def folder(tmp_path: Path, name: str) -> Path:
    """The published config.json with five random heads by the names of the published pickle."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    assert found["source"] and found["looked_up"] and is_medusa_config(found["config"])
    (tmp_path / "config.json").write_text(json.dumps(found["config"]))
    tensors = {}
    for head in range(5):
        tensors[f"{head}.0.linear.weight"] = torch.randn(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = torch.randn(HIDDEN)
        tensors[f"{head}.1.weight"] = torch.randn(VOCABULARY, HIDDEN)
    torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    return tmp_path


def test_vicuna_has_five_heads_despite_its_configuration(tmp_path: Path) -> None:
    found = checkpoint.load(folder(tmp_path, "medusa-vicuna-7b"), vocab_size=VOCABULARY).config
    assert (found.heads, found.layers, found.tied, found.base) == (5, 1, False, "lmsys/vicuna-7b-v1.3")


def test_heads_in_vllms_layout_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match="which is not supported; use the checkpoint that it was"):
        checkpoint.load(folder(tmp_path, "vllm-medusa"), vocab_size=VOCABULARY)
