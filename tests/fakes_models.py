"""Tiny Llama checkpoints on disk, in float32, and what transformers says about them; no tests."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import AutoDecoder
from paceline.auto import SamplingDecoder

V = 48
POSITIONS = 64


def network(*, seed: int = 0, layers: int = 2, vocab_size: int = V, spread: float = 0.3) -> LlamaForCausalLM:
    """Weights large enough for distributions that are far from uniform."""
    torch.manual_seed(seed)
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab_size, hidden_size=24, intermediate_size=32, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=POSITIONS,
            bos_token_id=None, eos_token_id=None, pad_token_id=None,
        )
    )  # fmt: skip
    for name, parameter in made.named_parameters():
        if "norm" not in name:
            torch.nn.init.normal_(parameter, std=spread)
    return made.eval()


def saved(made: LlamaForCausalLM, folder: Path, *, words: dict[str, int] | None = None) -> Path:
    """Write a checkpoint, and a tokenizer if there are words for it."""
    made.save_pretrained(folder)
    if words is not None:
        Tokenizer(models.WordLevel(words, unk_token=next(iter(words)))).save(str(folder / "tokenizer.json"))
    return folder


def load(
    folder: Path, *, slots: int = 1, positions: int | list[int] = POSITIONS, backend: str = "eager"
) -> SamplingDecoder:
    return AutoDecoder.from_pretrained(
        folder, batch_size=slots, n_positions=positions, context_length_estimate=[8, 16], amp="f32", backend=backend
    )


def logits_of(made: LlamaForCausalLM, text: list[int]) -> Tensor:
    """Logits after every token, by one forward without a cache. [length, V]"""
    with torch.no_grad():
        found: Tensor = made(torch.tensor([text]), use_cache=False).logits[0]
    return found


def generated(made: LlamaForCausalLM, prompt: list[int], **asked: object) -> list[int]:
    """Greedy continuation of a prompt by transformers."""
    found = made.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), do_sample=False, pad_token_id=0, **asked
    )
    text: list[int] = found[0].tolist()
    return text
