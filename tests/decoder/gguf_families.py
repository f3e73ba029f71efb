"""Tiny models of every family as GGUF files, written as llama.cpp's converter does it; no tests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import PreTrainedModel

from tests.decoder.families import network
from tests.decoder.gguf_files import add, finish

Arrays = dict[str, NDArray[Any]]

PAIRS = ("llama", "smollm3", "granite", "granitemoe", "arcee")
"""Architectures of which the converter orders the rows of queries and keys: llama.cpp rotates adjacent ones."""


@dataclass(frozen=True)
class Case:
    """A file: its architecture, the model of `FAMILIES` with some changes, and keys beyond those of all."""

    architecture: str
    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, object] = field(default_factory=dict)


_HEAD = 12  # the width of a head in `FAMILIES`, where it is none of hidden_size / num_attention_heads
_YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24}
_SLIDES = {"attention.sliding_window": 11, "attention.sliding_window_pattern": [False, True, True]}
_FACTORS = {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.7, "logit_scale": 4.0}
_COHERE = {"logit_scale": 0.0625, "rope.scaling.type": "none"}


def experts(count: int, size: int | None = None, **more: object) -> dict[str, object]:
    """Keys of a mixture of which two experts are used."""
    sizes = {"feed_forward_length": size} if size else {}
    return {f"expert_{key}": value for key, value in {"count": count, "used_count": 2, **sizes, **more}.items()}


CASES: dict[str, Case] = {
    "mixtral": Case("llama", "mixtral", keys=experts(4)),
    "qwen2": Case("qwen2", "qwen2"),
    "qwen2moe": Case("qwen2moe", "qwen2 moe", keys=experts(5, 24, shared_feed_forward_length=20)),
    "qwen3": Case("qwen3", "qwen3"),
    "qwen3moe": Case("qwen3moe", "qwen3 moe", keys=experts(6, 24)),
    "phi2": Case("phi2", "phi", keys={"rope.dimension_count": 4}),
    "phi3": Case("phi3", "phi3", keys={"attention.sliding_window": 11, "rope.scaling.original_context_length": 96}),
    "phi3 partial": Case("phi3", "phi3 partial", keys={"attention.sliding_window": 0, "rope.dimension_count": 4}),
    "gemma": Case("gemma", "gemma"),
    "gemma2": Case(
        "gemma2", "gemma2", {"query_pre_attn_scalar": _HEAD},
        {"attention.sliding_window": 11, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": Case(
        "gemma3", "gemma3", {"query_pre_attn_scalar": _HEAD},
        {**_SLIDES, "final_logit_softcapping": 3.0, "rope.freq_base_swa": 10000.0},
    ),
    "smollm3": Case(
        "smollm3", "smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 4, "use_sliding_window": False}
    ),
    "granite": Case("granite", "granite", keys=_FACTORS),
    "seed_oss": Case("seed_oss", "seed oss"),
    "ernie4_5": Case("ernie4_5", "ernie"),
    "arcee": Case("arcee", "arcee"),
    "olmo2": Case("olmo2", "olmo2"),
    "olmo3": Case("olmo2", "olmo3", keys={**_SLIDES, **_YARN}),
    "gpt-oss": Case("gpt-oss", "gpt oss", {"intermediate_size": 32}, {**experts(5, 32), **_SLIDES, **_YARN}),
    "glm4moe": Case(
        "glm4moe", "glm4 moe",
        keys={
            **experts(6, 16, shared_count=2, weights_scale=1.5, weights_norm=True, gating_func=2),
            "leading_dense_block_count": 1, "rope.dimension_count": 6,
        },
    ),
    "granitemoe": Case("granitemoe", "granite moe", keys={**experts(5), **_FACTORS}),
    "phimoe": Case("phimoe", "phi moe", {"router_jitter_noise": 0.01}, {**experts(5), "attention.sliding_window": 11}),
    "ernie4_5-moe": Case(
        "ernie4_5-moe", "ernie moe", {"moe_layer_end_index": -1},
        {**experts(5, 16, shared_count=1), "leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
    ),
    "nemotron": Case("nemotron", "nemotron", keys={"rope.dimension_count": 4, "rope.scaling.type": "none"}),
    "hunyuan-dense": Case("hunyuan-dense", "hunyuan", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "olmoe": Case("olmoe", "olmoe", keys=experts(5)),
    "exaone4": Case("exaone4", "exaone4", keys={**_SLIDES, "attention.sliding_window_pattern": [True, False, True]}),
    "chatglm": Case("chatglm", "glm", keys={"rope.dimension_count": 6}),
    "glm4": Case("glm4", "glm4", keys={"rope.dimension_count": 6}),
    "command-r": Case("command-r", "cohere", keys=_COHERE),
    "cohere2": Case("cohere2", "cohere2", keys={**_SLIDES, **_COHERE}),
    "starcoder": Case("starcoder", "bigcode"),
    "gpt2": Case("gpt2", "gpt2"),
    "gptneox": Case("gptneox", "neox", keys={"rope.dimension_count": 2, "use_parallel_residual": True}),
    "gptneox serial": Case("gptneox", "neox serial", keys={"rope.dimension_count": 2, "use_parallel_residual": False}),
    "bloom": Case("bloom", "bloom"),
    "starcoder2": Case("starcoder2", "starcoder2", {"sliding_window": None}),
    "stablelm": Case("stablelm", "stablelm", keys={"rope.dimension_count": 2}),
    "stablelm parallel": Case("stablelm", "stablelm parallel", keys={"rope.dimension_count": 2}),
}  # fmt: skip


def write(folder: Path, case: Case, kind: Kind = Kind.F32) -> tuple[PreTrainedModel, Path]:
    """The model, saved in ``folder``, and its GGUF file: matrices of layers in one type, the rest in F32."""
    made = network(case.name, **case.changes)
    made.save_pretrained(folder)
    path = folder.with_suffix(".gguf")
    writer = gguf.GGUFWriter(path, case.architecture)
    for key, value in {**_sizes(made.config), **case.keys}.items():
        add(writer, f"{case.architecture}.{key}", value)
    for name, tensor in _tensors(load_file(folder / "model.safetensors"), made.config, case).items():
        quantised = kind is not Kind.F32 and tensor.ndim > 1 and name.startswith("blk")
        data = gguf.quants.quantize(np.ascontiguousarray(tensor), kind) if quantised else tensor
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=kind if quantised else None)
    finish(writer)
    return made, path


def _sizes(config: Any) -> dict[str, object]:
    """Keys that nearly all have."""
    heads = config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("full_attention", rope).get("rope_theta")
    epsilons = {
        "attention.layer_norm_rms_epsilon": ["rms_norm_eps"],
        "attention.layer_norm_epsilon": ["layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"],
    }
    head_dim = getattr(config, "head_dim", None)
    return {
        "context_length": getattr(config, "max_position_embeddings", None) or config.seq_length,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "vocab_size": config.vocab_size,
        "attention.head_count": heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or heads,
        **({"rope.freq_base": float(theta)} if theta else {}),
        **({f"attention.{side}_length": head_dim for side in ("key", "value")} if head_dim else {}),
        **{key: getattr(config, name) for key, names in epsilons.items() for name in names if hasattr(config, name)},
    }


def _tensors(saved: Arrays, config: Any, case: Case) -> Arrays:
    kind = case.architecture
    table = gguf.get_tensor_name_map(
        next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind), config.num_hidden_layers
    )
    made: Arrays = {}
    for name, tensor in _stacked(saved).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if kind == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
            tensor = tensor.T
        if "query_key_value" in name:
            sides = tensor.reshape(config.num_attention_heads, 3, -1, *tensor.shape[1:])
            tensor = sides.swapaxes(0, 1).reshape(tensor.shape)
        if kind in PAIRS and (side := re.search(r"\.([qk])_proj\.", name)):
            heads = config.num_attention_heads if side[1] == "q" else config.num_key_value_heads
            tensor = tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        if (kind.startswith("gemma") or kind == "nemotron") and name.endswith("norm.weight"):
            tensor = tensor + np.float32(1)
        label = table.get_name(name.removeprefix("transformer."), (".weight", ".bias")) or table.get_name(
            name, (".weight", ".bias")
        )
        assert label is not None, name
        made[label] = tensor
    return made


def _apart(name: str, tensor: NDArray[Any]) -> Arrays:
    """Gate and up, and the matrices of gpt-oss as [experts, rows, columns]."""
    if found := re.fullmatch(r"(.*mlp\.experts)\.(gate_up|down)_proj(_bias)?", name):  # gpt-oss: rows in turns
        kind = "bias" if found[3] else "weight"
        turned = tensor if found[3] else tensor.swapaxes(1, 2)
        if found[2] == "down":
            return {f"{found[1]}.down_proj.{kind}": turned}
        return {f"{found[1]}.{side}_proj.{kind}": turned[:, at::2] for at, side in enumerate(("gate", "up"))}
    if name.endswith("input_linear.weight"):
        gate, up = np.split(tensor, 2, 1)
        prefix = name.removesuffix("input_linear.weight")
        return {f"{prefix}experts.w1.weight": gate, f"{prefix}experts.w3.weight": up}
    if name.endswith("output_linear.weight"):
        return {name.replace("output_linear.weight", "experts.w2.weight"): tensor}
    if name.endswith("self_attn.sinks"):
        return {f"{name}.weight": tensor}
    if name.endswith("e_score_correction_bias"):
        return {f"{name.replace('e_score_correction_bias', 'e_score_correction')}.bias": tensor.reshape(-1)}
    return {name: tensor}


def _stacked(saved: Arrays) -> Arrays:
    made: Arrays = {}
    saved = {label: tensor for name, one in saved.items() for label, tensor in _apart(name, one).items()}
    groups: dict[str, list[NDArray[Any]]] = {}
    for name in sorted(saved, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")]):
        expert = re.fullmatch(r"(.*\.experts)\.\d+\.(.*)", name)
        if expert:
            groups.setdefault(f"{expert[1]}.{expert[2]}", []).append(saved[name])
        else:
            made[name] = saved[name]
    return made | {name: np.stack(tensors) for name, tensors in groups.items()}
