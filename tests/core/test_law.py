"""Distributions against Hugging Face's warpers, and choices against distributions."""

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from paceline.core import noise, probs
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import SamplingTensors
from tests.fakes import misfit


def batch(**params: float) -> SamplingTensors:
    return sampling_tensors([Sampling(**params)])  # type: ignore[arg-type]


def random_logits(rows: int, vocab_size: int, *, seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(1, rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def theirs(
    logits: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    scores, ids = logits[0].clone(), torch.zeros(logits.shape[1], 1, dtype=torch.int64)
    warpers: list[hf.LogitsProcessor] = [hf.TemperatureLogitsWarper(temperature)]
    warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [hf.MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(ids, scores)
    return torch.softmax(scores, -1).unsqueeze(0)


PARAMS = [
    *({"temperature": temperature} for temperature in (1.0, 0.3, 2.0)),
    *({"temperature": temperature, "top_k": top_k} for temperature, top_k in ((1.0, 1), (0.8, 5), (1.0, 10_000))),
    *({"temperature": temperature, "top_p": top_p} for temperature, top_p in ((1.0, 0.5), (1.4, 0.95), (1.0, 0.01))),
    *({"temperature": temperature, "min_p": min_p} for temperature, min_p in ((1.0, 0.1), (0.7, 1.0))),
    {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]


@pytest.mark.parametrize("vocab_size", [2, 100, 1025])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_probabilities_equal_those_of_hugging_face(params: dict[str, float], vocab_size: int) -> None:
    logits = random_logits(6, vocab_size, seed=1)
    params = {name: min(value, vocab_size) if name == "top_k" else value for name, value in params.items()}
    ours = probs.probabilities(logits, batch(**params))
    wanted = theirs(logits, **params)  # type: ignore[arg-type]
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)
    assert ours.dtype == torch.float32 and torch.equal(ours == 0, wanted == 0)
    torch.testing.assert_close(ours.sum(-1), torch.ones(1, 6), atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_filters_that_are_off_change_no_bit(temperature: float) -> None:
    logits, sampling = random_logits(6, 100, seed=2), batch(temperature=temperature)
    where = torch.arange(6, dtype=torch.int32).unsqueeze(0)
    assert torch.equal(probs.probabilities(logits, sampling), probs.probabilities(logits, sampling, cut=False))
    assert torch.equal(
        probs.sample_tokens(logits, where, sampling), probs.sample_tokens(logits, where, sampling, cut=False)
    )
    assert torch.equal(probs.apply_top_k_top_p_min_p(logits, sampling), probs.apply_temperature(logits, sampling))


def test_rows_of_a_batch_have_separate_distributions() -> None:
    asked = [Sampling(temperature=0.5), Sampling(), Sampling(temperature=1.0, top_k=3)]
    logits = random_logits(4, 50, seed=3)
    together = probs.probabilities(logits.expand(3, 4, 50), sampling_tensors(asked))
    for row, one in enumerate(asked):
        assert torch.equal(together[row], probs.probabilities(logits, sampling_tensors([one]))[0])


def test_greedy_is_one_hot_at_the_lowest_id_of_the_maximum() -> None:
    logits = torch.tensor([[[0.0, 3.0, 3.0, 1.0], [5.0, 5.0, 5.0, 5.0], [-9.0, -8.0, -7.0, -6.0]]])
    found = probs.probabilities(logits, batch())
    assert found.tolist() == [[[0.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]]
    assert probs.sample_tokens(logits, torch.tensor([[7, 8, 9]], dtype=torch.int32), batch()).tolist() == [[1, 0, 3]]


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.5}], ids=str)
def test_top_k_keeps_all_ties_at_its_border_as_transformers_does(cut: dict[str, float]) -> None:
    found = probs.probabilities(torch.tensor([[[1.0, 2.0, 1.0, 1.0, 0.0]]]), batch(temperature=1.0, **cut))
    assert (found[0, 0] > 0).tolist() == [True, True, True, True, False]


def test_ranking_equals_sampling_without_replacement() -> None:
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(3))
    where = torch.tensor([[3, 4, 5], [9, 9, 7]], dtype=torch.int32)
    sampling = sampling_tensors([Sampling(temperature=0.8, seed=4), Sampling()])
    ids, logprob = probs.rank_tokens(logits, where, sampling, count=5)
    left = logits.clone()
    for place in range(5):
        chosen = probs.sample_tokens(left, where, sampling)
        assert torch.equal(ids[..., place], chosen)
        left.scatter_(-1, chosen.long().unsqueeze(-1), -1e30)
    exact = logits[1].log_softmax(-1).sort(-1, descending=True).values[:, :5]
    torch.testing.assert_close(logprob[1], exact)
    some = torch.tensor([2, 7, 11, 30], dtype=torch.int32)
    part, _ = probs.rank_tokens(logits[..., some.long()], where, sampling, count=4, ids=some)
    every, _ = probs.rank_tokens(logits, where, sampling, count=40)
    kept = [[token for token in row if token in some.tolist()] for row in every.flatten(0, 1).tolist()]
    assert part.flatten(0, 1).tolist() == kept


def test_half_precision_logits_give_float32_probabilities() -> None:
    logits = random_logits(3, 30, seed=4).to(torch.bfloat16)
    found = probs.probabilities(logits, batch(temperature=1e-3))
    assert found.dtype == torch.float32
    assert bool(found.isfinite().all())


@pytest.mark.parametrize("params", [k for k in PARAMS if k.get("top_k") != 10_000], ids=str)
def test_samples_follow_the_distribution(params: dict[str, float]) -> None:
    rows, logits = 50_000, random_logits(1, 12, seed=5)
    where = torch.arange(rows, dtype=torch.int32).unsqueeze(0)
    picked = probs.sample_tokens(logits.expand(1, rows, 12), where, batch(**params))[0]
    assert (
        misfit(picked.unsqueeze(1).numpy(), probs.probabilities(logits, batch(**params))[0, 0].double().numpy()) > 1e-3
    )


def test_a_sample_depends_only_on_position_seed_and_stream() -> None:
    logits = random_logits(5, 64, seed=6, spread=0.1)
    where = torch.tensor([[3, 4, 5, 6, 7]], dtype=torch.int32)
    whole = probs.sample_tokens(logits, where, batch(temperature=1.0, seed=9))[0].tolist()
    for row in range(5):
        one = probs.sample_tokens(logits[:, row : row + 1], where[:, row : row + 1], batch(temperature=1.0, seed=9))
        assert one.tolist() == [[whole[row]]]
    assert probs.sample_tokens(logits, where, batch(temperature=1.0, seed=10))[0].tolist() != whole
    drawn = probs.sample_tokens(logits, where, batch(temperature=1.0, seed=9), stream=noise.DRAFT)
    assert drawn[0].tolist() != whole
