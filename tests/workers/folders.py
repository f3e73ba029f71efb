"""Folders of heads for the tiny target, and `draft:` of a models file for every row of the registry; no tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch

from paceline.decoder.models.config import ModelConfig
from paceline.draft.mlp_speculator import MlpSpeculatorConfig
from paceline.medusa import checkpoint as medusa_checkpoint
from paceline.medusa.config import MedusaConfig
from tests.draft.block_heads import fields, tensors, write
from tests.draft.random_heads import random_weights, save_assistant, save_mlp_speculator, save_mtp
from tests.eagle.heads import PARALLEL, random_head
from tests.eagle.heads import checkpoint as eagle_checkpoint
from tests.eagle.heads import config as eagle_config

KINDS = {"mtp": "qwen3", "gemma4_assistant": "gemma4"}
"""Targets of drafters that only some families have."""


def save_heads(target: Path, folder: Path) -> None:
    """Heads of every kind for a target, each in the folder of its row. What they propose does not matter."""
    config = ModelConfig.from_pretrained(target)
    for name in ("medusa", "eagle", "p-eagle", "pard"):
        (folder / name).mkdir()
    sizes = MedusaConfig(3, 1, config.hidden_size, config.vocab_size, tied=True)
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in sizes.shapes().items()}
    medusa_checkpoint.save(folder / "medusa", sizes, weights)
    eagle_checkpoint.save(folder / "eagle", random_head(eagle_config(config, 3)))
    eagle_checkpoint.save(folder / "p-eagle", random_head(eagle_config(config, 3, **PARALLEL)))
    stages = MlpSpeculatorConfig(3, config.hidden_size, 24, config.vocab_size, tied=True, scale_input=True)
    save_mlp_speculator(folder / "mlp_speculator", stages, random_weights(stages.shapes()))
    if config.model_type == "qwen3":
        save_mtp(folder / "mtp", config)
    if config.model_type == "gemma4_text":
        save_assistant(folder / "gemma4_assistant", config)
    told = fields(SimpleNamespace(config=config), "DFlash")
    write(folder / "dflash", told, tensors(SimpleNamespace(config=config), told))
    for file in target.iterdir():
        if file.name != "config.json":
            (folder / "pard" / file.name).symlink_to(file.resolve())
    keys = json.loads((target / "config.json").read_text())
    (folder / "pard" / "config.json").write_text(json.dumps({**keys, "pard_token": 7}))


def drafts(draft: Path, heads: Path) -> dict[str, object]:
    """Name -> `draft:` of a models file, for every row of the registry that a file can name.

    What repeats the text has one draft length and takes one token for a repetition: a random model repeats little, and
    among several lengths measured times choose, by which drafting may pause before anything is drafted.
    """
    return {
        "none": "none", "ngram": "ngram:prompt_lookup_max=3,k=3", "suffix": {"type": "suffix", "min_match": 1, "k": 3},
        "model": f"{draft}:k=3", "list": ["ngram", {"path": str(draft), "k": 2}],
        "choice": {"type": "choice", "drafts": ["ngram", {"path": str(draft), "k": 2}]},
        "medusa": {"path": str(heads / "medusa")}, "eagle": {"path": str(heads / "eagle"), "k": 2},
        "mtp": {"path": str(heads / "mtp"), "k": 2}, "mlp_speculator": {"path": str(heads / "mlp_speculator"), "k": 2},
        "gemma4_assistant": {"path": str(heads / "gemma4_assistant"), "k": 2}, "layerskip": "layerskip:layers=1,k=2",
        "pard": {"path": str(heads / "pard"), "k": 2}, "dflash": {"path": str(heads / "dflash"), "k": 2},
    }  # fmt: skip
