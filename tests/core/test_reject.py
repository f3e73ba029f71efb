"""`Reject`: exact in distribution for drawn and undrawn chains, and the golden figures of rejection sampling.

One seed per slot: a batch of many slots is many independent trials.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core import noise, probs
from paceline.core.acceptance.base import committed
from paceline.core.acceptance.rejection import Reject
from paceline.core.sampling import seed_row
from paceline.core.types import PAD, Accepted, Proposal, SamplingTensors
from tests.core.deciding import decide, matched
from tests.fakes import misfit

TRIALS = 25_000
P = torch.tensor([0.1, 0.4, 0.3, 0.2])
Q = torch.tensor([0.05, 0.6, 0.2, 0.15])


def trials(count: int = TRIALS, *, temperature: float = 1.0) -> SamplingTensors:
    keys = torch.tensor([seed_row(seed) for seed in range(count)], dtype=torch.int32)
    return SamplingTensors(torch.tensor([[temperature, 0.0, 1.0, 0.0]]).expand(count, 4), keys)


def places(count: int, rows: int) -> Tensor:
    return torch.arange(5, 5 + rows, dtype=torch.int32).expand(count, rows)


def drawn(q: Tensor, sampling: SamplingTensors) -> Tensor:
    """One draft per trial, from its distribution."""
    logits = q.log().expand(len(sampling.seeds), 1, len(q))
    return probs.sample_tokens(logits, places(len(logits), 1), sampling, stream=noise.DRAFT)


def one(p: Tensor, drafts: Tensor, q: Tensor | None, *, sampling: SamplingTensors) -> Accepted:
    """The verdict on one draft per trial; the row after it has the same distribution."""
    count = len(drafts)
    proposal = Proposal(drafts, None, None if q is None else q.expand(count, 1, len(q)))
    return decide(Reject(), proposal, probs=p.expand(count, 2, len(p)), positions=places(count, 2), sampling=sampling)


def first(proposal: Proposal, verdict: Accepted) -> np.ndarray:
    return committed(proposal, verdict)[:, :1].numpy()


def test_acceptance_residual_and_distribution_match_golden_values() -> None:
    sampling = trials()
    drafts = drawn(Q, sampling)
    verdict = one(P, drafts, Q, sampling=sampling)
    accepted = verdict.count.double().mean()
    assert float(accepted) == pytest.approx(0.80, abs=4 * math.sqrt(0.8 * 0.2 / TRIALS))
    left = verdict.token[verdict.count == 0].unsqueeze(1).numpy()
    assert misfit(left, np.array([0.25, 0, 0.5, 0.25])) > 1e-3
    assert misfit(first(Proposal(drafts), verdict), P.double().numpy()) > 1e-3
    bonus = verdict.token[verdict.count == 1].unsqueeze(1).numpy()
    assert misfit(bonus, P.double().numpy()) > 1e-3


@pytest.mark.parametrize("draft", range(4))
def test_a_draft_that_was_not_sampled_is_a_point_mass(draft: int) -> None:
    sampling = trials()
    drafts = torch.full((TRIALS, 1), draft, dtype=torch.int32)
    verdict = one(P, drafts, None, sampling=sampling)
    share = float(P[draft])
    assert float(verdict.count.double().mean()) == pytest.approx(share, abs=4 * math.sqrt(share / TRIALS))
    assert misfit(first(Proposal(drafts), verdict), P.double().numpy()) > 1e-3


@pytest.mark.parametrize(
    ("p", "q", "draft", "wrong"),
    [(P, Q, 1, 2 / 3), (torch.tensor([0.5, 0.5]), torch.tensor([0.6, 0.4]), 0, 5 / 6)],
    ids=["four tokens", "two tokens"],
)
def test_an_argmax_draft_with_softmax_probabilities_is_detected(p: Tensor, q: Tensor, draft: int, wrong: float) -> None:
    """The classic mistake; the figures are those that other code bases show."""
    sampling = trials()
    drafts = torch.full((TRIALS, 1), draft, dtype=torch.int32)
    verdict = one(p, drafts, q, sampling=sampling)
    out = first(Proposal(drafts), verdict)
    assert float((out == draft).mean()) == pytest.approx(wrong, abs=0.01)
    assert misfit(out, p.double().numpy()) < 1e-6


def test_sample_and_match_acceptance_matches_golden_values() -> None:
    """.335 for an independent draw, .40 for the argmax; and exact in distribution for both."""
    sampling = trials()
    choices = probs.sample_tokens(P.log().expand(TRIALS, 2, 4), places(TRIALS, 2), sampling)
    for drafts, share in ((drawn(Q, sampling), 0.335), (torch.full((TRIALS, 1), 1, dtype=torch.int32), 0.40)):
        verdict = matched(Proposal(drafts), choices)
        assert float(verdict.count.double().mean()) == pytest.approx(share, abs=4 * math.sqrt(share / TRIALS))
        assert misfit(first(Proposal(drafts), verdict), P.double().numpy()) > 1e-3


def test_coupled_drafts_are_accepted_nearly_as_often_as_by_rejection() -> None:
    sampling = trials()
    choices = probs.sample_tokens(P.log().expand(TRIALS, 2, 4), places(TRIALS, 2), sampling)
    drafts = probs.sample_tokens(Q.log().expand(TRIALS, 1, 4), places(TRIALS, 1), sampling)
    rate = float(matched(Proposal(drafts), choices).count.double().mean())
    distance = 0.20  # total variation of P and Q
    assert (1 - distance) / (1 + distance) <= rate <= 1 - distance


def test_a_draft_with_target_probability_zero_is_never_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "uniform", lambda _keys, where, _stream: torch.zeros(where.shape))
    p = torch.tensor([0.0, 1.0])
    for q in (None, torch.tensor([0.5, 0.5])):
        verdict = one(p, torch.zeros(100, 1, dtype=torch.int32), q, sampling=trials(100))
        assert verdict.count.tolist() == [0] * 100
        assert verdict.token.tolist() == [1] * 100


def test_a_draft_with_draft_probability_zero_is_rejected() -> None:
    verdict = one(
        P, torch.zeros(1000, 1, dtype=torch.int32), torch.tensor([0.0, 0.5, 0.25, 0.25]), sampling=trials(1000)
    )
    assert verdict.count.tolist() == [0] * 1000


def test_the_target_as_its_own_draft_is_always_accepted_and_never_nan() -> None:
    p = torch.softmax(torch.randn(16, generator=torch.Generator().manual_seed(0)) * 3, -1)
    sampling = trials(100_000)
    verdict = one(p, drawn(p, sampling), p, sampling=sampling)
    assert float(verdict.count.double().mean()) == 1.0
    assert bool(((verdict.token >= 0) & (verdict.token < 16)).all())


def test_a_residual_without_mass_falls_back_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "uniform", lambda _keys, where, _stream: torch.ones(where.shape))  # rejects all
    sampling = trials()
    verdict = one(P, drawn(P, sampling), P, sampling=sampling)
    assert verdict.count.sum() == 0
    assert misfit(verdict.token.unsqueeze(1).numpy(), P.double().numpy()) > 1e-3


@pytest.mark.parametrize("size", [100, 8193, 10_000, 151_936])
def test_a_recovered_token_is_in_the_vocabulary(size: int) -> None:
    p = torch.zeros(size)
    p[size - 1] = 1.0
    many = min(50, 1_000_000 // size)
    for q in (None, torch.full((size,), 1 / size)):
        verdict = one(p, torch.zeros(many, 1, dtype=torch.int32), q, sampling=trials(many))
        assert verdict.token.tolist() == [size - 1] * many
    empty = one(
        torch.zeros(size), torch.zeros(many, 1, dtype=torch.int32), None, sampling=trials(many)
    )  # no mass at all
    assert bool(((empty.token >= 0) & (empty.token < size)).all())


def test_padding_is_rejected_and_keeps_the_targets_distribution() -> None:
    sampling = trials()
    for q in (None, Q):
        verdict = one(P, torch.full((TRIALS, 1), PAD, dtype=torch.int32), q, sampling=sampling)
        assert int(verdict.count.sum()) == 0
        assert misfit(verdict.token.unsqueeze(1).numpy(), P.double().numpy()) > 1e-3


def test_greedy_accepts_the_argmax_only_and_emits_it_at_a_mismatch() -> None:
    sharp = torch.tensor([0.0, 1.0, 0.0, 0.0])
    for draft, count in ((1, 1), (2, 0)):
        own = torch.eye(4)[draft]
        for q in (None, own):
            drafts = torch.full((64, 1), draft, dtype=torch.int32)
            verdict = one(sharp, drafts, q, sampling=trials(64, temperature=0.0))
            assert verdict.count.tolist() == [count] * 64
            assert verdict.token.tolist() == [1] * 64


def test_sibling_drafts_are_tested_in_order() -> None:
    """Rule C14: 10/9 accepted in the example of Sun et al., 2403.10444; judged as a block it would be 11/9."""
    p, q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])
    sampling, where = trials(), places(TRIALS, 3)
    drafts = probs.sample_tokens(q.log().expand(TRIALS, 2, 2), where[:, :2], sampling, stream=noise.DRAFT)
    verdict = decide(
        Reject(),
        Proposal(drafts, None, q.expand(TRIALS, 2, 2)),
        probs=p.expand(TRIALS, 3, 2),
        positions=where,
        sampling=sampling,
    )
    # Of one draft 2/3 stand, and of two 4/9.
    assert float(verdict.count.double().mean()) == pytest.approx(10 / 9, abs=4 * math.sqrt(62 / 81 / TRIALS))
    assert misfit(committed(Proposal(drafts), verdict)[:, :1].numpy(), p.double().numpy()) > 1e-3


def test_an_acceptance_after_a_rejection_is_not_counted() -> None:
    sharp = torch.eye(4)[[1, 1, 1, 1]]
    drafts = torch.tensor([[2, 1, 1], [1, 2, 1], [1, 1, 1]], dtype=torch.int32)
    verdict = decide(
        Reject(), Proposal(drafts), probs=sharp.expand(3, 4, 4), positions=places(3, 4), sampling=trials(3)
    )
    assert verdict.count.tolist() == [0, 1, 3]
    assert committed(Proposal(drafts), verdict).tolist() == [[1, -1, -1, -1], [1, 1, -1, -1], [1, 1, 1, 1]]
