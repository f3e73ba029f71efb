"""Tests of `paceline verify` that compare the distribution of outputs with the target's probabilities.

The probabilities come from a prefill, or from decoding one token at a time: neither uses the graphs that verify drafts.
Two tests complement each other. The first tokens of many outputs of one prompt are counted and compared with their
exact joint distribution, which shows any deviation in them. Along long outputs, every token is mapped to its position
on the target's cumulative distribution for its prefix; these positions are independent and uniform if the outputs are
right, for any prefixes (Rosenblatt 1952), so that every token counts. Tests of tokens are in `verify`.

The power of a test is the smallest deviation of any form that it finds with a probability of 95 %. It is given as a
total variation: the largest difference between the probabilities of any set of tokens under the two distributions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.checks.findings import Finding, Status
from paceline.checks.verify_subject import Budget, Subject
from paceline.core import probs
from paceline.core.sampling import Sampling, row_seed, sampling_tensors
from paceline.decoder import steps
from paceline.decoder.decoder import CompiledDecoder

FIRST, CHOICES = 3, 4
"""Tokens of the joint distribution, and the top-k that keeps it small enough to be known exactly."""

PARTS = 16
"""Number of equal parts of the cumulative distribution in which positions along outputs are counted."""

FALSE_ALARM = 1e-5
"""Probability of a false alarm of a test of a distribution."""

POWER = 0.95
"""Probability of finding a deviation of the reported size."""

_CALL = 64  # outputs of one call
_LEAST_EXPECTED = 5.0  # outputs in a cell
_TEMPERATURES = (1.0, 0.7, 1.3)


def first_tokens(subject: Subject, budget: Budget) -> Finding:
    """Compare the first tokens of outputs of one prompt with their joint distribution."""
    sampling = Sampling(temperature=1.0, top_k=CHOICES)
    prompt = subject.prompts[0]
    expected = joint_distribution(subject.target, prompt, sampling)
    counts: Counter[tuple[int, ...]] = Counter()
    new = min(FIRST + subject.depth, subject.room(prompt))
    while budget.left(sum(counts.values()), subject.samples):
        done = sum(counts.values())
        seeds = [row_seed(subject.seed + 1, done + row) for row in range(_CALL)]
        result = subject.texts(
            subject.generator,
            [prompt] * _CALL,
            max_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=CHOICES,
            eos_token_id=[],
            seed=seeds,
        )
        counts.update(tuple(text[len(prompt) : len(prompt) + FIRST]) for text in result.texts)
    samples = sum(counts.values())
    cells = _joined(counts, expected, samples)
    foreign = sum(count for key, count in counts.items() if key not in expected)
    tried = f"{samples} texts of one prompt, their first {FIRST} tokens at temperature 1 and top-k {CHOICES}"
    return _judged("distribution of first tokens", subject, cells, tried=tried, foreign=foreign)


def along_texts(subject: Subject, budget: Budget) -> Finding:
    """Count the positions of tokens of long outputs on the target's cumulative distributions."""
    counts, number, samples = torch.zeros(PARTS), 0, 0
    dice = torch.Generator().manual_seed(subject.seed)
    while budget.left(samples, subject.samples):
        temperature = _TEMPERATURES[number % len(_TEMPERATURES)]
        group = subject.group(number, subject.slots)
        seeds = [row_seed(subject.seed + 2, number * subject.slots + row) for row in range(len(group))]
        result = subject.texts(
            subject.generator, group, do_sample=True, temperature=temperature, eos_token_id=[], seed=seeds
        )
        sampling = Sampling(temperature=temperature)
        for places in places_of(subject.target, result.texts, list(map(len, group)), sampling=sampling, dice=dice):
            counts += torch.histc(places, PARTS, 0.0, 1.0)
            samples += len(places)
        number += 1
    cells = [(count, samples / PARTS) for count in counts.tolist()]
    tried = f"{samples} tokens of {number} calls, at temperatures {', '.join(map(str, _TEMPERATURES[:number]))}"
    return _judged("distribution along texts", subject, cells, tried=tried, foreign=0)


