"""Prefix caching where attention slides, and where prompts take several chunks in a batch of 16 over 128,000 ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import SamplingDecoder
from tests.contract.test_prefix_caching import PROMPTS, SAMPLED, texts
from tests.decoder.families import WINDOW, save_pair
from tests.decoder.tiny import CHUNK, fresh

Calls = Sequence[tuple[list[list[int]], dict[str, Any]]]


def hits_of(calls: Calls, draft: SamplingDecoder | str, target: SamplingDecoder, *, k: int) -> int:
    """Tokens of prompts that were not read in these calls, each of which has the tokens of plain decoding."""
    plain = SpeculativeGenerator(None, target)
    wanted = [texts(plain, prompts, asked) for prompts, asked in calls]
    generator, hits = SpeculativeGenerator(draft, target, k=k, prefix_caching=True), 0
    for (prompts, asked), lines in zip(calls, wanted, strict=True):
        assert texts(generator, prompts, asked) == lines
        hits += generator.statistics.prefix_cache_hits
    return hits


@pytest.mark.parametrize("family", ["mistral", "qwen3 slides", "gemma3"])
def test_windows_that_slide(family: str, tmp_path: Path) -> None:
    """The rows that are shared are more than a window, in layers that slide and in those that do not."""
    target, draft = (fresh(folder, backend="eager", batch_size=4) for folder in save_pair(tmp_path, family))
    assert WINDOW in target.config.blueprint.windows and WINDOW < CHUNK
    assert hits_of([(PROMPTS[:5], {}), (PROMPTS[3:], SAMPLED)], draft, target, k=3) >= 6 * CHUNK


def test_prompts_of_several_chunks_in_a_batch_of_16_over_128_000_ids(tmp_path: Path) -> None:
    """Of two texts of 400 ids, more requests than there are slots have 300 and more; others come between them."""
    size, chunk, slots = 128_000, 128, 16
    shape = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 512}
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, tie_word_embeddings=True, **shape
    )
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    target = AutoDecoder.from_pretrained(
        tmp_path, batch_size=slots, n_positions=[512], context_length_estimate=[32, chunk], amp="f32", backend="eager"
    )
    draw = random.Random(1)
    ids = [draw.choices(range(size), k=100) * 4 for _ in range(2)]  # n-grams find them again
    many = [[*ids[i % 2][: 300 + 2 * i], size - 1 - i] for i in range(slots + 4)]
    between = [draw.choices(range(size), k=310), ids[0][:130], many[0], [5, 6], ids[1]]
    hits = hits_of([(many, {}), (between, SAMPLED)], "ngram", target, k=2)
    assert hits >= (len(many) - 2) * 2 * chunk + chunk + 2 * chunk
