"""Prefix caching changes no token, whoever drafts: prompts that begin alike, in a call and after it."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import AutoDecoder, GenerationResult, SpeculativeGenerator
from paceline.decoder.read_prompts import ReadPrompt, ReadPrompts
from paceline.decoder.steps import prefill
from paceline.generator import Sampler
from tests.contract.drafters import ROWS, Home
from tests.decoder.tiny import CHUNK, POSITIONS, Workshop, fresh

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "top_k": 20}
_IDS = random.Random(3).choices(range(3, 80), k=60)
PROMPTS = [_IDS[:40], [*_IDS[:35], 9, 9, 9], _IDS, _IDS[:40], [7, 8], [*_IDS[:17], *[4] * 25], [1, 2, 3], _IDS[:33]]
"""More than there are slots, so that some are evicted; with four that run at the same time."""


def texts(sampler: Sampler, prompts: list[list[int]], asked: dict[str, Any]) -> list[list[int]]:
    made = sampler.sample(prompts, return_dict=True, max_new_tokens=6, seed=[5] * len(prompts), **asked)
    assert isinstance(made, GenerationResult)
    return [line[:length].tolist() for line, length in zip(made.sequences, made.lengths, strict=True)]


def caching(generator: SpeculativeGenerator) -> SpeculativeGenerator:
    """The same with prefix caching."""
    generator.config = generator.config.model_copy(update={"prefix_caching": True})
    generator.engine.kept = generator.target.read_prompts
    return generator


_KNOWN: dict[bool, list[list[int]]] = {}


@pytest.mark.parametrize("name", ROWS)
def test_tokens_are_those_of_plain_decoding(name: str, workshop: Workshop, tmp_path: Path) -> None:
    """Half of them greedy, then the others, sampled, which find some of the first in their slots."""
    with ExitStack() as stack:
        home, row = Home(workshop, tmp_path, stack, 4), ROWS[name]
        generator, hits = caching(row.make(home, row.depths[-1])), 0
        for sampled, prompts in ((False, PROMPTS[:5]), (True, PROMPTS[3:])):
            asked = SAMPLED if sampled else {}
            if sampled not in _KNOWN:  # the same for every row
                _KNOWN[sampled] = texts(home.target, prompts, asked)
            assert texts(generator, prompts, asked) == _KNOWN[sampled]
            assert generator.statistics.prefix_cache_queries == sum(map(len, prompts))
            hits += generator.statistics.prefix_cache_hits
        assert hits >= 6 * CHUNK


@pytest.mark.parametrize("backend", ["eager", "native"])
def test_a_later_prompt_reads_only_what_is_new(backend: str, workshop: Workshop) -> None:
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


def test_shared_rows_have_the_bits_of_rows_that_are_read(workshop: Workshop) -> None:
    for backend in ("eager", "native"):
        target = fresh(workshop.checkpoint(), backend=backend, batch_size=4)
        generator = SpeculativeGenerator(None, target, k=3, prefix_caching=True)
        texts(generator, [_IDS[:37]], {})
        texts(generator, [_IDS], {})
        assert generator.statistics.prefix_cache_hits
        (slot,) = [slot for slot in range(4) if target.read_prompts.rows(slot) == len(_IDS)]
        found = [one[slot, :, : len(_IDS)].clone() for pair in target.body.caches for one in pair]
        prefill(target, slot ^ 1, _IDS)
        wanted = [one[slot ^ 1, :, : len(_IDS)] for pair in target.body.caches for one in pair]
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), backend


def test_a_divided_model_copies_on_every_rank(workshop: Workshop) -> None:
    shape: dict[str, Any] = {"n_positions": [POSITIONS], "context_length_estimate": [CHUNK], "amp": "f32"}
    target = AutoDecoder.from_pretrained(workshop.checkpoint(), batch_size=4, tp_degree=2, backend="eager", **shape)
    try:
        generator = SpeculativeGenerator(None, target, k=3, prefix_caching=True)
        wanted = texts(SpeculativeGenerator(None, target), PROMPTS, {})
        assert texts(generator, PROMPTS, {}) == wanted
        assert generator.statistics.prefix_cache_hits >= 4 * CHUNK
    finally:
        target.close()


def test_the_slot_of_the_longest_prefix_is_taken_unless_much_is_lost() -> None:
    kept = ReadPrompts()
    me = object()
    kept.begin(last=me, holder=None)
    for slot, prompt in enumerate([(1, 2, 3, 4), (5, 6), (1, 2, 9, 9, 9, 9)]):
        kept.add(slot, ReadPrompt(prompt, None, torch.zeros(1), None))
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
