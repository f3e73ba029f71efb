"""Random MTP layers, assistants and MLP speculators for any target, and rounds counted by a plain loop; no tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
import transformers  # by attribute: 4.57, which torch_xla's tests have, lacks Gemma 4
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.core.types import DraftShape
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig
from paceline.draft.gemma4_assistant import AssistantConfig, AssistantDrafter, AssistantHead, layers_of
from paceline.draft.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorDrafter
from paceline.draft.mtp import SPECULATORS, MtpConfig, MtpDrafter, MtpHead, MtpLayout


def random_weights(shapes: dict[str, tuple[int, ...]], *, seed: int = 1) -> dict[str, Tensor]:
    """Values that are neither zero nor one anywhere, so that no mix-up is hidden."""
    torch.manual_seed(seed)
    return {
        name: torch.randn(shape) * (0.3 if len(shape) > 1 else 0.2) + (1.0 if "norm" in name else 0.0)
        for name, shape in shapes.items()
    }


def mtp_config(hidden_size: int, vocab_size: int, layout: MtpLayout = SPECULATORS) -> MtpConfig:
    """A small layer of the layout's family."""
    fields = {
        "model_type": layout.families[0], "hidden_size": hidden_size, "vocab_size": vocab_size,
        "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "max_position_embeddings": 128,
    }  # fmt: skip
    return MtpConfig(layout, ModelConfig.from_fields(Fields(fields, "a random layer")))


def mtp(target: SamplingDecoder, k: int | DraftShape, layout: MtpLayout = SPECULATORS) -> MtpDrafter:
    """A drafter with a random layer."""
    made = mtp_config(target.config.hidden_size, target.config.vocab_size, layout)
    weights = {name: x.to(target.options.dtype) for name, x in random_weights(made.shapes()).items()}
    head = MtpHead(made, weights, shared=target.body.shared, kernels=target.backend.kernels, options=target.options)
    return MtpDrafter(head, target, k)


def mlp_speculator(
    folder: Path,
    target: SamplingDecoder,
    k: int,
    *,
    tied: bool = False,
    scale_input: bool = True,
    draft_tree: str = "chain",
) -> MlpSpeculatorDrafter:
    """A drafter with random stages, through the disk, under the names of published files."""
    shape = target.config.hidden_size, 24, target.config.vocab_size
    sizes = MlpSpeculatorConfig(max(k, 2), *shape, tied=tied, scale_input=scale_input)
    weights = random_weights(sizes.shapes())
    for name in weights:
        if name.startswith("head"):
            weights[name][FREQUENT:] *= 0.05
    save_mlp_speculator(folder, sizes, weights)
    return MlpSpeculatorDrafter.from_pretrained(folder, target, k, draft_tree=draft_tree)


