"""Random DFlash heads for the tiny target, in the layouts in which they are published; no tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline import SpeculativeGenerator
from paceline.auto import SamplingDecoder
from paceline.decoder.json_fields import Fields
from paceline.decoder.models.config import ModelConfig
from paceline.draft.dflash.config import parse
from paceline.draft.dflash.drafter import DFlashDrafter
from paceline.draft.drafted_tokens import DraftedTokens
from tests.draft.random_heads import random_weights
from tests.sampled import run, texts

MASK, BLOCK = 7, 9
VARIANTS: dict[str, dict[str, Any]] = {
    "DFlash": {"architectures": ["DFlashDraftModel"]},
    "DFlash 2": {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "dflash_config": {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5},
    },
    "DSpark": {"architectures": ["Qwen3DSparkModel"], "markov_rank": 6, "markov_head_type": "rnn"},
}
"""What distinguishes the files of z-lab and DeepSpec."""


class Configured(Protocol):
    """A decoder, its body, or whatever knows the sizes of a target."""

    @property
    def config(self) -> ModelConfig: ...


def fields(target: Configured, variant: str, **changes: object) -> dict[str, Any]:
    """The config.json of a head of two layers, the first of which slides."""
    sizes = target.config
    own = VARIANTS[variant]
    block = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [-1, *range(sizes.num_layers - 1)]}
    return {
        "model_type": "qwen3", "hidden_size": sizes.hidden_size, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": sizes.vocab_size,
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 4096,
        "layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 9,
        "num_target_layers": sizes.num_layers,
        **own,
        "dflash_config": {**block, **own.get("dflash_config", {})},
        **changes,
    }  # fmt: skip


def tensors(target: Configured, told: dict[str, Any], *, seed: int = 1) -> dict[str, Tensor]:
    return random_weights(parse(Fields(told, "config.json"), target.config).shapes(), seed=seed)


def write(folder: Path, told: dict[str, Any], made: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(told))
    save_file(made, folder / "model.safetensors")
    return folder


def drafter(
    folder: Path, target: SamplingDecoder, variant: str, k: int, *, draft_tree: str = "chain", **changes: object
) -> DFlashDrafter:
    """A drafter with a random head, through the disk."""
    told = fields(target, variant, **changes)
    return DFlashDrafter.from_pretrained(write(folder, told, tensors(target, told)), target, k, draft_tree=draft_tree)


Round = tuple[list[int], Tensor]
"""Drafts of a round, and the logits [k, V] of their positions."""


def rounds(made: DFlashDrafter, target: SamplingDecoder, prompt: list[int], new: int) -> tuple[list[int], list[Round]]:
    """The text that a drafter on the backend eager drafts for, greedily, and its rounds."""
    found, logits, propose, add = list[Round](), list[Tensor](), made.propose, DraftedTokens.choose

    def noted(*inputs: Any) -> Any:
        logits.clear()
        proposal = propose(*inputs)
        found.append((proposal.tokens[0].tolist(), torch.cat(logits, 1)[0]))
        return proposal

    def chosen(self: DraftedTokens, values: Tensor, positions: Tensor) -> None:
        logits.append(values)
        add(self, values, positions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "propose", noted)
        patch.setattr(DraftedTokens, "choose", chosen)
        generator = SpeculativeGenerator(made, target, fused=False)
        return texts(run(generator, [prompt], max_new_tokens=new))[0], found


def accepted(text: list[int], start: int, drafts: list[int]) -> int:
    """How many drafts after the first ``start`` tokens of a greedy text are right."""
    wanted = text[start : start + len(drafts)]
    return next((i for i, one in enumerate(drafts) if i >= len(wanted) or one != wanted[i]), len(drafts))
