"""Prefix caching: prompts that share a prefix, in a call and after it. Every drafter has it in the equality matrix."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from paceline import AutoDecoder, SpeculativeGenerator
from paceline.auto import Sampler
from paceline.decoder.prefix_cache import CachedPrompt, PrefixCache
from paceline.decoder.steps import prefill
from tests import sampled
from tests.contract.drafters import ROWS, Home
from tests.decoder.tiny import CHUNK, Workshop, fresh

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 20}
_IDS = random.Random(3).choices(range(3, 80), k=60)
PROMPTS = [_IDS[:40], [*_IDS[:35], 9, 9, 9], _IDS, _IDS[:40], [7, 8], [*_IDS[:17], *[4] * 25], [1, 2, 3], _IDS[:33]]
"""More than there are slots, so that some are evicted; with four that run at the same time."""


def texts(sampler: Sampler, prompts: list[list[int]], asked: dict[str, Any]) -> list[list[int]]:
    return sampled.texts(sampled.run(sampler, prompts, max_new_tokens=6, seed=[5] * len(prompts), **asked))


Calls = Sequence[tuple[list[list[int]], dict[str, Any]]]


def hits_of(calls: Calls, generator: SpeculativeGenerator) -> int:
    """Tokens of prompts that were not read in these calls, each of which has the tokens of plain decoding."""
    plain, hits = SpeculativeGenerator(None, generator.target), 0
    wanted = [texts(plain, prompts, asked) for prompts, asked in calls]
    for (prompts, asked), lines in zip(calls, wanted, strict=True):
        assert texts(generator, prompts, asked) == lines
        assert generator.statistics.prefix_cache_queries == sum(map(len, prompts))
        hits += generator.statistics.prefix_cache_hits
    return hits


@pytest.mark.parametrize("name", ["ngram", "model, fused", "EAGLE 3 static tree"])
def test_evicted_prompts_are_prefilled_again_and_cached(name: str, workshop: Workshop, tmp_path: Path) -> None:
    """Half of them greedy, then the others, sampled, which find some of the first in their slots."""
    with ExitStack() as stack:
        home, row = Home(workshop, tmp_path, stack, 4, options={"prefix_caching": True}), ROWS[name]
        generator = row.make(home, row.depths[-1])
        assert hits_of([(PROMPTS[:5], {}), (PROMPTS[3:], SAMPLED)], generator) >= 6 * CHUNK


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_later_prompt_prefills_only_its_suffix(backend: str, workshop: Workshop) -> None:
    target = fresh(workshop.checkpoint(), backend=backend, batch_size=4)
    generator = SpeculativeGenerator(None, target, k=3, prefix_caching=True)
    step = 1 if backend == "native" else CHUNK
    texts(generator, [_IDS[:40]], {})
    for prompt, same in ((_IDS[:40], 40), (_IDS[:38], 37), ([*_IDS[:30], 5], 30), (_IDS, 40), ([6, *_IDS], 0)):
        texts(generator, [prompt], {})
        whole = same == len(prompt)
        assert generator.statistics.prefix_cache_hits == (same if whole else same // step * step), prompt
    other = SpeculativeGenerator("ngram", target, k=2)
    texts(other, [[3, 3, 3]], {})  # somebody else used the cache
    texts(generator, [_IDS], {})
    assert generator.statistics.prefix_cache_hits == 0
    assert SpeculativeGenerator(None, target).config.prefix_caching is False and other.statistics.prefix_cache_hits == 0


def test_cached_rows_are_bitwise_identical_to_prefilled_rows(workshop: Workshop) -> None:
    for backend in ("eager", "native"):
        target = fresh(workshop.checkpoint(), backend=backend, batch_size=4)
        generator = SpeculativeGenerator(None, target, k=3, prefix_caching=True)
        texts(generator, [_IDS[:37]], {})
        texts(generator, [_IDS], {})
        assert generator.statistics.prefix_cache_hits
        (slot,) = [slot for slot in range(4) if target.prefix_cache.rows(slot) == len(_IDS)]
        found = [one[slot, :, : len(_IDS)].clone() for pair in target.body.caches for one in pair]
        prefill(target, slot ^ 1, _IDS)
        wanted = [one[slot ^ 1, :, : len(_IDS)] for pair in target.body.caches for one in pair]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), backend


def test_the_slot_with_the_longest_prefix_is_reused_unless_too_much_is_overwritten() -> None:
    kept = PrefixCache()
    me = object()
    kept.begin(last=me, holder=None)
    for slot, prompt in enumerate([(1, 2, 3, 4), (5, 6), (1, 2, 9, 9, 9, 9)]):
        kept.add(slot, CachedPrompt(prompt, None, torch.zeros(1), None))
    assert kept.choose([1, 2, 3, 4, 8], [0, 1, 2, 3]) == 0, "it goes on from there"
    assert kept.choose([1, 2, 3, 8], [0, 1, 2, 3]) == 3, "an empty slot, to which it is copied"
    assert kept.choose([1, 2, 3, 8], [0, 1, 2]) == 0, "most of that is used"
    assert kept.choose([7, 7], [0, 1, 2]) == 0, "the one that was used longest ago"
    found = kept.find((1, 2, 3, 8), None)
    assert found is not None and (found.slot, found.rows) == (0, 3)
    kept.take(3, found, 4)
    assert kept.choose([1, 2, 3, 8], [1, 2]) == 1, "copied from a slot that is taken"
    assert kept.choose([7, 7], [0, 1, 2]) == 1 and kept.shared(3) == 3
    kept.take(0, found, 4)  # its own rows, the last of which is overwritten
    assert kept.rows(0) == 0 and kept.rows(2) == 6
    kept.finish(2)
    assert kept.rows(2) == 6
    kept.begin(last=None, holder=me)
    assert kept.find((1, 2, 9, 9, 9, 9), None) is None


@pytest.mark.full
def test_chunked_prompts_share_prefixes_at_batch_16_and_vocabulary_128_000(tmp_path: Path) -> None:
    """Requests beyond the number of slots share 300 and more of two texts of 400 ids; others come between them."""
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
    generator = SpeculativeGenerator("ngram", target, k=2, prefix_caching=True)
    hits = hits_of([(many, {}), (between, SAMPLED)], generator)
    assert hits >= (len(many) - 2) * 2 * chunk + chunk + 2 * chunk
