"""Subject and results of `paceline verify`: the models it tests, and a finding for each test.

It looks at a generator, plain decoding by the same target, prompts, and how to run them. The power of a test is the
smallest deviation that it finds with a probability of 95 %, whatever the deviation looks like. It is given as a total
variation: the largest difference between the probabilities that the two distributions give to any set of tokens. Not
here: the tests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Literal

import torch

from paceline.core import probs
from paceline.core.acceptance.base import AcceptanceRule
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import SamplingTensors
from paceline.decoder import steps
from paceline.decoder.decoder import CompiledDecoder
from paceline.generator import SpeculativeGenerator
from paceline.outputs import FinishReason, GenerationResult, Statistics

_PROMPTS, _LONGEST, _NEW = 6, 20, 40


class Budget:
    """Time for one test. It begins after the least that the test does, in which graphs are made."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._end = seconds, float("inf")

    def left(self, done: int, least: int) -> bool:
        """Return whether to continue after ``done`` of at least ``least`` items."""
        if done < least:
            return True
        if self._end == float("inf"):
            self._end = perf_counter() + self._seconds
        return perf_counter() < self._end


@dataclass(frozen=True, slots=True)
class Texts:
    """Result of one call: sequences with their prompts, finish reasons, and counts."""

    texts: list[list[int]]
    reasons: list[FinishReason]
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Subject:
    """A generator to verify.

    plain      the same target without a draft, one token at a time
    prompts    ids
    sampled    whether this backend may sample
    new        new tokens of a text
    """

    generator: SpeculativeGenerator
    plain: SpeculativeGenerator
    rule: AcceptanceRule
    prompts: Sequence[Sequence[int]]
    sampled: bool
    seed: int
    new: int = _NEW

    @property
    def target(self) -> CompiledDecoder:
        return self.generator.target

    @property
    def slots(self) -> int:
        return self.target.batch_size

    @property
    def depth(self) -> int:
        """Depth of the deepest proposal."""
        return self.generator.drafter.draft_shape.depth

    @property
    def invariant(self) -> bool:
        """Whether the backend promises that no bit depends on the width of a graph."""
        return self.target.body.kernels.batch_invariant

    def room(self, prompt: Sequence[int]) -> int:
        """Return the number of new tokens that fit after a prompt."""
        return self.target.n_positions - len(prompt)

    def group(self, number: int, count: int) -> list[list[int]]:
        """Return ``count`` prompts, different ones for every number."""
        return [list(self.prompts[(number + row) % len(self.prompts)]) for row in range(count)]

    def tolerated(self, count: int) -> int:
        """How many of ``count`` tokens near-ties may change, where bits depend on the width."""
        return 0 if self.invariant else count // 50

    def texts(self, source: SpeculativeGenerator, prompts: Sequence[Sequence[int]], **options: Any) -> Texts:
        """Run one call."""
        room = min(self.room(prompt) for prompt in prompts)
        options = {"max_new_tokens": min(self.new, room), **options}
        result = source.sample([list(prompt) for prompt in prompts], return_dict=True, **options)
        assert isinstance(result, GenerationResult)
        rows = [row[:length].tolist() for row, length in zip(result.sequences, result.lengths, strict=True)]
        return Texts(rows, result.finish_reasons, result.statistics)

    def gap(self, prefix: Sequence[int], tokens: tuple[int, int], sampling: Sampling) -> float:
        """Return the distance of two tokens after a prefix, in what the choice compares: logits over temperature, plus
        noise if sampled; infinite if one of them is cut.
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
    """Prompts that are likely for a model, of unequal lengths, without its tokenizer: what it goes on with itself.

    The longest is there twice in a row, so that drafters that look at the text have something to find.
    """
    config = plain.target.config
    dice = torch.Generator().manual_seed(seed)
    starts = torch.randint(config.vocab_size, (_PROMPTS, 1), generator=dice).tolist()
    length = max(2, min(_LONGEST, plain.target.n_positions // 8))
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "seed": seed} if sampled else {}
    rows: list[list[int]] = plain.sample(starts, max_new_tokens=length, eos_token_id=[], **options).tolist()
    cut = [row[: 1 + (index * 7) % length] for index, row in enumerate(rows)]
    return [rows[0] + rows[0], *cut[1:], cut[0]]


Status = Literal["ok", "FAILED", "lossy", "note", "skipped"]

FALSE_ALARM = 1e-5
"""Probability that a test of a distribution fails although the distribution is right."""

POWER = 0.95
"""Probability with which a deviation of the size that is reported is found."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One test.

    status     ok; FAILED; lossy: the acceptance rule says of itself that it deviates, and by how much was measured;
               note: no promise is broken, and somebody should know; skipped: why stands in ``seen``
    tried      on what
    seen       what came of it
    detects    the smallest deviation, as a total variation at a token (or at the tokens that ``tried`` names), that
               would have been found with a probability of 95 %; None where this has no meaning
    seconds    that it took
    """

    name: str
    status: Status
    tried: str
    seen: str
    detects: float | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """All findings about one target, one draft and one batch size. ``setting``: what was verified, for people."""

    setting: Mapping[str, object]
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        return all(one.status != "FAILED" for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"passed": self.passed, **self.setting, "findings": [asdict(one) for one in self.findings]}

    def __str__(self) -> str:
        """For people: a paragraph for every finding."""
        head = ", ".join(f"{name} {value}" for name, value in self.setting.items())
        lines = [head]
        for one in self.findings:
            lines.append(f"{one.status:7} {one.name} ({one.seconds:.1f} s): {one.seen}")
            lines.append(f"        tried: {one.tried}")
            if one.detects is not None:
                lines.append(f"        finds with 95 %: a deviation of {one.detects:.2g} in total variation")
        return "\n".join(lines)


def detected_share(count: int) -> float:
    """The smallest probability of a difference at a token that shows at least once in ``count`` tokens with 95 %.

    Two texts whose tokens are drawn from distributions with a total variation of d differ at a token with probability
    d at least, however they are coupled. So this is a total variation too.
    """
    return -math.expm1(math.log(1.0 - POWER) / max(1, count))


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> float:
    """p-value of Pearson's test of counts against expected counts, all above 0."""
    statistic = math.fsum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return _beyond(statistic, len(expected) - 1)


