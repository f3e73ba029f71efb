"""Sampling in graphs: what `core.probs` says in every kind, also where integers go through float32, at its cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from paceline.core import probs
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import SamplingKind, SamplingTensors
from paceline.decoder.parallel.vocab_part import VocabPart
from paceline.neuron import graph_sampling
from paceline.neuron.kernels import TraceableKernels
from paceline.neuron.lowering import constants_of, lower
from tests.float32_integers import IntegersThroughFloat32

KINDS: tuple[SamplingKind, ...] = ("greedy", "top-k", "full", "wide")
KERNELS = TraceableKernels()


def some(kind: SamplingKind, dice: random.Random) -> Sampling:
    """A request that a graph of this kind serves."""
    if kind == "greedy" or dice.random() < 0.15:
        return Sampling(seed=3)
    heat, seed = dice.choice([0.3, 1.0, 2.0]), dice.randrange(1 << 60)
    top_p = dice.choice([1.0, 1.0, 0.05, 0.3, 0.5, 0.9, 0.999])
    min_p = dice.choice([0.0, 0.0, 0.01, 0.1, 0.5])
    few = [1, 2, 5, 50, 256]
    top_k = dice.choice({"top-k": few, "full": [0, 0, *few], "wide": [0, *few, 300, 700, 5000]}[kind])
    return Sampling(heat, top_k, top_p, min_p, seed)


def rows(kind: SamplingKind, size: int, spread: float, seed: int) -> tuple[Tensor, Tensor, SamplingTensors]:
    dice = random.Random(f"{kind} {size} {spread} {seed}")
    sampling = sampling_tensors([some(kind, dice) for _ in range(4)])
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 3, size, generator=generator) * spread
    positions = torch.randint(0, 5000, (4, 3), dtype=torch.int32, generator=generator)
    return logits, positions, replace(sampling, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "spread"), [(5, 1.0), (100, 4.0), (300, 0.1), (1000, 1.0), (8000, 0.3), (8000, 4.0)])
def test_graph_samples_equal_the_reference(kind: SamplingKind, size: int, spread: float) -> None:
    """Rows of narrower kinds among them, and half of a flat distribution, which are thousands of ids."""
    for seed in range(6):
        logits, positions, sampling = rows(kind, size, spread, seed)
        expected = probs.sample_tokens(logits, positions, sampling)
        assert torch.equal(KERNELS.sample_tokens(logits, positions, sampling), expected)
        ids, logprob = KERNELS.rank_tokens(logits, positions, sampling, count=min(7, size))
        assert torch.equal(ids[..., 0], expected)
        assert all(len(set(row)) == len(row) for row in ids.flatten(0, 1).tolist())
        assert bool((logprob <= 0).all())
        error = KERNELS.probabilities(logits, sampling) - probs.probabilities(logits, sampling)
        assert float(error.abs().max()) < 2e-3  # of one token at a border


def test_ties_are_kept_together_in_any_order() -> None:
    logits = torch.tensor([[[1.0, 2.0, 1.0, 1.0, 0.0, 2.0]]]).expand(1, 400, 6).contiguous()
    positions = torch.arange(400, dtype=torch.int32).unsqueeze(0)
    for request, allowed in ((Sampling(1.0, 3, seed=1), {0, 1, 2, 3, 5}), (Sampling(1.0, 0, 0.5, seed=1), {1, 5})):
        for kind in ("full", "wide") if request.top_k == 0 else ("top-k", "full", "wide"):
            sampling = replace(sampling_tensors([request]), kind=kind)
            assert set(KERNELS.sample_tokens(logits, positions, sampling)[0].tolist()) == allowed


class WaitingError(Exception):
    """A rank needs what others have not sent yet."""


class Ranks:
    """Ranks that take turns: each starts again until all have sent what it needs."""

    def __init__(self, degree: int) -> None:
        self.degree, self._rank, self._next = degree, 0, 0
        self._sent: list[dict[int, Tensor]] = []  # of every collective, by rank

    def run(self, work: Callable[[int], tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
        """Results of every rank."""
        found: dict[int, tuple[Tensor, ...]] = {}
        while len(found) < self.degree:
            for rank in set(range(self.degree)) - set(found):
                self._rank, self._next = rank, 0
                with suppress(WaitingError):
                    found[rank] = work(rank)
        return [found[rank] for rank in range(self.degree)]

    def gather(self, x: Tensor) -> Tensor:
        self._next += 1
        if self._next > len(self._sent):
            self._sent.append({})
        sent = self._sent[self._next - 1]
        sent[self._rank] = x
        if len(sent) < self.degree:
            raise WaitingError
        return torch.stack([sent[rank] for rank in range(self.degree)])

    def reduce(self, x: Tensor) -> Tensor:
        return self.gather(x).sum(0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_vocabulary_gives_the_same_samples(kind: SamplingKind) -> None:
    """Also where the last of four ranks has ids that are none."""
    for size, count in ((30, 10), (1001, 7)):
        logits, positions, sampling = rows(kind, size, 1.5, size)
        wanted = KERNELS.rank_tokens(logits, positions, sampling, count=count)
        distribution = probs.probabilities(logits, sampling).gather(-1, wanted[0].to(torch.int64))
        stands = (distribution > 0) | (kind == "greedy")  # what is cut has an order of its own
        ranks, share = Ranks(4), -(-size // 4)
        padded = torch.nn.functional.pad(logits, (0, 4 * share - size))

        def work(rank: int) -> tuple[Tensor, ...]:
            ids = torch.arange(rank * share, (rank + 1) * share, dtype=torch.int32)  # noqa: B023
            part = VocabPart(ids, size, ranks)  # noqa: B023
            given = (padded[..., rank * share : (rank + 1) * share], positions, sampling)  # noqa: B023
            token = graph_sampling.sample_tokens(*given, part=part)
            return (token, *graph_sampling.rank_tokens(*given, count=count, part=part))  # noqa: B023

        for token, ids, logprob in ranks.run(work):
            assert torch.equal(token, wanted[0][..., 0])
            assert torch.equal(ids[stands], wanted[0][stands])
            torch.testing.assert_close(logprob[stands], wanted[1][stands], rtol=1e-4, atol=1e-4)


class Step(nn.Module):
    """Operation of a graph on rows of logits: choose, or rank."""

    def __init__(self, kind: SamplingKind, count: int = 0) -> None:
        super().__init__()
        self.kind, self.count = kind, count

    def forward(self, logits: Tensor, positions: Tensor, params: Tensor, seeds: Tensor) -> tuple[Tensor, ...]:
        sampling = SamplingTensors(params, seeds, self.kind)
        if self.count:
            return KERNELS.rank_tokens(logits, positions, sampling, count=self.count)
        return (KERNELS.sample_tokens(logits, positions, sampling),)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lowered_graph_gives_the_same_tokens_where_integers_go_through_float32(kind: SamplingKind) -> None:
    logits, positions, sampling = rows(kind, 700, 1.5, 2)
    given = (logits, positions, sampling.params, sampling.seeds)
    for step in (Step(kind), Step(kind, count=5)):
        lowered = lower("sampling", step, given)
        plain = lowered.run(constants_of(lowered), given)[1]
        with IntegersThroughFloat32() as seen:
            rounded = lowered.run(constants_of(lowered), given)[1]
        assert all(torch.equal(one, other) for one, other in zip(plain, rounded, strict=True))
        assert torch.equal(plain[0] if not step.count else plain[0][..., 0], probs.sample_tokens(*given[:2], sampling))
        assert kind == "greedy" or (1 << 23) < seen.largest < (1 << 24)
