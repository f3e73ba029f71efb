"""The joint law of three tokens, exact, in every mode of chains; and that the classic mistake would be seen.

Real verifier, drafters and rounds over table models, 50 000 slots at once, every cache checked at every forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from paceline.core.accept import Match, Reject
from paceline.core.protocols import Drafter
from paceline.core.sampling import Sampling, knob_row
from paceline.core.types import PAD, Bounds, Commit, Outline, Proposal, Reads, SamplingBatch
from paceline.draft.lift import lift
from paceline.draft.model import ModelDrafter
from paceline.draft.ngram import NgramDrafter
from paceline.draft.none import NoDrafter
from paceline.rounds import TwoStep
from paceline.target.verifier import Acceptor, CompiledVerifier
from tests.fakes import TableDecoder, WatchedRound, joint, misfit, near, table

SLOTS, V, K = 50_000, 8, 3
PROMPT = [2, 5, 1, 2, 5]
CHAIN = Outline.chain(K)
TARGET = table(V, seed=0, spread=1.2)
DRAFT = near(TARGET, seed=1, spread=0.7)


@dataclass(frozen=True)
class Mislabelled:
    """A drafter that takes the argmax and says that it drew from its softmax."""

    inner: ModelDrafter
    outline: Outline = CHAIN
    reads: Reads | None = None
    reach: int | None = None

    def admit(self, slot: int, prompt: list[int], features: torch.Tensor | None = None) -> None:
        self.inner.admit(slot, prompt)

    def observe(self, commit: Commit) -> None:
        self.inner.observe(commit)

    def propose(self, commit: Commit, sampling: SamplingBatch, bounds: Bounds) -> Proposal:
        greedy = SamplingBatch(torch.zeros_like(sampling.knobs) + torch.tensor([0.0, 0.0, 1.0, 0.0]), sampling.keys)
        taken = self.inner.propose(commit, greedy, bounds).tokens
        law = torch.softmax(DRAFT[commit.tokens.clamp(min=0)[:, :1], taken[:, :1]], -1)  # any law that is not one-hot
        return Proposal(taken, None, law.expand(-1, K, V))


def model(*, drawn: bool) -> ModelDrafter:
    return ModelDrafter(TableDecoder(DRAFT, slots=SLOTS, reaches=(24,)), K, vocab_size=V, drawn=drawn)


def three_tokens(source: Drafter, rule: Acceptor, *, knobs: Sampling) -> tuple[np.ndarray, float]:
    """The first three tokens of every slot, and the mean number committed per round."""
    target = TableDecoder(TARGET, slots=SLOTS, reaches=(24,))
    bodies = [target.body] + ([source.decoder.body] if isinstance(source, ModelDrafter) else [])
    inner = source.inner if isinstance(source, Mislabelled) else source
    for body in [*bodies, *([inner.decoder.body] if isinstance(inner, ModelDrafter) else [])]:
        body.cache[:, : len(PROMPT) - 1] = torch.tensor(PROMPT[:-1])
    if not isinstance(inner, ModelDrafter):
        for slot in range(SLOTS):
            inner.admit(slot, PROMPT[:-1])
    rounds = WatchedRound(TwoStep(source, CompiledVerifier(target, CHAIN, acceptor=rule, wide=True)), bodies)
    rounds.truth.text[:, : len(PROMPT)] = torch.tensor(PROMPT)
    rounds.truth.length[:] = len(PROMPT)
    first = torch.full((SLOTS, K + 1), PAD, dtype=torch.int32)
    first[:, 0] = PROMPT[-1]
    ones = torch.ones(SLOTS, dtype=torch.int32)
    commit = Commit(first, ones, ones * (len(PROMPT) - 1))
    keys = torch.stack((torch.arange(SLOTS, dtype=torch.int32), ones * 77), 1)
    sampling = SamplingBatch(torch.tensor([knob_row(knobs)]).expand(SLOTS, 4), keys)
    counts = []
    while int(rounds.truth.length.min()) < len(PROMPT) + 3:
        rows = int(rounds.truth.length.max())
        commit = rounds(commit, sampling, Bounds(ones * source.outline.nodes, rows))
        counts.append(float(commit.count.double().mean()))
    return rounds.truth.text[:, len(PROMPT) : len(PROMPT) + 3].numpy(), sum(counts) / len(counts)


def follow(text: list[int]) -> list[int]:
    """A drafter that knows nothing of laws."""
    return [(text[-1] + step) % V for step in range(1, K + 1)]


MODES: dict[str, tuple[Callable[[], Drafter], Acceptor]] = {
    "plain": (NoDrafter, Match()),
    "match, coupled draft": (lambda: model(drawn=False), Match()),
    "match, n-gram": (lambda: NgramDrafter(K), Match()),
    "reject, drawn draft": (lambda: model(drawn=True), Reject()),
    "reject, undrawn draft": (lambda: model(drawn=False), Reject()),
    "reject, function": (lambda: lift(follow, K), Reject()),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_joint_law_of_three_tokens_is_the_target_s(mode: str) -> None:
    make, rule = MODES[mode]
    tokens, mean = three_tokens(make(), rule, knobs=Sampling(temperature=1.0))
    assert misfit(tokens, joint(TARGET, *PROMPT[-2:])) > 1e-3
    assert (mean == 1.0) == (mode == "plain")


def test_an_argmax_draft_that_claims_a_softmax_law_is_seen() -> None:
    tokens, _ = three_tokens(Mislabelled(model(drawn=False)), Reject(), knobs=Sampling(temperature=1.0))
    assert misfit(tokens, joint(TARGET, *PROMPT[-2:])) < 1e-6
