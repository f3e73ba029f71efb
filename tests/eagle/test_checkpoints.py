"""Heads through the disk: every layout comes back, what does not fit is rejected by name."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import (
    CheckpointError,
    ConfigurationError,
    MissingWeightsError,
    PacelineError,
    PairingError,
    UnknownArchitectureError,
    WeightShapeError,
    WeightValueError,
)
from paceline.decoder.models.config import ModelConfig, RopeConfig
from paceline.eagle import checkpoint
from paceline.eagle.checkpoint import Checkpoint, TargetTensors
from paceline.eagle.config import EagleConfig, is_eagle_config
from paceline.eagle.drafter import EagleDrafter
from paceline.medusa.config import is_medusa_config
from tests.decoder.tiny import VOCABULARY, Workshop
from tests.eagle.heads import NEWER, PARALLEL, SHARED, config, random_head


@pytest.fixture
def target(workshop: Workshop) -> ModelConfig:
    return workshop.decoder(slots=1).config


def tensors_of(target: ModelConfig) -> TargetTensors:
    """Tensors that a target adds to a head in NxD Inference's layout, as random numbers."""
    torch.manual_seed(3)
    shape = (VOCABULARY, target.hidden_size)
    return TargetTensors(torch.randn(shape), torch.randn(shape), target.num_layers)


def rewritten(folder: Path, change: dict[str, Tensor | None] | None = None, **settings: object) -> Path:
    """The same folder with tensors (None = without) and settings of its config.json changed."""
    tensors = load_file(folder / "model.safetensors")
    for name, value in (change or {}).items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")
    found = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**found, **settings}))
    return folder


def check(found: Checkpoint[EagleConfig], made: Checkpoint[EagleConfig]) -> None:
    assert found.config == made.config
    assert found.weights.keys() == made.weights.keys()
    assert all(torch.equal(found.weights[name], value) for name, value in made.weights.items())


HELD = [
    (layout, version, changes)
    for layout in ("paceline", "eagle", "nxd", "speculators")
    for version, changes in (
        (1, {}), (1, {"fc_bias": True}), (3, {}), (3, {"draft_vocab_size": VOCABULARY}),
        (3, {"draft_vocab_size": VOCABULARY, "layers": (2, 4, 5)}),
    )
    if layout != "nxd" or version == 1 or "layers" in changes  # the rest it cannot hold: see `EXPORTS`
]  # fmt: skip
HELD += [
    ("speculators", 1, {"attention_bias": True, "mlp_bias": True}),
    ("nxd", 1, {"attention_bias": True, "mlp_bias": True, "input_norm": True}),
    ("speculators", 3, {"norm_before_residual": True, "layers": (0, 1)}),
    ("speculators", 3, NEWER),
    ("speculators", 3, {"norm_before_fc": True, "mask_token": 0}),
    ("speculators", 3, PARALLEL),
    ("paceline", 3, {**SHARED, "norm_before_fc": True}),
    ("paceline", 3, PARALLEL),
]


@pytest.mark.parametrize(("layout", "version", "changes"), HELD)
def test_every_layout_is_read_back(
    target: ModelConfig, tmp_path: Path, layout: str, version: int, changes: dict[str, object]
) -> None:
    target = replace(target, num_layers=8)
    made, shared = random_head(config(target, version, **changes)), tensors_of(target)
    checkpoint.save(tmp_path, made, layout=layout, target=shared)
    check(checkpoint.load(tmp_path, target, head=shared.head), made)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert is_eagle_config(fields) and not is_medusa_config(fields)