def detected_variation(samples: int, cells: int) -> float:
    """Return the smallest total variation over ``cells`` cells that `chi_square` finds with 95 % in ``samples``
    samples.

    A deviation of total variation d has a noncentrality of at least 4 n d^2: it moves a mass d from some cells, of mass
    P, to the others, and by Cauchy's inequality the sum of squares over expectations is at least n d^2 / (P (1 - P)).
    """
    if cells < 2 or not samples:
        return 1.0
    degrees = cells - 1
    critical = _bisected(lambda x: _beyond(x, degrees) > FALSE_ALARM, 10.0 * degrees + 100.0)
    needed = _bisected(lambda moved: _noncentral_beyond(critical, degrees, moved) < POWER, 10.0 * critical + 100.0)
    return min(1.0, math.sqrt(needed / (4.0 * samples)))


def _beyond(x: float, degrees: int) -> float:
    """Return the probability of more than x under chi-square with the given degrees of freedom."""
    if degrees < 1:
        return 1.0
    half = torch.tensor([degrees / 2, x / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _noncentral_beyond(x: float, degrees: int, noncentrality: float) -> float:
    """The same of the noncentral distribution: a mixture of central ones with Poisson weights."""
    mean = noncentrality / 2
    count = torch.arange(int(mean + 12 * math.sqrt(mean + 1) + 30), dtype=torch.float64)
    weights = torch.exp(count * math.log(max(mean, 1e-300)) - mean - torch.lgamma(count + 1))
    tails = torch.special.gammaincc(degrees / 2 + count, torch.full_like(count, x / 2))
    return float((weights * tails).sum())


def _bisected(below: Callable[[float], bool], high: float) -> float:
    """Return the largest value from 0 on for which a monotone condition holds."""
    low: float = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
