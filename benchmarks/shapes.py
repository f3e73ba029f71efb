"""Models with random weights, and windows of rows on them: what formats, fused, load, long and sampling measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from paceline.auto import SamplingDecoder
from paceline.core.acceptance.match import Match
from paceline.core.types import Commit, DraftShape, Proposal, RoundLimits, SamplingTensors
from paceline.target.verifier import CompiledVerifier

POSITIONS, TEXT = 512, 100
# Vocabulary, width, layers, heads, K/V heads, MLP; of a mixture also how many experts there are and are chosen.
SHAPES = {
    "tiny": (256, 64, 2, 4, 2, 128),
    "30m": (8192, 512, 8, 8, 8, 1376),
    "110m": (32000, 768, 12, 12, 12, 2048),
    "1.1b": (32000, 2048, 22, 32, 4, 5632),
    "8x2": (32000, 768, 12, 12, 4, 2048, 8, 2),
    "128x8": (32000, 768, 8, 12, 4, 192, 128, 8),
    "tiny 8x2": (512, 64, 2, 4, 2, 64, 8, 2),
}


def config_of(shape: Sequence[int], **fields: Any) -> LlamaConfig:
    """The configuration of a Llama, or of a Mixtral if it has experts. ``fields``: further ones."""
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
             "intermediate_size", "num_local_experts", "num_experts_per_tok")  # fmt: skip
    given = {"max_position_embeddings": POSITIONS, "eos_token_id": None, **dict(zip(names, shape, strict=False))}
    return (MixtralConfig if len(shape) > 6 else LlamaConfig)(**{**given, **fields})


def random_model(shape: Sequence[int], folder: Path, *, seed: int = 0, **fields: Any) -> Any:
    """A model of that shape, saved in bf16."""
    config = config_of(shape, **fields)
    torch.manual_seed(seed)
    made = (MixtralForCausalLM if len(shape) > 6 else LlamaForCausalLM)(config)
    model = made.to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


def distinct(count: int, vocabulary: int) -> list[int]:
    assert count <= vocabulary, "a window has no more tokens than there are"
    return [(7 + 131 * i) % vocabulary for i in range(count)]  # a step that divides none of the vocabularies


def window(decoder: SamplingDecoder, width: int) -> Callable[[SamplingTensors], object]:
    """Verification of ``width`` rows after a prompt, with sampling of their tokens."""
    verifier = CompiledVerifier(decoder, DraftShape.chain(width - 1), rule=Match(), wide=True)
    tokens = torch.full((1, width), -1, dtype=torch.int32)
    text = torch.tensor([distinct(width, decoder.config.vocab_size)], dtype=torch.int32)
    tokens[0, 0] = text[0, 0]
    one = torch.ones(1, dtype=torch.int32)
    commit, limits = Commit(tokens, one, one * TEXT), RoundLimits([width - 1], TEXT + 1)
    proposal = Proposal(text[:, 1:].contiguous()) if width > 1 else None
    return lambda sampling: verifier(commit, proposal, sampling, limits)
