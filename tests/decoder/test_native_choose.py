"""The native choice of a token and its noise are those of `core`, bit for bit; its probabilities up to rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.core import noise, probs
from paceline.core.sampling import IDLE_ROW, Sampling, sampling_tensors
from paceline.core.types import PAD, SamplingTensors
from paceline.decoder.native import build
from paceline.decoder.native.ops import Native
from tests.decoder.other_kernels import call

SIZES = [1, 7, 8, 100, 4096]
PARAMS = [
    Sampling(), Sampling(0.7, seed=1), Sampling(1.0, seed=-5), Sampling(1.0, top_k=1, seed=2),
    Sampling(1.3, top_k=5, seed=3), Sampling(1.0, top_k=100000, seed=3), Sampling(0.9, top_p=0.5, seed=4),
    Sampling(0.9, top_p=0.95, seed=1 << 63), Sampling(2.0, top_p=1e-6, seed=5), Sampling(1.0, min_p=0.1, seed=6),
    Sampling(1.0, min_p=1.0, seed=6), Sampling(0.8, top_k=20, top_p=0.9, min_p=0.02, seed=(1 << 64) - 1),
    Sampling(0.01, seed=8), Sampling(50.0, top_k=40, seed=9),
]  # fmt: skip


def logits(size: int, *, rows: int = 6, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(len(PARAMS), rows, size, generator=torch.Generator().manual_seed(seed)) * spread


def places(rows: int = 6) -> Tensor:
    return torch.arange(rows, dtype=torch.int32).expand(len(PARAMS), rows) * 977 + torch.arange(
        len(PARAMS), dtype=torch.int32
    ).unsqueeze(1)


FAINT = 1e-36  # a weight that may as well be zero: exp(-87) of the largest


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Weights of 4096 terms summed in another order differ by a few units in the last place, zeros not at all."""
    assert found.dtype == torch.float32 and found.shape == wanted.shape
    assert not found[wanted == 0].any()
    assert (found[wanted > FAINT] > 0).all()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)
    assert (found.double().sum(-1) - 1).abs().max() < 1e-5


@pytest.mark.parametrize("size", SIZES)
def test_native_choices_and_probabilities_equal_the_reference(native: Native, size: int) -> None:
    """Also of masked tokens, and of a few values, where every cut goes through a group of equals: not the probabilities
    of thousands of weights of two sizes, where top-p's border is a matter of the order of a sum.
    """
    sampling = sampling_tensors(PARAMS)
    cases = [(logits(size, seed=seed, spread=spread), True) for seed, spread in enumerate((3.0, 0.1, 30.0, 1.0))]
    cases[-1][0][..., ::3] = -1e30
    for levels in (1, 2, 3):
        drawn = torch.Generator().manual_seed(levels)
        x = torch.randint(levels, (len(PARAMS), 6, size), generator=drawn).float()
        cases.append((x, size < 4096 or levels == 1))
    for x, comparable in cases:
        for stream in (noise.TARGET, noise.DRAFT):
            chosen = native.sample_tokens(x, places(), sampling, stream=stream)
            assert chosen.dtype == torch.int32
            assert torch.equal(chosen, probs.sample_tokens(x, places(), sampling, stream=stream))
        if comparable:
            assert_same(native.probabilities(x, sampling), probs.probabilities(x, sampling))


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 30.0])
def test_large_vocabularies_skip_noise_for_tokens_that_cannot_win(native: Native, spread: float) -> None:
    """Ids beyond 16 bits, a size that no block divides, and nuclei whose first draws lie outside."""
    params = [*PARAMS, Sampling(1.0, top_k=3000, top_p=0.3, seed=11), Sampling(1.5, top_p=0.01, min_p=1e-4, seed=12)]
    sampling = sampling_tensors(params)
    x = torch.randn(len(params), 2, 70_001, generator=torch.Generator().manual_seed(5)) * spread
    if not spread:
        x = torch.randint(3, x.shape, generator=torch.Generator().manual_seed(5)).float()
    at = torch.arange(2 * len(params), dtype=torch.int32).view(-1, 2)
    assert torch.equal(native.sample_tokens(x, at, sampling), probs.sample_tokens(x, at, sampling))