EXPORTS: list[tuple[str, int, dict[str, object], str]] = [
    ("eagle", 3, {"norm_before_residual": True}, "norm_before_residual, which only speculators"),
    ("nxd", 3, {"norm_before_residual": True}, "norm_before_residual, which only speculators"),
    ("eagle", 3, {"norm_output": True}, "it has norm_output, which only speculators' readers know"),
    ("eagle", 3, PARALLEL, "it has fc_norm, which only"),
    ("nxd", 3, {"mask_token": 3}, "it has mask_token, which only"),
    ("speculators", 3, SHARED, "it shares the target's output layer"),
    ("eagle", 1, {"input_norm": True}, "which in version 1 only NxD Inference does"),
    ("speculators", 1, {"input_norm": True}, "which in version 1 only NxD Inference does"),
    ("eagle", 1, {"attention_bias": True}, "biases, which EAGLE's own code and SGLang leave out"),
    ("eagle", 3, {"mlp_bias": True}, "biases, which EAGLE's own code and SGLang leave out"),
    ("eagle", 3, {"layers": (1, 2, 3)}, r"residual streams \[1, 2, 3\], and SGLang takes ids that begin with 1"),
    ("speculators", 3, {"layers": (1, 2, 3)}, r"residual streams \[1, 2, 3\], and SGLang takes ids that begin with 1"),
    ("eagle", 3, {"layers": (2, 4)}, "reads 2 residual streams of the target, and readers of this layout three"),
    ("nxd", 3, {}, "does not read d2t, and this head drafts 48 of 96 ids; train one with the whole vocabulary"),
    ("nxd", 3, {"draft_vocab_size": VOCABULARY}, r"reads residual streams \[2, 4, 5\] of a target with 8 layers"),
    ("nxd", 3, {"draft_vocab_size": VOCABULARY, "target_hidden_size": 64}, "takes the width of the head"),
]


@pytest.mark.parametrize(("layout", "version", "changes", "said"), EXPORTS)
def test_heads_a_layout_cannot_express_are_rejected(
    target: ModelConfig, tmp_path: Path, layout: str, version: int, changes: dict[str, object], said: str
) -> None:
    target = replace(target, num_layers=8)
    with pytest.raises(ConfigurationError, match=said):
        checkpoint.save(
            tmp_path, random_head(config(target, version, **changes)), layout=layout, target=tensors_of(target)
        )
    assert not list(tmp_path.iterdir())


def test_tensor_names_equal_those_of_the_projects(target: ModelConfig, tmp_path: Path) -> None:
    """NxD Inference shares nothing with the target, calls the layer layers.0 and the bias of fc `fc_bias`, and knows no
    d2t.
    """
    target = replace(target, num_layers=8)
    shared = tensors_of(target)
    some, one = random_head(config(target, 3)), random_head(config(target, 1, fc_bias=True))
    every = random_head(config(target, 3, draft_vocab_size=VOCABULARY, layers=(2, 4, 5)))
    stored = {}
    for layout, made, names in (
        ("eagle", some, {"midlayer.hidden_norm.weight", "midlayer.self_attn.q_proj.weight", "d2t", "t2d", "fc.weight"}),
        ("eagle", one, {"layers.0.self_attn.q_proj.weight", "fc.weight", "fc.bias"}),
        ("nxd", every, {"layers.0.hidden_norm.weight", "lm_head.weight", "embed_tokens.weight", "norm.weight"}),
        ("nxd", one, {"layers.0.mlp.up_proj.weight", "lm_head.weight"}),
        ("speculators", one, {"transformer.mlp.up_proj.weight", "fusion_fc.weight", "fusion_fc.bias"}),
        ("speculators", some, {"layers.0.hidden_norm.weight", "norm.weight", "lm_head.weight"}),
    ):
        name = f"{layout} {made.config.version}"
        stored[name] = load_file(checkpoint.save(tmp_path / name, made, layout=layout, target=shared))
        assert names <= set(stored[name]), name
    assert not any(name in ("d2t", "t2d") or name.startswith("midlayer.") for name in stored["nxd 3"])
    assert torch.equal(stored["nxd 1"]["embed_tokens.weight"], shared.embedding)
    assert torch.equal(stored["nxd 1"]["lm_head.weight"], shared.head)
    written = json.loads((tmp_path / "nxd 1" / "config.json").read_text())
    assert written["fc_bias"] is True and "bias" not in written
    mixed = Checkpoint(every.config, {**every.weights, "ids": torch.arange(VOCABULARY).flip(0)}, None)
    found = load_file(checkpoint.save(tmp_path / "mixed", mixed, layout="nxd", target=shared))
    assert torch.equal(found["lm_head.weight"], every.weights["lm_head.weight"].flip(0)), "rows in the order of ids"