def save_mlp_speculator(folder: Path, sizes: MlpSpeculatorConfig, weights: dict[str, Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "torch_dtype": "float16",
        "emb_dim": sizes.hidden_size, "inner_dim": sizes.inner_size, "vocab_size": sizes.vocab_size,
        "n_candidates": 5, "n_predict": sizes.stages, "top_k_tokens_per_head": [1] * sizes.stages,
        "scale_input": sizes.scale_input, "tie_weights": sizes.tied,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    save_file({f"speculator.{name}": x for name, x in weights.items()}, folder / "model.safetensors")


def save_mtp(folder: Path, target: ModelConfig) -> dict[str, Tensor]:
    """Write a random layer for a Qwen3 as the speculators library does; return its tensors without their prefix."""
    folder.mkdir(parents=True, exist_ok=True)
    layer = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
        "head_dim": target.head_dim, "hidden_size": target.hidden_size, "intermediate_size": target.intermediate_size,
        "num_hidden_layers": target.num_layers, "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads, "vocab_size": target.vocab_size,
        "layer_types": ["full_attention"] * target.num_layers, "max_window_layers": 28, "sliding_window": None,
        "use_sliding_window": False, "max_position_embeddings": target.max_position_embeddings,
        "rms_norm_eps": target.rms_norm_eps, "tie_word_embeddings": False,
        "rope_parameters": {"rope_theta": target.rope.theta, "rope_type": "default"},
    }  # fmt: skip
    config = {
        "architectures": ["MTPDraftModel"], "auto_map": {"": "config.MTPSpeculatorConfig"}, "dtype": "float32",
        "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "transformer_layer_config": layer,
        "speculators_config": {"algorithm": "mtp", "proposal_methods": [{"speculative_tokens": 3}]},
        "speculators_model_type": "mtp", "speculators_version": "0.9.0", "transformers_version": "5.19.0",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    weights = random_weights(MtpConfig.read(folder, target).shapes())
    copies = {"verifier_lm_head.weight": torch.zeros(target.vocab_size, target.hidden_size)}
    save_file({**{SPECULATORS.prefix + name: x for name, x in weights.items()}, **copies}, folder / "model.safetensors")
    return weights


def assistant_config(target: ModelConfig, *, clusters: int = 0) -> AssistantConfig:
    """Layers of two kinds over the last layer of any target, of whose tokens some clusters are drafted."""
    fields = {
        "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "vocab_size": target.vocab_size,
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9,
        "num_attention_heads": target.num_heads, "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim, "global_head_dim": target.head_dim, "hidden_size_per_layer_input": 0,
    }  # fmt: skip
    last = target.num_layers - 1
    return AssistantConfig(
        layers_of(Fields(fields, "a random assistant")), (last, last), target.hidden_size, clusters, clusters // 2
    )


def assistant_weights(config: AssistantConfig) -> dict[str, Tensor]:
    weights = random_weights({name: spec.shape for name, spec in config.tensors().items()})
    order = torch.randperm(config.layer.vocab_size).to(torch.int32)
    return {**weights, **({"order": order.view(config.clusters, -1)} if config.clusters else {})}


def assistant(target: SamplingDecoder, k: int | DraftShape) -> AssistantDrafter:
    """A drafter with a random assistant."""
    made = assistant_config(target.config, clusters=12)
    types = {torch.float32: target.options.dtype}
    weights = {name: x.to(types.get(x.dtype, x.dtype)) for name, x in assistant_weights(made).items()}
    return AssistantDrafter(AssistantHead(made, weights, target.body), target, k)


def save_assistant(folder: Path, target: ModelConfig, **changes: object) -> transformers.Gemma4AssistantForCausalLM:
    """Write a random assistant for a Gemma 4 as transformers does; return its module."""
    full = target.of_layer(0)
    text = {
        "vocab_size": target.vocab_size, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_attention_heads": 4,
        "num_key_value_heads": target.num_kv_heads, "num_global_key_value_heads": full.num_kv_heads,
        "attention_k_eq_v": full.num_kv_heads != target.num_kv_heads, "head_dim": target.head_dim,
        "global_head_dim": full.head_dim, "sliding_window": max(target.blueprint.windows),
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 3,
    }  # fmt: skip
    sizes = {"num_centroids": 12, "centroid_intermediate_top_k": 5, "backbone_hidden_size": target.hidden_size}
    text_config = transformers.Gemma4TextConfig(**text)
    config = transformers.Gemma4AssistantConfig(text_config=text_config, **{**sizes, **changes})
    torch.manual_seed(1)
    made = transformers.Gemma4AssistantForCausalLM(config).eval()
    for name, x in made.named_parameters():
        torch.nn.init.normal_(x, 1.0 if "norm" in name else 0.0, 0.2)
    made.model.embed_tokens.weight.data[FREQUENT:] *= 0.05
    for name, buffer in made.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.7)
        if name.endswith("token_ordering"):
            buffer.copy_(torch.randperm(target.vocab_size))
    made.save_pretrained(folder)
    return made


FREQUENT = 6
"""Ids that a target of `save_narrowed` writes nearly always, so that random heads are right now and then."""


def save_narrowed(source: Path, folder: Path, more: dict[str, Tensor] | None = None, **config: object) -> Path:
    """Copy a checkpoint, with an output layer that prefers a few ids, more tensors, and other keys of a config.json."""
    folder.mkdir(parents=True)
    fields = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"][FREQUENT:] *= 0.05
    save_file({**tensors, **(more or {})}, folder / "model.safetensors")
    return folder


def simulated_rounds(text: list[int], begin: int, k: int, draft: Callable[[list[int]], list[int]]) -> list[int]:
    """Accepted drafts of each round of a text whose first ``begin`` tokens are known, while k more are known."""
    accepted = []
    while begin + k <= len(text):
        drafted = draft(text[:begin])
        right = next((i for i, token in enumerate(drafted) if token != text[begin + i]), k)
        accepted.append(right)
        begin += right + 1
    return accepted


TREE = "tree:-1,-1,0,0,1,2"


def simulated_tree_rounds(text: list[int], begin: int, logits: Callable[[list[int], list[int]], Tensor]) -> list[int]:
    """Accepted levels of each round with `TREE`, from token ``begin`` of a text on. ``logits`` [V]: after a
    known text and the path of a node; child r of a node is the token of rank r.
    """
    accepted = list[int]()
    while begin + 3 <= len(text):
        paths: list[list[int]] = []
        for parent, rank in zip((-1, -1, 0, 0, 1, 2), (0, 1, 0, 1, 0, 0), strict=True):
            path = [] if parent < 0 else paths[parent]
            paths.append([*path, int(logits(text[:begin], path).topk(2).indices[rank])])
        right = [len(path) for path in paths if path == text[begin : begin + len(path)]]
        accepted.append(max([0, *right]))
        begin += accepted[-1] + 1
    return accepted


def rounds(generator: SpeculativeGenerator, prompt: list[int], new: int) -> tuple[list[int], list[int]]:
    """A greedy text, and the accepted drafts of each of its rounds."""
    outputs = list(generator.stream([prompt], max_new_tokens=new))
    text = [*prompt, *(token for output in outputs for token in output.tokens)]
    return text, [output.accepted for output in outputs if output.index == 0][1:]
