"""GGUF files of every family: configuration and weights are those of the checkpoint that was converted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from transformers import PreTrainedModel

from paceline.core.errors import CheckpointError, UnknownArchitectureError
from paceline.decoder.gguf.architectures import ARCHITECTURES
from paceline.decoder.gguf.header import read_header
from paceline.decoder.models.config import ModelConfig
from paceline.decoder.models.registry import MODEL_FAMILIES
from paceline.decoder.weights import checkpoint
from paceline.decoder.weights.formats import WeightFormat
from paceline.decoder.weights.open import open_weight_file
from paceline.decoder.weights.quantize import QuantizedTensor
from tests.decoder.families import VOCABULARY
from tests.decoder.gguf_families import CASES, write
from tests.decoder.gguf_files import finish

TEXT = torch.randint(0, VOCABULARY, (1, 30), generator=torch.Generator().manual_seed(1))
every_case = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PreTrainedModel, Path, Path]]:
    place = tmp_path_factory.mktemp("families")
    folders = {name: place / name.replace(" ", "_") for name in CASES}
    return {name: (*write(folders[name], case), folders[name]) for name, case in CASES.items()}


def test_every_architecture_has_a_case() -> None:
    rows = {name for row in ARCHITECTURES.values() for name in row.families}
    assert rows <= set(MODEL_FAMILIES)
    without = {  # compared with llama.cpp alone, in test_llama_cpp.py
        "mpt", "olmo", "dots1", "minimax-m2", "deepseek2", "llama4", "mistral3", "apertus", "falcon", "gemma3n",
        "gemma4",
    }  # fmt: skip
    assert {case.architecture for case in CASES.values()} == set(ARCHITECTURES) - without


@every_case
def test_gguf_configuration_and_weights_equal_the_checkpoints(
    files: dict[str, tuple[PreTrainedModel, Path, Path]], name: str
) -> None:
    _, path, folder = files[name]
    found, expected = ModelConfig.from_pretrained(path), ModelConfig.from_pretrained(folder)
    ids = {"eos_token_ids": (), "bos_token_id": None, "pad_token_id": None, "hidden_act": ""}
    flags = {"attention_bias": False, "mlp_bias": False}  # what they decide is in the blueprint
    found, expected = (replace(one, **ids, **flags) for one in (found, expected))  # type: ignore[arg-type]
    assert _plain(found) == _plain(expected)
    weights = checkpoint.load_weights(path, found, torch.float32)
    wanted = checkpoint.load_weights(folder, expected, torch.float32)
    assert weights.keys() == wanted.keys()
    for label, tensor in weights.items():
        assert isinstance(tensor, torch.Tensor)
        lifted = "gemma" in name or name == "nemotron"  # whose norms are stored plus one, rounded to float32
        torch.testing.assert_close(tensor, wanted[label], rtol=0, atol=1.2e-7 if lifted else 0)


def _plain(config: ModelConfig) -> ModelConfig:
    """The same where no window is a window of 0, and a rope type reads only what it knows."""
    plan = config.blueprint
    if not any(plan.windows):
        plan = replace(plan, windows=())
    if not any(plan.unrotated):
        plan = replace(plan, unrotated=())
    own = config.max_position_embeddings
    rope = replace(config.rope, max_position_embeddings=own, original_max_position_embeddings=own)
    if rope.type == "yarn" and rope.factor is not None and rope.attention_factor is None:
        rope = replace(rope, attention_factor=0.1 * math.log(rope.factor) + 1.0)
    local = config.local_rope and replace(config.local_rope, original_max_position_embeddings=own)
    return replace(config, blueprint=plan, rope=rope, local_rope=local)


@pytest.mark.parametrize("name", ["mixtral", "gptneox", "gpt2", "phi3"])
def test_packed_formats_equal_dequantised_ones(tmp_path: Path, name: str) -> None:
    """Rows of experts, of queries in another order, and of matrices that a checkpoint has the other way round."""
    sizes: dict[str, object] = {} if name == "gpt2" else {"intermediate_size": 64}  # whole blocks
    sizes |= {"head_dim": 8} if name in ("mixtral", "phi3") else {}
    _, path = write(tmp_path / "model", replace(CASES[name], changes=sizes), Kind.Q8_0)
    config = ModelConfig.from_pretrained(path)
    kept = checkpoint.load_weights(path, config, torch.float32, quantization="gguf")
    plain = checkpoint.load_weights(path, config, torch.float32)
    turned = {label for label, spec in MODEL_FAMILIES[config.model_type].tensors(config).items() if spec.transposed}
    found = [label for label, tensor in kept.items() if isinstance(tensor, QuantizedTensor) and "embed" not in label]
    for label in found:
        matrix, expected = kept[label], plain[label]
        assert isinstance(matrix, QuantizedTensor) and isinstance(expected, torch.Tensor)
        if "layers" in label or ".h." in label:
            assert matrix.format is WeightFormat.Q8_0
            assert torch.equal(matrix.dequantize(), expected.t() if label in turned else expected), label
    assert len(found) >= 4 * config.num_layers


def _dequantised() -> list[Kind]:
    found = []
    for kind in Kind:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales may be anything
@pytest.mark.parametrize("kind", _dequantised(), ids=lambda kind: kind.name)
def test_every_type_equals_the_gguf_packages_dequantisation(tmp_path: Path, kind: Kind) -> None:
    """Tensors of experts are fused too: a matrix of each in one tensor."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (4, 6, 256 // numbers * size), dtype=np.uint8)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("expert_count", 4), ("expert_used_count", 2)):
        writer.add_uint32(f"llama.{key}", value)
    for key in ("embedding_length", "attention.head_count"):
        writer.add_uint32(f"llama.{key}", 4)
    writer.add_tensor("blk.0.ffn_up_exps.weight", blocks, raw_dtype=kind)
    finish(writer)
    wanted = gguf.dequantize(blocks, kind)
    with open_weight_file(path) as source:
        for expert in range(4):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.w3.weight"
            np.testing.assert_array_equal(source.read(name).numpy(), wanted[expert])
            np.testing.assert_array_equal(source.read_range(name, (2, 5), dim=0).numpy(), wanted[expert, 2:5])
            np.testing.assert_array_equal(source.read_range(name, (9, 70), dim=1).numpy(), wanted[expert, :, 9:70])