def test_offsets_and_mask_follow_the_rule(target: ModelConfig, tmp_path: Path) -> None:
    """d2t holds offsets: draft id i is the target's i + d2t[i]; t2d marks the same ids."""
    made = random_head(config(target, 3))
    checkpoint.save(tmp_path, made)
    stored = load_file(tmp_path / "model.safetensors")
    ids = made.weights["ids"]
    assert torch.equal(stored["d2t"] + torch.arange(len(ids)), ids)
    assert stored["t2d"].nonzero().flatten().tolist() == ids.tolist()
    without = rewritten(tmp_path, {"t2d": None})
    assert torch.equal(checkpoint.load(without, target).weights["ids"], ids)


BAD: list[tuple[dict[str, object], type[PacelineError], str]] = [
    ({"fc.weight": None}, MissingWeightsError, "fc.weight"),
    ({"layer.mlp.up_proj.weight": None}, MissingWeightsError, "up_proj"),
    ({"d2t": None}, MissingWeightsError, "d2t"),
    ({"layer.surplus.weight": torch.zeros(2)}, CheckpointError, "surplus"),
    ({"norm.weight": torch.ones(7)}, WeightShapeError, "norm.weight"),
    ({"norm.weight": torch.full((32,), torch.nan)}, WeightValueError, "norm.weight"),
    ({"norm.weight": torch.ones(32, dtype=torch.int8)}, CheckpointError, "norm.weight: the data type I8 is not"),
    ({"fc.weight": torch.ones(32, 96).to(torch.float8_e4m3fn)}, CheckpointError, "fc.weight: the data type F8_E4M3 is"),
    ({"embed_tokens.weight": torch.full((VOCABULARY, 32), torch.inf)}, WeightValueError, "embed_tokens"),
    ({"d2t": torch.zeros(5, dtype=torch.int64)}, WeightShapeError, "d2t"),
    ({"d2t": torch.full((48,), 90)}, CheckpointError, r"48 different ids below 96 as id \+ d2t\[id\]"),
    ({"d2t": -torch.arange(48)}, CheckpointError, "different ids"),
    ({"d2t": torch.arange(48) + 0.4}, CheckpointError, r"whole numbers in d2t, got torch.float32"),
    ({"d2t": torch.zeros(48, dtype=torch.bfloat16)}, CheckpointError, "whole numbers in d2t, got torch.bfloat16"),
    ({"t2d": torch.ones(VOCABULARY)}, CheckpointError, "whole numbers in t2d, got torch.float32"),
    ({"t2d": torch.zeros(VOCABULARY, dtype=torch.bool)}, CheckpointError, "t2d"),
    ({"t2d": torch.zeros(4, dtype=torch.bool)}, WeightShapeError, "t2d"),
    ({"embed_tokens.weight": torch.zeros(3, 3)}, WeightShapeError, "embed_tokens"),
    ({"input_norm.weight": torch.ones(96)}, CheckpointError, "got also input_norm.weight; use the config.json that"),
    ({"embed_layernorm.weight": torch.ones(32)}, UnknownArchitectureError, "embed_layernorm.weight of a variant"),
    ({"additional_layers.0.x": torch.ones(32)}, UnknownArchitectureError, "further layers as layers.1 and on"),
]


@pytest.mark.parametrize(("change", "error", "part"), BAD)
def test_tensors_of_wrong_shape_are_rejected(
    target: ModelConfig, tmp_path: Path, change: dict[str, Tensor | None], error: type[Exception], part: str
) -> None:
    checkpoint.save(tmp_path, random_head(config(target, 3)))
    with pytest.raises(error, match=part):
        checkpoint.load(rewritten(tmp_path, change), target)


