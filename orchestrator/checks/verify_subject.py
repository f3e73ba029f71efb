"""The subject of `paceline verify`: a generator, plain decoding by the same target, prompts, and functions to run
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from paceline.core import probs
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.detokenizer import Decodes
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import SamplingTensors
from paceline.decoder import steps
from paceline.decoder.decoder import CompiledDecoder
from paceline.generator import SpeculativeGenerator
from paceline.outputs import FinishReason, GenerationResult, Statistics

_PROMPTS, _LONGEST = 6, 20


class Budget:
    """Time for one test. It begins after the least that the test does, in which graphs are made."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, float("inf")

    def left(self, done: int, least: int) -> bool:
        """Return whether to continue after ``done`` calls of at least ``least``."""
        if done < least:
            return True
        if self._end == float("inf"):
            self._end = perf_counter() + self._seconds
        return perf_counter() < self._end

    def calls(self, least: int) -> Iterator[int]:
        """Numbers of calls, from 0 on."""
        return takewhile(lambda done: self.left(done, least), count())


@dataclass(frozen=True, slots=True)
class CallResult:
    """Texts of one call with their prompts, why each ended, and counts."""

    texts: list[list[int]]
    reasons: list[FinishReason]
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Subject:
    """A generator to verify.

    plain      the same target without a draft, one token at a time
    sampled    whether this backend may sample
    new        new tokens of an output
    samples    minimum number of samples of a test of a distribution
    tokenizer  for stop strings; None: ids as numbers
    """

    generator: SpeculativeGenerator
    plain: SpeculativeGenerator
    rule: AcceptanceRule
    prompts: Sequence[Sequence[int]]
    sampled: bool
    seed: int
    new: int
    samples: int
    tokenizer: Decodes | None
    processors: Sequence[Callable[..., Tensor]]

    @property
    def target(self) -> CompiledDecoder:
        return self.generator.target

    @property
    def slots(self) -> int:
        return self.target.batch_size

    @property
    def depth(self) -> int:
        return self.generator.drafter.draft_shape.depth

    @property
    def invariant(self) -> bool:
        """Whether the backend promises that bits do not depend on the width of a graph."""
        return self.target.body.kernels.batch_invariant

    def room(self, prompt: Sequence[int]) -> int:
        return self.target.n_positions - len(prompt)

    def group(self, number: int, count: int) -> list[list[int]]:
        """Return ``count`` prompts, others for every number."""
        return [list(self.prompts[(number + row) % len(self.prompts)]) for row in range(count)]

    def tolerated(self, count: int) -> int:
        """How many of ``count`` tokens near-ties may change, where bits depend on the width."""
        return 0 if self.invariant else count // 50

    def texts(self, source: SpeculativeGenerator, prompts: Sequence[Sequence[int]], **options: Any) -> CallResult:
        room = min(self.room(prompt) for prompt in prompts)
        options = {"max_new_tokens": min(self.new, room), **options}
        result = source.sample([list(prompt) for prompt in prompts], return_dict=True, **options)
        assert isinstance(result, GenerationResult)
        rows = [row[:length].tolist() for row, length in zip(result.sequences, result.lengths, strict=True)]
        return CallResult(rows, result.finish_reasons, result.statistics)

    def gap(self, prefix: Sequence[int], tokens: tuple[int, int], sampling: Sampling) -> float:
        """Return the difference of the scores of two tokens after a prefix: logits over temperature, plus noise if
        sampled; infinite if one of them is cut.
        """
        with self.target.held_by(prefix):
            logits, _ = steps.prefill(self.target, 0, prefix)
        tensors: SamplingTensors = sampling_tensors([sampling])
        scores = probs.apply_top_k_top_p_min_p(logits, tensors)
        position = torch.tensor([[len(prefix)]], dtype=torch.int32)
        ids = torch.arange(logits.shape[-1], dtype=torch.int32)
        row = probs.add_gumbel(scores, position, tensors, ids=ids)[0, 0]
        return float((row[tokens[0]] - row[tokens[1]]).abs())


def own_prompts(plain: SpeculativeGenerator, *, sampled: bool, seed: int) -> list[list[int]]:
    """Make prompts of unequal lengths that are likely for a model, without its tokenizer: its own outputs. The longest
    is repeated once, so that drafters that use only tokens find a repetition.
    """
    config = plain.target.config
    dice = torch.Generator().manual_seed(seed)
    starts = torch.randint(config.vocab_size, (_PROMPTS, 1), generator=dice).tolist()
    length = max(2, min(_LONGEST, plain.target.n_positions // 8))
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "seed": seed} if sampled else {}
    rows: list[list[int]] = plain.sample(starts, max_new_tokens=length, eos_token_id=[], **options).tolist()
    cut = [row[: 1 + (index * 7) % length] for index, row in enumerate(rows)]
    return [rows[0] + rows[0], *cut[1:], cut[0]]
