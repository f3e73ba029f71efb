"""Medusa-2 checkpoints: a whole model with its heads in the same files is a target, and a drafter for itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.core.errors import CheckpointError
from tests.cli.calling import call, last
from tests.decoder.families import VOCABULARY, network

PUBLISHED = Path(__file__).parent / "published" / "medusa2-openhermes-mistral-7b.json"
HEADS = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The model without heads; and with heads, in the published configuration with small sizes, as two pickles."""
    alone, whole = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("whole")
    model = network("mistral", layers=2)
    model.save_pretrained(alone)
    config = json.loads(PUBLISHED.read_text())["config"] | json.loads((alone / "config.json").read_text())
    state, heads = model.state_dict(), dict[str, torch.Tensor]()
    output = state["lm_head.weight"]
    for head in range(HEADS):  # of the state before: near the model's own choice, so that they are right now and then
        heads[f"medusa_head.{head}.0.linear.weight"] = torch.randn(output.shape[1], output.shape[1]) * 0.05
        heads[f"medusa_head.{head}.0.linear.bias"] = torch.randn(output.shape[1]) * 0.05
        heads[f"medusa_head.{head}.1.weight"] = output + torch.randn_like(output) * 0.02
    places = {}
    for number, tensors in enumerate((state, heads), 1):
        torch.save(tensors, whole / f"pytorch_model-0000{number}-of-00002.bin")
        places |= dict.fromkeys(tensors, f"pytorch_model-0000{number}-of-00002.bin")
    (whole / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    (whole / "config.json").write_text(json.dumps(config))
    return alone, whole


@pytest.mark.parametrize("asked", [{}, {"do_sample": True, "temperature": 0.8, "seed": 3}])
def test_a_medusa2_folder_decodes_and_drafts_for_itself(folders: tuple[Path, Path], asked: dict[str, Any]) -> None:
    alone, whole = (AutoDecoder.from_pretrained(folder, backend="eager", amp="f32") for folder in folders)
    wishes: dict[str, Any] = {"max_new_tokens": 40, **asked}
    expected = alone.sample([[5, 6, 7]], **wishes)
    assert torch.equal(whole.sample([[5, 6, 7]], **wishes), expected)
    for draft in (str(folders[1]), {"type": "medusa", "path": str(folders[1]), "draft_tree": [[0], [1], [0, 0]]}):
        generator = SpeculativeGenerator(draft, whole)
        assert torch.equal(generator.sample([[5, 6, 7]], **wishes), expected)
        assert generator.statistics.num_draft_tokens > 0


def test_the_command_takes_one_folder_for_both(folders: tuple[Path, Path], tmp_path: Path) -> None:
    made: list[dict[str, Any]] = []
    for number, source in enumerate(folders):
        folder = shutil.copytree(source, tmp_path / str(number))
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(folder / "tokenizer.json"))
        options = ("--prompt", "w5 w6 w7", "--backend", "eager", "--max-new-tokens", 8, "--json")
        draft = ("--draft", folder) if number else ()
        made.append(last(call("generate", "--target", folder, *draft, *options)))
    assert made[1]["tokens"] == made[0]["tokens"] and len(made[1]["tokens"]) == 8
    assert made[1]["statistics"]["num_draft_tokens"] > 0


def test_other_surplus_tensors_are_rejected(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for file in folders[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors") | {"medusa_mystery.weight": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"expected only tensors that .*, got also medusa_mystery\.weight;"):
        AutoDecoder.from_pretrained(tmp_path, backend="eager")