def test_settings_found_only_in_tensors_are_detected_or_required(target: ModelConfig, tmp_path: Path) -> None:
    """Further layers, and an output layer that is the target's: config.json of other layouts need not say it."""
    made = random_head(config(target, 3, draft_vocab_size=VOCABULARY, norm_before_residual=True))
    made.weights["ids"] = torch.arange(VOCABULARY)
    checkpoint.save(tmp_path / "a", made, layout="speculators")
    found = checkpoint.load(rewritten(tmp_path / "a", {"lm_head.weight": None}), target)
    assert found.config == replace(made.config, shares_output=True) and "lm_head.weight" not in found.weights
    with pytest.raises(MissingWeightsError, match=r"expected the tensors layers\.1\.input_layernorm"):
        checkpoint.load(rewritten(tmp_path / "a", {"layers.1.mlp.up_proj.weight": torch.ones(48, 32)}), target)
    some = random_head(config(target, 3))
    checkpoint.save(tmp_path / "b", some, layout="eagle")
    with pytest.raises(MissingWeightsError, match="a separate output layer for a head that drafts 48 of 96 ids"):
        checkpoint.load(rewritten(tmp_path / "b", {"lm_head.weight": None}), target)
    made.weights["ids"] = torch.arange(VOCABULARY).flip(0)
    checkpoint.save(tmp_path / "c", made, layout="speculators")
    with pytest.raises(CheckpointError, match="expected no d2t in a head that shares the target's output layer"):
        checkpoint.load(rewritten(tmp_path / "c", {"lm_head.weight": None}), target)


@pytest.mark.parametrize(
    ("settings", "error", "part"),
    [
        ({"version": 2}, CheckpointError, "EAGLE-2"),
        ({"num_layers": 1001}, CheckpointError, "num_layers: expected 1 to 1000"),
        ({"surprise": 1}, CheckpointError, "surprise"),
        ({"layers": []}, CheckpointError, "layers"),
        ({"layers": [0, 9, 1]}, PairingError, "2 layers"),
        ({"vocab_size": 100}, PairingError, "vocabulary"),
        ({"target_hidden_size": 64}, PairingError, "hidden size"),
        ({"draft_vocab_size": 200}, CheckpointError, "draft_vocab_size"),
        ({"rope": {"type": "default"}}, CheckpointError, "rope"),
        ({"rope": {**asdict(RopeConfig()), "theta": "much"}}, CheckpointError, "theta: expected a number above zero"),
        ({"rope": {**asdict(RopeConfig()), "type": 5}}, CheckpointError, "type: expected a string, got 5"),
    ],
)
def test_contradictory_settings_are_rejected(
    target: ModelConfig, tmp_path: Path, settings: dict[str, object], error: type[Exception], part: str
) -> None:
    checkpoint.save(tmp_path, random_head(config(target, 3)))
    with pytest.raises(error, match=part):
        checkpoint.load(rewritten(tmp_path, None, **settings), target)


def test_a_full_vocabulary_needs_no_map(target: ModelConfig, tmp_path: Path) -> None:
    """EAGLE-3's own code drops d2t and t2d where both vocabularies are one."""
    for layout in ("paceline", "eagle", "speculators"):
        folder = tmp_path / layout
        checkpoint.save(folder, random_head(config(target, 3, draft_vocab_size=VOCABULARY)), layout=layout)
        found = checkpoint.load(rewritten(folder, {"d2t": None, "t2d": None}), target)
        assert torch.equal(found.weights["ids"], torch.arange(VOCABULARY))
    partly = torch.arange(VOCABULARY) < 48
    with pytest.raises(CheckpointError, match="got different ones; download the checkpoint again"):
        checkpoint.load(rewritten(folder, {"t2d": partly}), target)
    checkpoint.save(tmp_path / "one", random_head(config(target, 1)))
    surplus: dict[str, Tensor | None] = {"d2t": torch.zeros(VOCABULARY, dtype=torch.int64)}
    with pytest.raises(CheckpointError, match=r"that a head with this config.json uses, got also d2t;"):
        checkpoint.load(rewritten(tmp_path / "one", surplus), target)


