"""Shared by the tests of token equality: settings, prompts, processors and drafts that are wrong; no tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.logits_process import LogitsProcessor

from paceline import GenerationResult, SpeculativeGenerator
from paceline.auto import Sampler, SamplingDecoder
from tests import sampled
from tests.decoder.tiny import VOCABULARY
from tests.sampled import texts as texts  # for those who compare what `run` gives

Setting = dict[str, object]
NEW = 20

SETTINGS: dict[str, Setting] = {
    "greedy": {},
    "cool": {"do_sample": True, "temperature": 0.7, "seed": 11},
    "hot and cut": {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "seed": 1 << 40},
}
PROMPTS = [[5, 9, 5, 9, 5], [17], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3], [80, 81, 80]]
"""Ragged: one of a single token, one longer than the prefill graph."""


class Growing(LogitsProcessor):
    """A processor of the user's own with a memory: wrong if it is called out of order, twice, or on a rejected text."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.seen.append(input_ids[0].tolist())
        scores[:, int(input_ids[0, -1])] -= 1.5
        scores[:, (len(self.seen) * 7) % VOCABULARY] += 2.0
        return scores


def run(sampler: Sampler, setting: Setting, *, prompts: list[list[int]] = PROMPTS, new: int = NEW) -> GenerationResult:
    """The result of one call."""
    return sampled.run(sampler, prompts, max_new_tokens=new, **setting)


def plain(target: SamplingDecoder, setting: Setting, *, width: int | None = None, **more: Any) -> list[list[int]]:
    """Plain decoding."""
    sampler = target if width is None else SpeculativeGenerator(None, target, k=0, verify_width=width)
    return texts(run(sampler, setting, **more))


def stumbling(known: list[list[int]], *, every: int = 3) -> Callable[[list[int]], list[int]]:
    """Knows how the texts continue, but every few tokens, by the text's length, it is wrong."""

    def propose(tokens: list[int]) -> list[int]:
        text = next((t for t in known if t[: len(tokens)] == tokens), tokens)
        following = text[len(tokens) :]
        wrong = len(tokens) % every
        return [(t + 1) % VOCABULARY if i == wrong else t for i, t in enumerate(following)]

    return propose


def assert_rolled_back(result: GenerationResult) -> None:
    """Equality shows nothing when all drafts are accepted, or none."""
    assert 0 < result.statistics.num_accepted_tokens < result.statistics.num_draft_tokens
