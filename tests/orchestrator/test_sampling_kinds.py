"""Requests of several sampling modes share rounds, which use the widest mode among them."""

from __future__ import annotations

from contextlib import closing

import pytest

from paceline import SpeculativeGenerator
from paceline.core.protocols import Reading
from paceline.core.sampling import Sampling, kind_of, kind_of_params
from paceline.core.types import Commit, PrefillResult, RoundLimits, RoundResult, SamplingKind, SamplingTensors
from paceline.engine.batch import Batch, RoundShape
from paceline.engine.engine import ListQueue
from paceline.engine.request import Request
from paceline.engine.rounds import Rounds
from paceline.outputs import Statistics
from tests.fakes import Checked, TableDecoder, near, table, watch_rounds

V = 24
TARGET = table(V, seed=0, spread=2.0)
DRAFT = near(TARGET, seed=1, spread=0.8)
GREEDY, TOP_K = Sampling(), Sampling(temperature=1.2, top_k=5, seed=3)
FULL, WIDE = Sampling(temperature=0.8, top_p=0.9, seed=4), Sampling(temperature=1.5, top_k=300, seed=5)


def request(index: int, sampling: Sampling, *, new: int = 20) -> Request:
    prompt = (index + 1, 5, index + 2)
    return Request(index, prompt, sampling, len(prompt) + new)


class Kinds:
    """Notes the kind of every prompt and round, each of which is what its parameters ask for."""

    def __init__(self, inner: Rounds, prompts: list[SamplingKind], rounds: list[SamplingKind]) -> None:
        self._inner, self._prompts, self._rounds = inner, prompts, rounds

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def start(self, slot: int, prompt: list[int], sampling: SamplingTensors) -> Reading:
        self._prompts.append(sampling.kind)
        return self._inner.start(slot, prompt, sampling)

    def __call__(self, commit: Commit, sampling: SamplingTensors, limits: RoundLimits) -> RoundResult:
        assert sampling.kind == kind_of_params(sampling.params)
        self._rounds.append(sampling.kind)
        return self._inner(commit, sampling, limits)


def generator(slots: int, k: int) -> SpeculativeGenerator:
    return Checked(TableDecoder(DRAFT, slots=slots), TableDecoder(TARGET, slots=slots), k=k)


def served(made: SpeculativeGenerator, requests: list[Request]) -> list[list[int]]:
    """The tokens of every request."""
    texts: list[list[int]] = [[] for _ in requests]
    with closing(made.serve(ListQueue(requests))) as outputs:
        for output in outputs:
            texts[output.index] += output.tokens
    return texts


def test_a_round_has_the_widest_sampling_mode_of_its_requests() -> None:
    batch = Batch([None] * 3, RoundShape(2, 3), Statistics())
    params, seen = batch.sampling.params, [batch.sampling.kind]

    def seat(slot: int, sampling: Sampling) -> None:
        batch.seat(slot, request(slot, sampling))
        assert batch.sampling.kind == seen[-1], "its prompt is not read yet"
        batch.join(slot, PrefillResult(1))
        seen.append(batch.sampling.kind)

    seat(0, GREEDY)
    seat(1, WIDE)
    seat(2, TOP_K)
    for index in (1, 2, 0):
        batch.abort([index])
        seen.append(batch.sampling.kind)
    assert seen == ["greedy", "greedy", "wide", "wide", "top-k", "greedy", "greedy"]
    assert batch.sampling.params is params, "rounds see the same tensors"


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("sampled", [TOP_K, FULL, WIDE], ids=["top-k", "full", "wide"])
def test_rounds_use_the_widest_mode_while_its_request_runs(sampled: Sampling, k: int) -> None:
    made, prompts, rounds = generator(2, k), list[SamplingKind](), list[SamplingKind]()
    watch_rounds(made, lambda inner: Kinds(inner, prompts, rounds))
    served(made, [request(0, GREEDY, new=40), request(1, sampled, new=12)])
    kind = kind_of(sampled.temperature, sampled.top_k)
    assert prompts == ["greedy", kind]
    assert rounds == [kind] * rounds.count(kind) + ["greedy"] * rounds.count("greedy")
    assert set(rounds) == {kind, "greedy"}


@pytest.mark.parametrize("k", [0, 3])
def test_every_row_of_a_mixed_batch_keeps_its_tokens(k: int) -> None:
    asked = [GREEDY, FULL, TOP_K, WIDE, GREEDY, TOP_K]
    requests = [request(index, sampling, new=12 + 5 * index) for index, sampling in enumerate(asked)]
    alone = [served(generator(1, k), [Request(0, one.prompt, one.sampling, one.max_length)])[0] for one in requests]
    assert [len(text) for text in alone] == [12 + 5 * index for index in range(len(asked))]
    for slots in (2, 3):
        assert served(generator(slots, k), requests) == alone