def test_speculators_readers_find_the_required_fields(target: ModelConfig, tmp_path: Path) -> None:
    """Fields that vLLM reads before it loads such a head, and the config of a published one read by Paceline."""
    for version, kind in ((1, "eagle"), (3, "eagle3")):
        folder = tmp_path / kind
        checkpoint.save(folder, random_head(config(target, version)), layout="speculators", base="some/target")
        found = json.loads((folder / "config.json").read_text())
        assert found["speculators_model_type"] == found["speculators_config"]["algorithm"] == kind
        assert found["speculators_config"]["proposal_methods"][0]["speculative_tokens"] > 0
        assert found["speculators_config"]["verifier"]["name_or_path"] == "some/target"
        assert found["architectures"] == [f"{kind.capitalize()}Speculator"]
        more = {"target_hidden_size": None, "embed_requires_grad": False, "speculators_version": "0.3.0"}
        assert checkpoint.load(rewritten(folder, None, **more), target).config.version == version


@pytest.mark.parametrize(("layout", "version"), [("eagle", 1), ("eagle", 3), ("speculators", 3)])
def test_a_pickle_of_a_whole_model_is_read(target: ModelConfig, tmp_path: Path, layout: str, version: int) -> None:
    """The EAGLE repository's own file is a pickle, and some heads were saved as a part of a model."""
    made = random_head(config(target, version))
    file = checkpoint.save(tmp_path, made, layout=layout)
    torch.save({f"model.{name}": x for name, x in load_file(file).items()}, tmp_path / "pytorch_model.bin")
    file.unlink()
    check(checkpoint.load(tmp_path, target), made)


def test_foreign_layouts_with_contradictions_are_rejected(target: ModelConfig, tmp_path: Path) -> None:
    one, shared = random_head(config(target, 1)), tensors_of(target)
    checkpoint.save(tmp_path / "nxd", one, layout="nxd", target=shared)
    with pytest.raises(CheckpointError, match="output layer"):
        checkpoint.load(tmp_path / "nxd", target, head=shared.head + 1)
    checkpoint.save(tmp_path / "spec", one, layout="speculators")
    with pytest.raises(UnknownArchitectureError, match="layernorms"):
        checkpoint.load(rewritten(tmp_path / "spec", None, layernorms=True), target)
    with pytest.raises(ConfigurationError, match="layout: expected one of"):
        checkpoint.save(tmp_path / "x", one, layout="medusa")
    with pytest.raises(ConfigurationError, match="give the target"):
        checkpoint.save(tmp_path / "x", one, layout="nxd")
    with pytest.raises(CheckpointError, match="expected a folder"):
        checkpoint.load(tmp_path / "nowhere", target)


def test_conversion_keeps_the_head_and_its_embedding(target: ModelConfig, tmp_path: Path) -> None:
    embedding = torch.randn(VOCABULARY, target.hidden_size)
    made = random_head(config(target, 3))
    checkpoint.save(tmp_path / "a", Checkpoint(made.config, made.weights, embedding), layout="eagle")
    checkpoint.convert(tmp_path / "a", tmp_path / "b", target, layout="speculators")
    found = checkpoint.load(tmp_path / "b", target)
    check(found, made)
    assert found.embedding is not None and torch.equal(found.embedding, embedding)


def test_values_beyond_the_number_format_are_rejected(workshop: Workshop, target: ModelConfig, tmp_path: Path) -> None:
    """1e5 is a number in float32 and infinity in float16."""
    made = random_head(config(target, 3))
    made.weights["norm.weight"][3] = 1e5
    checkpoint.save(tmp_path, made)
    EagleDrafter.from_pretrained(tmp_path, workshop.decoder(slots=1))
    with pytest.raises(WeightValueError, match=r"norm.weight contains values beyond torch.float16"):
        EagleDrafter.from_pretrained(tmp_path, workshop.decoder(slots=1, amp="f16"))
