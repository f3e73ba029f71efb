"""Native probabilities are those of paceline.core.probs: the same cut, the rest up to rounding; row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.core import probs
from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import SamplingTensors
from paceline.decoder.native.ops import Native

SIZES = [1, 7, 8, 100, 4096]
ROWS = 6
PARAMS = [
    Sampling(),
    Sampling(0.7),
    Sampling(1.0, top_k=1),
    Sampling(1.3, top_k=5),
    Sampling(1.0, top_k=100000),
    Sampling(0.9, top_p=0.5),
    Sampling(0.9, top_p=0.95),
    Sampling(2.0, top_p=1e-6),
    Sampling(1.0, min_p=0.1),
    Sampling(1.0, min_p=1.0),
    Sampling(0.8, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(0.01),
    Sampling(50.0, top_k=40),
]
FAINT = 1e-36  # a weight that may as well be zero: exp(-87) of the largest


def normal(size: int, *, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(len(PARAMS), ROWS, size, generator=torch.Generator().manual_seed(seed)) * spread


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Weights of 4096 terms summed in another order differ by a few units in the last place, zeros not at all."""
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    assert not found[wanted == 0].any()
    assert (found[wanted > FAINT] > 0).all()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert (found.double().sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.1, 3.0, 30.0])
def test_native_probabilities_equal_the_reference(native: Native, size: int, spread: float) -> None:
    x, sampling = normal(size, spread=spread), sampling_tensors(PARAMS)
    assert_same(native.probabilities(x, sampling), probs.probabilities(x, sampling))


@pytest.mark.parametrize(("size", "levels"), [*((n, levels) for n in SIZES[:-1] for levels in (1, 2, 3)), (4096, 1)])
def test_native_probability_ties_equal_the_reference(native: Native, size: int, levels: int) -> None:
    """Logits of a few values: every cut goes through a group of equals.

    Not with thousands of weights of two sizes: there top-p's border is a matter of the order of a sum.
    """
    drawn = torch.Generator().manual_seed(levels)
    x, sampling = torch.randint(levels, (len(PARAMS), ROWS, size), generator=drawn).float(), sampling_tensors(PARAMS)
    assert_same(native.probabilities(x, sampling), probs.probabilities(x, sampling))


def test_greedy_is_one_hot_at_the_lowest_of_equals(native: Native) -> None:
    x = torch.tensor([[[-0.0, 0.0, -1.0], [1.0, 2.0, 2.0], [-1.0, -2.0, 3.0]]])
    assert native.probabilities(x, sampling_tensors([Sampling()])).tolist() == [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]]


def test_masked_tokens_have_probability_zero(native: Native) -> None:
    x = normal(100)
    x[..., ::3] = -1e30
    sampling = sampling_tensors(PARAMS)
    found = native.probabilities(x, sampling)
    assert not found[..., ::3].any()
    assert_same(found, probs.probabilities(x, sampling))


def test_a_sampled_token_has_positive_probability(native: Native) -> None:
    x, sampling = normal(100), sampling_tensors(PARAMS)
    found = native.probabilities(x, sampling)
    for shift in range(50):
        at = torch.arange(ROWS, dtype=torch.int32).expand(len(PARAMS), ROWS) + shift * ROWS
        chosen = native.sample_tokens(x, at.contiguous(), sampling).long().unsqueeze(-1)
        assert (found.gather(-1, chosen) > 0).all()


def test_probabilities_do_not_depend_on_other_rows(native: Native) -> None:
    sampling, x = sampling_tensors(PARAMS), normal(100)
    whole = native.probabilities(x, sampling)
    for b in range(len(PARAMS)):
        alone = SamplingTensors(sampling.params[b : b + 1], sampling.seeds[b : b + 1])
        for t in range(ROWS):
            assert torch.equal(native.probabilities(x[b : b + 1, t : t + 1].contiguous(), alone)[0, 0], whole[b, t])


def test_junk_logits_affect_only_their_row(native: Native) -> None:
    sampling, x = sampling_tensors(PARAMS), normal(100)
    clean = native.probabilities(x, sampling)
    dirty = x.clone()
    dirty[:, ::2] = float("nan")
    assert torch.equal(native.probabilities(dirty, sampling)[:, 1::2], clean[:, 1::2])


def test_probabilities_are_the_same_with_any_threads_and_inputs_stay(native: Native, restored_threads: None) -> None:
    sampling, x = sampling_tensors(PARAMS), normal(4096)
    before, seen = x.clone(), []
    for threads in (1, 2, 3, 8):
        torch.set_num_threads(threads)
        seen.append(native.probabilities(x, sampling))
    assert all(torch.equal(seen[0], other) for other in seen)
    assert torch.equal(x, before)