def joint_distribution(
    target: CompiledDecoder, prompt: Sequence[int], sampling: Sampling
) -> dict[tuple[int, ...], float]:
    """Return the probabilities of the first tokens after a prompt, by a prefill of every possible prefix."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    with target.held_by(joint):
        for _ in range(FIRST):
            longer: dict[tuple[int, ...], float] = {}
            for beginning, probability in joint.items():
                logits, _ = steps.prefill(target, 0, [*prompt, *beginning])
                row = probs.probabilities(logits, sampling_tensors([sampling]))[0, 0]
                for token in row.nonzero().flatten().tolist():
                    key = (*beginning, token)
                    longer[key] = probability * float(row[token])
            joint = longer
    return joint


def places_of(
    target: CompiledDecoder,
    texts: Sequence[Sequence[int]],
    prompts: Sequence[int],
    *,
    sampling: Sampling,
    dice: torch.Generator,
) -> list[Tensor]:
    """Return the position of each new token on the cumulative distribution of its prefix, more likely tokens first; the
    position within a token's mass is random. ``prompts``: lengths. -> for every sequence [new tokens] in [0, 1]
    """
    slots, longest = target.batch_size, max(map(len, texts))
    places: list[list[float]] = [[] for _ in texts]
    padded = torch.zeros(slots, longest, dtype=torch.int32)
    for slot, text in enumerate(texts):
        padded[slot, : len(text)] = torch.tensor(text)
    tensors = sampling_tensors([sampling] * slots)
    with target.held_by(places):
        for row in range(longest - 1):
            window, rows = padded[:, row : row + 1].contiguous(), torch.full((slots,), row, dtype=torch.int32)
            logits, _ = steps.window(target, window, rows, bucket=target.bucket_for(row + 1))
            distribution = probs.probabilities(logits, tensors)[:, 0].double()
            for slot, text in enumerate(texts):
                if prompts[slot] - 1 <= row < len(text) - 1:
                    places[slot].append(
                        _place(distribution[slot], text[row + 1], float(torch.rand((), generator=dice)))
                    )
    return [torch.tensor(row) for row in places]


def _place(distribution: Tensor, token: int, share: float) -> float:
    own = distribution[token]
    before = distribution[distribution > own].sum() + distribution[:token][distribution[:token] == own].sum()
    return float((before + share * own).clamp(0, 1))


Cells = list[tuple[float, float]]
"""Counts, and what is expected of them."""


def _joined(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float], samples: int) -> Cells:
    """Cells of few expected texts are put together until they have enough; the likeliest first."""
    cells = [(0.0, 0.0)]
    for key, probability in sorted(expected.items(), key=lambda item: -item[1]):
        if cells[-1][1] >= _LEAST_EXPECTED:
            cells.append((0.0, 0.0))
        cells[-1] = cells[-1][0] + counts[key], cells[-1][1] + probability * samples
    if cells[-1][1] < _LEAST_EXPECTED and len(cells) > 1:
        (more, wanted), (few, rest) = cells[-2:]
        cells[-2:] = [(more + few, wanted + rest)]
    return cells


def _judged(name: str, subject: Subject, cells: Cells, *, tried: str, foreign: int) -> Finding:
    """The finding of counts. ``foreign``: texts that the distribution gives no probability."""
    observed, expected = zip(*cells, strict=True)
    samples, rule = int(sum(observed)) + foreign, subject.rule
    if len(cells) < 2:
        return Finding(name, "skipped", "all mass is in one cell: too few texts, or a target without doubt", tried)
    p = 0.0 if foreign > subject.tolerated(samples) else chi_square(observed, expected)
    wrong = p < FALSE_ALARM
    status: Status = "ok" if not wrong else "FAILED"
    if not rule.lossless:
        status = "lossy"
    outside = f", {foreign} texts that the target cannot write" if foreign else ""
    seen = f"p = {p:.2g} by chi-square in {len(cells)} cells{outside}"
    if wrong or not rule.lossless:
        variation = sum(abs(o - e) for o, e in cells) / sum(observed) / 2
        seen += f"; total variation {variation:.3f} is seen, chance included"
    if not rule.lossless:
        seen += f"; {rule.name!r} is LOSSY and says so" + ("" if wrong else ", and no deviation shows here")
    power = detected_variation(samples, len(cells))
    return Finding(name, status, seen, tried, power)


def detected_share(count: int) -> float:
    """Return the smallest probability of a difference at a token that occurs at least once in ``count`` tokens with 95
    %.

    Two outputs sampled from distributions with a total variation of d differ at a token with a probability of at least
    d, for any coupling. So this is a total variation too.
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
    """Probability of more than x under chi-square with ``degrees`` degrees of freedom."""
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
    """Return the end of the range from 0 on in which a monotone condition holds."""
    low: float = 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
