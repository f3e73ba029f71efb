"""Configurations of published MTP layers, assistants, PARD and MLP speculators: each is read right, or refused by name.

`published.json` says for each where it was found and when, and which keys were seen; `tensors` are names in its files.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig
from paceline.draft.gemma4_assistant import AssistantConfig
from paceline.draft.mlp_speculator import MlpSpeculatorConfig
from paceline.draft.mtp import MtpConfig
from paceline.draft.pard import mask_token
from paceline.draft_checks import recognise
from paceline.heads.layouts import read_config

ENTRIES: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "published.json").read_text())
MLP = {  # stages, width of them, tied, scaled
    "mlp llama-13b": (3, 4096, False, False),
    "mlp llama-7b": (3, 4096, False, False),
    "mlp code-llama-13b": (7, 4096, False, False),
    "mlp code-llama-34b": (5, 8192, True, True),
    "mlp llama3-8b": (4, 3072, False, False),
    "mlp granite-20b-code": (4, 4096, False, False),
    "mlp granite-34b-code": (5, 6144, True, True),
    "mlp llama3-70b": (4, 3584, True, True),
}
MTP = {  # layout, base of the rotation, heads of keys
    "mtp mimo-7b": ("mimo", 640000.0, 8),
    "mtp speculators-qwen3": ("speculators", 10000.0, 2),
    "mtp glm-4.5-air": ("nextn", 1000000.0, 8),
    "mtp deepseek-r1": ("nextn", 10000.0, 128),
}
ASSISTANT, PARD = "assistant gemma-4-e2b-it", "pard qwen2.5-0.5b"
REFUSED = {
    "mlp arctic-lstm": "architectures: expected .*MLPSpeculatorPreTrainedModel.*, got .*ArcticLSTM",
    "mtp mimo, two layers": "num_nextn_predict_layers: expected 1, got 2, and only one layer is read",
    "mtp deepseek-v3, two layers": "num_nextn_predict_layers: expected 1, got 2, and only one layer is read",
    "mtp speculators-qwen3-next": "model_type: expected one of .*, got 'qwen3_next'",
}


def read(name: str, folder: Path) -> MlpSpeculatorConfig | MtpConfig:
    """The configuration, for a target of its sizes."""
    config = ENTRIES[name]["config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert recognise(str(folder)) == ENTRIES[name]["row"]
    if name.startswith("mlp"):
        sizes = {"hidden_size": config["emb_dim"], "vocab_size": config["vocab_size"], "intermediate_size": 8}
        target = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 2, **sizes}
        return MlpSpeculatorConfig.read(folder, ModelConfig.from_fields(Fields(target, "target")))
    layer = config.get("transformer_layer_config", config)
    return MtpConfig.read(folder, ModelConfig.from_fields(Fields(layer, "config.json")))


def test_every_entry_has_a_verdict_and_a_source() -> None:
    assert ENTRIES.keys() == MLP.keys() | MTP.keys() | REFUSED.keys() | {ASSISTANT, PARD}
    assert all(one["source"] and one["looked_up"] for one in ENTRIES.values())


@pytest.mark.parametrize("name", MLP)
def test_a_published_mlp_speculator_is_read(name: str, tmp_path: Path) -> None:
    made = read(name, tmp_path)
    assert isinstance(made, MlpSpeculatorConfig)
    assert (made.stages, made.inner_size, made.tied, made.scale_input) == MLP[name]
    stages = 1 if made.tied else made.stages
    assert len(made.shapes()) == stages * 5 + made.tied, "a tied one has a projection for the first stage beside"


@pytest.mark.parametrize("name", MTP)
def test_a_published_mtp_layer_is_read(name: str, tmp_path: Path) -> None:
    made = read(name, tmp_path)
    assert isinstance(made, MtpConfig)
    assert (made.layout.name, made.layer.rope.theta, made.layer.num_kv_heads) == MTP[name]
    names = {re.sub(r"experts\.\d+", "experts.{e}", made.prefix + tensor) for tensor in made.shapes()}
    surplus = set(ENTRIES[name]["tensors"]) - names
    assert names <= set(ENTRIES[name]["tensors"])
    assert all(one.endswith(("embed_tokens.weight", "shared_head.head.weight", "_scale_inv")) for one in surplus)


def test_a_published_assistant_is_read(tmp_path: Path) -> None:
    """For a target of the sizes of Gemma 4 E2B, of whose layers few are needed."""
    entry = ENTRIES[ASSISTANT]
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))
    assert recognise(str(tmp_path)) == entry["row"]
    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    own = {"hidden_size": 1536, "num_kv_shared_layers": 1, "layer_types": layers}
    text = {**entry["config"]["text_config"], **own}
    made = AssistantConfig.read(tmp_path, ModelConfig.from_fields(Fields(text, "target")))
    assert (made.sources, made.clusters, made.chosen) == ((2, 2, 2, 1), 2048, 32)
    assert made.tensors().keys() | {"masked_embedding.token_ordering"} == set(entry["tensors"])


def test_a_published_pard_decoder_is_read(tmp_path: Path) -> None:
    entry = ENTRIES[PARD]
    (tmp_path / "config.json").write_text(json.dumps(entry["config"]))
    assert recognise(str(tmp_path)) == entry["row"]
    assert mask_token(read_config(tmp_path)) == 151665
    assert ModelConfig.from_pretrained(tmp_path).num_layers == 24


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_published_heads_are_rejected_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match=REFUSED[name]):
        read(name, tmp_path)