def test_fused_tensors_are_split(tmp_path: Path) -> None:
    """The converter may write query, key and value as one."""
    _, path = write(tmp_path / "model", CASES["mixtral"])
    header, writer = read_header(path), gguf.GGUFWriter(tmp_path / "fused.gguf", "llama")
    reader = gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if key.startswith("llama."):
            writer.add_key_value(key, field.contents(), field.types[0])
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    for layer in range(3):
        sides = [tensors.pop(f"blk.{layer}.attn_{side}.weight") for side in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(sides)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    assert header.tensors.keys() != read_header(tmp_path / "fused.gguf").tensors.keys()
    with open_weight_file(path) as apart, open_weight_file(tmp_path / "fused.gguf") as fused:
        assert apart.infos() == fused.infos()
        assert all(torch.equal(apart.read(name), fused.read(name)) for name in apart.infos())


def test_a_split_gguf_model_loads_as_one(tmp_path: Path) -> None:
    _, path = write(tmp_path / "model", CASES["qwen2"])
    reader = gguf.GGUFReader(path)
    for number, some in enumerate((reader.tensors[:9], reader.tensors[9:20], reader.tensors[20:])):
        writer = gguf.GGUFWriter(tmp_path / f"part-{number + 1:05d}-of-00003.gguf", "qwen2")
        for key, value in (("no", number), ("count", 3)):
            writer.add_uint16(f"split.{key}", value)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for key, field in reader.fields.items():
            if number == 0 and key.startswith("qwen2."):
                writer.add_key_value(key, field.contents(), field.types[0])
        for tensor in some:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        finish(writer)
    whole = checkpoint.load_weights(path, ModelConfig.from_pretrained(path), torch.float32)
    for number in (1, 3):  # any part names all of them
        part = tmp_path / f"part-{number:05d}-of-00003.gguf"
        found = checkpoint.load_weights(part, ModelConfig.from_pretrained(part), torch.float32)
        assert all(torch.equal(tensor, whole[name]) for name, tensor in found.items())  # type: ignore[arg-type]
    (tmp_path / "part-00002-of-00003.gguf").rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(CheckpointError, match=r"part-00002-of-00003.gguf: the file does not exist"):
        ModelConfig.from_pretrained(tmp_path / "part-00001-of-00003.gguf")
    with pytest.raises(
        CheckpointError, match=r"expected a name .* for one of 3 parts of a model, got 'elsewhere.gguf'"
    ):
        ModelConfig.from_pretrained(tmp_path / "elsewhere.gguf")


EXPERT = "model.layers.0.experts."
PARTS: dict[str, tuple[str, dict[str, int], dict[str, tuple[int, ...]], Callable[..., dict[str, Any]]]] = {
    "latent": (
        "deepseek2",
        {"attention.key_length_mla": 5, "rope.dimension_count": 2},
        {"blk.0.attn_k_b.weight": (2, 6, 3), "blk.0.attn_v_b.weight": (2, 4, 6)},
        lambda k, v: {"model.layers.0.self_attn.kv_b_proj.weight": np.concatenate([k[0].T, v[0], k[1].T, v[1]])},
    ),
    "gates of experts": (
        "gemma4",
        {},
        {"blk.0.ffn_gate_up_exps.weight": (2, 6, 4), "blk.0.ffn_down_exps.scale": (2,)},
        lambda both, scale: {
            **{f"{EXPERT}{e}.gate_proj.weight": both[e, :3] for e in range(2)},
            **{f"{EXPERT}{e}.up_proj.weight": both[e, 3:] for e in range(2)},
            "model.layers.0.router.per_expert_scale": scale,
        },
    ),
    "streams": (
        "gemma3n",
        {},
        {"altup_proj.weight": (3, 4, 4), "blk.0.altup_correct_scale.weight": (4,)},
        lambda streams, scale: {
            **{f"model.altup_projections.{s}.weight": streams[s] for s in range(3)},
            "model.layers.0.altup.correct_output_scale": scale,
        },
    ),
    "two norms": (
        "falcon",
        {},
        {"blk.0.attn_norm.weight": (4,), "blk.0.attn_norm_2.weight": (4,)},
        lambda one, two: {
            "transformer.h.0.post_attention_layernorm.weight": one, "transformer.h.0.input_layernorm.weight": two,
        },
    ),
}  # fmt: skip
"""By architecture: keys and tensors of a file, and the tensors of a checkpoint that these mean."""


@pytest.mark.parametrize("name", PARTS)
def test_tensors_of_a_file_are_cut_and_joined_as_a_checkpoint_has_them(tmp_path: Path, name: str) -> None:
    architecture, keys, shapes, meant = PARTS[name]
    draw, writer = np.random.default_rng(0), gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
    for key, value in {"embedding_length": 4, "attention.head_count": 2, **keys}.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    held = {label: draw.random(shape, np.float32) for label, shape in shapes.items()}
    for label, tensor in held.items():
        writer.add_tensor(label, tensor)
    finish(writer)
    wanted = meant(*held.values())
    with open_weight_file(tmp_path / "model.gguf") as source:
        assert source.infos().keys() == wanted.keys()
        for label, tensor in wanted.items():
            assert source.infos()[label].shape == tensor.shape
            np.testing.assert_array_equal(source.read(label).numpy(), tensor)
            first, last = len(tensor) // 4, len(tensor) * 2 // 3
            np.testing.assert_array_equal(source.read_range(label, (first, last), dim=0).numpy(), tensor[first:last])
            if tensor.ndim == 2:
                np.testing.assert_array_equal(source.read_range(label, (1, 3), dim=1).numpy(), tensor[:, 1:3])
            assert source.read_quantized(label) is None  # type: ignore[attr-defined]


def test_numbers_of_the_metadata_are_tensors(tmp_path: Path) -> None:
    """The learned numbers of Apertus' activation; its constants are checked."""
    for beta in (0.5, 0.7):
        path = tmp_path / f"{beta}.gguf"
        writer = gguf.GGUFWriter(path, "apertus")
        sizes = dict.fromkeys(("embedding_length", "block_count", "feed_forward_length", "vocab_size"), 4)
        for key, value in {**sizes, "attention.head_count": 2, "context_length": 64}.items():
            writer.add_uint32(f"apertus.{key}", value)
        writer.add_float32("apertus.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_array("xielu.alpha_p", [0.25, 0.5])
        writer.add_array("xielu.beta", [0.5, beta])
        writer.add_tensor("output_norm.weight", np.ones(2, np.float32))
        finish(writer)
    with open_weight_file(tmp_path / "0.5.gguf") as source:
        assert source.read("model.layers.1.mlp.act_fn.alpha_p").tolist() == [0.5]
    ModelConfig.from_pretrained(tmp_path / "0.5.gguf")
    with pytest.raises(UnknownArchitectureError, match=r"xielu.beta: expected 0.5 in every layer"):
        ModelConfig.from_pretrained(tmp_path / "0.7.gguf")
