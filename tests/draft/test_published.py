"""Configurations of published heads and drafts: each is read right, or refused with the reason.

`published.json`, and `published/` for DFlash, DFlash 2 and DSpark, say where each was found and when, and which keys
were seen. Weights are not needed: `tensors` are names in its files.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import PacelineError, UnknownArchitectureError
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig
from paceline.draft.dflash.config import DFlashConfig, LayerRule, is_dflash_config, parse
from paceline.draft.dflash.drafter import own_name
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


def known(name: str, folder: Path) -> dict[str, Any]:
    """An entry, whose configuration is recognised in its folder."""
    (folder / "config.json").write_text(json.dumps(ENTRIES[name]["config"]))
    assert recognise(str(folder)) == ENTRIES[name]["row"]
    return ENTRIES[name]


def read(name: str, folder: Path) -> MlpSpeculatorConfig | MtpConfig:
    """The configuration, for a target of its sizes."""
    config = known(name, folder)["config"]
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
    entry = known(ASSISTANT, tmp_path)
    layers = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    own = {"hidden_size": 1536, "num_kv_shared_layers": 1, "layer_types": layers}
    text = {**entry["config"]["text_config"], **own}
    made = AssistantConfig.read(tmp_path, ModelConfig.from_fields(Fields(text, "target")))
    assert (made.sources, made.clusters, made.chosen) == ((2, 2, 2, 1), 2048, 32)
    assert made.tensors().keys() | {"masked_embedding.token_ordering"} == set(entry["tensors"])


def test_a_published_pard_decoder_is_read(tmp_path: Path) -> None:
    known(PARD, tmp_path)
    assert mask_token(read_config(tmp_path)) == 151665
    assert ModelConfig.from_pretrained(tmp_path).num_layers == 24


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_published_heads_are_rejected_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError, match=REFUSED[name]):
        read(name, tmp_path)


FOLDER = Path(__file__).parent / "published"
UNKNOWN = UnknownArchitectureError


def entry(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def read_block(name: str, **changes: object) -> DFlashConfig:
    found = entry(name)
    named = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "model_type": "llama"}
    sizes = {key: found["target"][key] for key in ("hidden_size", "vocab_size")}
    target = ModelConfig.from_fields(Fields({**named, **sizes}, "target"))
    target = replace(target, num_layers=found["target"]["num_layers"])
    return parse(Fields({**found["config"], **changes}, f"{name}/config.json"), target)


def told(made: DFlashConfig) -> tuple[object, ...]:
    """Streams, rules by layer, drafts of a block, heads and their width, theta and longest text."""
    heads = (made.num_heads, made.num_kv_heads, made.head_dim)
    return made.layers, made.rules, made.most, made.mask_token, heads, made.rope.theta, made.max_position_embeddings


PLAIN = LayerRule()
BLOCKS: dict[str, tuple[object, ...]] = {
    "zlab-qwen3.5-4b": (
        (2, 6, 10, 14, 18, 22, 26, 30), (*[LayerRule(4096, causal=True)] * 5, PLAIN), 15, 248077, (32, 8, 128), 1e7,
        262144,
    ),
    "zlab-qwen3-4b-b16": ((2, 10, 18, 26, 34), (PLAIN,) * 5, 15, 151669, (32, 8, 128), 1e6, 40960),
    "zlab-muse-glimmer-dflash2": (
        (2, 14, 26, 38, 50), (LayerRule(2048),) * 5, 15, 201818, (32, 8, 128), 500000.0, 131072
    ),
    "transformers-muse-glimmer": (
        (2, 14, 26, 38, 50), (LayerRule(2049),) * 5, 15, 201818, (32, 8, 128), 500000.0, 131072
    ),
    "speculators-qwen3.6-35b": ((2, 11, 20, 29, 38), (PLAIN,) * 8, 15, 248070, (32, 4, 128), 1e7, 262144),
    "speculators-glm-5.2-dspark": ((8, 23, 39, 55, 70), (PLAIN,) * 5, 16, 154856, (64, 64, 64), 8e6, 2048),
    "deepspec-qwen3-8b": ((2, 10, 18, 26, 34), (PLAIN,) * 5, 7, 151669, (32, 8, 128), 1e6, 40960),
    "nvidia-nemotron-dflash": ((2, 6, 20, 30, 42, 52), (PLAIN,) * 6, 15, 990, (32, 2, 128), 10000.0, 1048576),
    "specforge-dspark": ((3, 18, 33, 48, 63), (PLAIN,) * 5, 16, 248070, (32, 8, 128), 10000.0, 2048),
}  # fmt: skip
BLOCKS_REFUSED = {
    "nvidia-nemotron-dspark": "attention_sink_bias: expected false, got true, .*: heads have no attention sinks",
    "modelopt-dspark": "dflash_config: 'use_confidence_head' is not a known setting of a DFlash head",
}


def test_every_published_block_head_has_a_verdict_and_a_table_row() -> None:
    names = {path.stem for path in FOLDER.glob("*.json")}
    assert names == BLOCKS.keys() | BLOCKS_REFUSED.keys()
    table = (FOLDER / "README.md").read_text()
    assert all(f"`{name}`" in table and entry(name)["looked_up"] in table for name in names)
    assert all(is_dflash_config(entry(name)["config"]) for name in names)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_published_block_head_is_read_block(name: str) -> None:
    made = read_block(name)
    assert told(made) == BLOCKS[name]
    dspark = "dspark" in name or name.startswith("deepspec")
    assert made.from_anchor == dspark and made.markov_rank == (256 if dspark else 0)
    assert made.confidence == (made.hidden_size + 256 if dspark else 0)
    two = name == "zlab-muse-glimmer-dflash2"
    assert (made.conv_size, made.conv_group, made.selector_rank, made.selector_top) == (
        (2, 16, 256, 16) if two else (0, 0, 0, 0)
    )
    assert (made.logit_scale, made.logit_cap) == ((0.19611613513818404, 20.0) if two else (1.0, 0.0))


@pytest.mark.parametrize("name", ["zlab-muse-glimmer-dflash2", "transformers-muse-glimmer"])
def test_published_tensors_equal_the_expected_ones(name: str) -> None:
    made, expected = read_block(name), dict[str, tuple[int, ...]]()
    for tensor, shape in entry(name)["tensors"].items():
        for index in range(len(made.rules)):
            own = own_name(tensor.replace("layers.0.", f"layers.{index}."))
            assert own is not None
            expected[own] = tuple(shape)
    assert made.shapes() == expected


@pytest.mark.parametrize("name", BLOCKS_REFUSED)
def test_unsupported_block_heads_are_rejected_with_the_reason(name: str) -> None:
    with pytest.raises(UNKNOWN, match=BLOCKS_REFUSED[name]):
        read_block(name)


@pytest.mark.parametrize(
    ("name", "changes", "error", "said"),
    [
        ("speculators-qwen3.6-35b", {"norm_output": True}, UNKNOWN, "'norm_output' is not a known setting"),
        ("speculators-qwen3.6-35b", {"use_aux_hidden_state": False}, UNKNOWN, "use_aux_hidden_state: expected true"),
        ("speculators-qwen3.6-35b", {"target_hidden_size": 99}, UNKNOWN, "target_hidden_size: expected 2048"),
        ("speculators-qwen3.6-35b", {"transformer_layer_config": None}, PacelineError, "transformer_layer_config is m"),
        ("speculators-qwen3.6-35b", {"aux_hidden_state_layer_ids": None}, PacelineError, "expected a list of layer"),
        ("zlab-qwen3-4b-b16", {"target_layer_ids": [1]}, PacelineError, "keep the one the head was trained with"),
        ("deepspec-qwen3-8b", {"target_layer_ids": [1, 35]}, UNKNOWN, "expected layers before the last"),
        ("deepspec-qwen3-8b", {"num_target_layers": 28}, PacelineError, "expected a target of 28 layers"),
    ],
)
def test_block_head_keys_that_change_the_output_are_rejected_by_name(
    name: str, changes: dict[str, object], error: type[PacelineError], said: str
) -> None:
    with pytest.raises(error, match=said):
        read_block(name, **changes)