def test_logits_of_a_slot_without_a_request_are_not_looked_at(native: Native) -> None:
    """With junk of any kind the ids are legal, and every other row is unchanged."""
    sampling = sampling_tensors(PARAMS)
    idle = list(range(0, len(PARAMS), 3))
    sampling.params[idle] = torch.tensor(IDLE_ROW)
    x = logits(100)
    wanted = probs.sample_tokens(x, places(), sampling)
    for junk in (float("nan"), float("inf"), 0.0):
        x[idle] = junk
        chosen = native.sample_tokens(x, places(), sampling)
        ranked, logprobs = native.rank_tokens(x, places(), sampling, count=4)
        likely = native.probabilities(x, sampling)
        for row in range(len(PARAMS)):
            if row not in idle:
                assert torch.equal(chosen[row], wanted[row]) and torch.equal(ranked[row, :, 0], wanted[row])
        assert not chosen[idle].any() and torch.equal(ranked[idle], torch.arange(4).expand_as(ranked[idle]).int())
        assert torch.isfinite(logprobs).all() and torch.allclose(likely.sum(-1), torch.ones(likely.shape[:-1]))


def test_logits_of_a_row_without_a_position_are_not_looked_at(native: Native) -> None:
    sampling, x, positions = sampling_tensors(PARAMS), logits(100), places()
    wanted = native.sample_tokens(x, positions, sampling)
    unused = torch.arange(positions.shape[1]) >= torch.arange(positions.shape[0]).unsqueeze(1) % positions.shape[1]
    x[unused] = float("nan")
    chosen = native.sample_tokens(x, torch.where(unused, PAD, positions), sampling)
    assert torch.equal(chosen, torch.where(unused, 0, wanted))


def one(sampling: Sampling) -> SamplingTensors:
    return sampling_tensors([sampling])


def test_zeros_of_either_sign_tie(native: Native) -> None:
    zeros, first = torch.tensor([[[-0.0, 0.0, -0.0]]]), torch.zeros(1, 1, dtype=torch.int32)
    assert int(native.sample_tokens(zeros, first, one(Sampling()))) == 0


def test_native_noise_is_bitwise_identical_to_the_reference(native: Native) -> None:
    """Two ids whose logits differ by exactly the difference of their noise tie, and one float less decides.

    A row holds the noise that is drawn with its sign changed: what the kernel adds cancels it, every id ties at zero,
    and the lowest wins. Were a single bit of the noise of an id other, that id would win, or the lowest lose.
    """
    size, rows = 4096, 64
    for seed in (0, 1, -3, 1 << 40, (1 << 64) - 1):
        sampling = one(Sampling(1.0, seed=seed))
        positions = torch.arange(rows, dtype=torch.int32).unsqueeze(0) * 37
        for stream in (noise.TARGET, noise.DRAFT, noise.RESIDUAL):
            drawn = noise.gumbel(sampling.seeds, positions, size, stream=stream)
            assert not native.sample_tokens(-drawn, positions, sampling, stream=stream).any()
            # And the other way round: raise each of some ids by the least there is, and it wins.
            for index in (1, 77, 4095):
                raised = -drawn
                raised[..., index] += 2.0**-18
                assert (native.sample_tokens(raised, positions, sampling, stream=stream) == index).all()


def test_native_noise_equals_plain_arithmetic_bit_for_bit() -> None:
    size = 5003
    for seed in (0, 1, -3, 1 << 40, (1 << 64) - 1):
        seeds = one(Sampling(1.0, seed=seed)).seeds
        for position in (0, 1, 4095, (1 << 24) - 1):
            for stream in range(4):
                out = torch.empty(size)
                call(build.library(), "paceline_gumbel", seeds, position, stream, out, size)
                place = torch.tensor([[position]], dtype=torch.int32)
                assert torch.equal(out, noise.gumbel(seeds, place, size, stream=stream)[0, 0])


def test_greedy_is_one_hot_at_the_lowest_of_equals(native: Native) -> None:
    x = torch.tensor([[[-0.0, 0.0, -1.0], [1.0, 2.0, 2.0], [-1.0, -2.0, 3.0]]])
    assert native.probabilities(x, sampling_tensors([Sampling()])).tolist() == [[[1, 0, 0], [0, 1, 0], [0, 0, 1]]]
