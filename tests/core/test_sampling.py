"""Sampling values: what is rejected, and what becomes of the rest as tensors."""

import math

import pytest
import torch

from paceline.core import probs, reduce
from paceline.core.errors import RequestError, SamplingError
from paceline.core.sampling import (
    SAMPLING_KINDS,
    TOP_K_LIMIT,
    Sampling,
    kind_of,
    kind_of_params,
    row_seed,
    sampling_tensors,
    seed_row,
    widest,
)
from paceline.core.types import SamplingKind


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature: expected a finite number of at least 0, got -0.1"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": 1e-38}, "temperature: expected 0 or at least 1e-20"),
        ({"temperature": 9e-21}, "use 0 for greedy"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": 1.1e20}, "temperature: expected at most 1e+20"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_k": -1}, "top_k: expected 0 (off) or a positive integer, got -1"),
        ({"top_p": 0.0}, "top_p: expected a number above 0 and at most 1, got 0.0"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_p": 9e-31}, "top_p: expected at least 1e-30, the least that float32 distinguishes from 0, got 9e-31"),
        ({"top_p": math.nan}, "top_p"),
        ({"min_p": -0.1}, "min_p: expected a number from 0 to 1, got -0.1"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": math.nan}, "min_p"),
        ({"seed": 1 << 64}, "seed: expected an integer of at most 64 bits"),
        ({"seed": -(1 << 63) - 1}, "seed"),
    ],
    ids=str,
)
def test_out_of_range_values_are_rejected_by_name(values: dict[str, float], message: str) -> None:
    with pytest.raises(SamplingError) as caught:
        Sampling(**values)  # type: ignore[arg-type]
    assert message in str(caught.value) and [caught.value.param] == [*values]
    assert isinstance(caught.value, (RequestError, ValueError))


@pytest.mark.parametrize("top_k", [1 << 24, 10**9, 10**30])
def test_a_top_k_above_the_vocabulary_size_filters_nothing(top_k: int) -> None:
    logits = torch.randn(1, 3, 40, generator=torch.Generator().manual_seed(0))
    off, huge = (sampling_tensors([Sampling(temperature=1.0, top_k=k)]) for k in (0, top_k))
    assert probs.probabilities(logits, huge).equal(probs.probabilities(logits, off))


@pytest.mark.parametrize("sign", [1, -1])
def test_the_smallest_temperature_is_greedy_with_any_filter(sign: int) -> None:
    logits = sign * torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0)).abs() * 1e4
    asked = sampling_tensors([Sampling(temperature=1e-20, top_k=5), Sampling(temperature=1e-20, top_p=0.9)])
    positions = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert torch.equal(probs.sample_tokens(logits, positions, asked), logits.argmax(-1).to(torch.int32))


def test_top_k_1_samples_among_ties_and_temperature_0_takes_the_lowest_id() -> None:
    logits, seeds = torch.tensor([[[1.0, 3.0, 2.0, 3.0]]]).expand(64, -1, -1), range(64)
    where = torch.zeros(64, 1, dtype=torch.int32)
    drawn = sampling_tensors([Sampling(temperature=1.0, top_k=1, seed=seed) for seed in seeds])
    assert set(probs.sample_tokens(logits, where, drawn).flatten().tolist()) == {1, 3}
    greedy = sampling_tensors([Sampling(seed=seed) for seed in seeds])
    assert set(probs.sample_tokens(logits, where, greedy).flatten().tolist()) == {1}


def test_the_least_top_p_is_greedy() -> None:
    """Less is 0 to a device, where nothing stood inside of it and any id came out."""
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    asked = sampling_tensors([Sampling(temperature=1.0, top_p=1e-30, seed=seed) for seed in range(2)])
    positions = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert torch.equal(probs.sample_tokens(logits, positions, asked), logits.argmax(-1).to(torch.int32))


def test_banned_tokens_stay_banned_at_the_highest_temperature() -> None:
    logits = torch.full((1, 1, 40), reduce.NEGATIVE)
    logits[..., 17:19] = torch.tensor([3.0, -3.0])
    found = probs.probabilities(logits, sampling_tensors([Sampling(temperature=1e20)]))
    assert found[0, 0, 17:19].tolist() == [0.5, 0.5] and found.sum() == 1


def test_seeds_map_to_distinct_16_bit_halves() -> None:
    """The first output of SplitMix64 for seed 0 is 0xE220A8397B1DCDAF."""
    assert seed_row(0) == [0xCDAF, 0x7B1D, 0xA839, 0xE220]
    assert seed_row(-1) == seed_row((1 << 64) - 1)
    seeds = [*range(1000), *(1 << bit for bit in range(10, 64))]
    rows = {tuple(seed_row(seed)) for seed in seeds}
    assert len(rows) == len(seeds) and all(0 <= limb < 1 << 16 for row in rows for limb in row)


def test_row_0_has_the_seed_itself_and_other_rows_a_hash() -> None:
    assert row_seed(7, 0) == 7 and row_seed(-7, 0) == -7
    assert len({row_seed(seed, row) for seed in range(100) for row in range(100)}) == 10_000
    assert all(0 <= row_seed(-1, row) < 1 << 64 for row in range(1, 50))


def test_a_batch_keeps_slot_order_and_types() -> None:
    made = sampling_tensors([Sampling(temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=5), Sampling()])
    assert made.params.tolist() == [[0.5, 3.0, 0.75, 0.25], [0.0, 0.0, 1.0, 0.0]]
    assert made.seeds.tolist() == [seed_row(5), seed_row(0)]
    assert (made.params.dtype, made.seeds.dtype) == (torch.float32, torch.int32)


KINDS: list[tuple[dict[str, float], SamplingKind]] = [
    ({}, "greedy"),
    ({"top_k": 5, "top_p": 0.5}, "greedy"),
    ({"temperature": 1e-20, "top_k": 1}, "top-k"),
    ({"temperature": 1.0, "top_k": TOP_K_LIMIT, "min_p": 0.1}, "top-k"),
    ({"temperature": 1.0}, "full"),
    ({"temperature": 1.0, "top_p": 0.9, "min_p": 0.1}, "full"),
    ({"temperature": 1.0, "top_k": 10**30}, "full"),
    ({"temperature": 1.0, "top_k": TOP_K_LIMIT + 1}, "wide"),
]


@pytest.mark.parametrize(("values", "kind"), KINDS, ids=str)
def test_the_sampling_mode_of_a_request_is_that_of_its_tensors(values: dict[str, float], kind: SamplingKind) -> None:
    one = Sampling(**values)  # type: ignore[arg-type]
    made = sampling_tensors([one])
    assert kind_of(one.temperature, one.top_k) == kind_of_params(made.params) == made.kind == kind


def test_a_batch_has_the_widest_sampling_mode_of_its_rows() -> None:
    rows = [Sampling(**values) for values, _ in KINDS]  # type: ignore[arg-type]
    for last in range(1, len(rows) + 1):
        kinds = [kind for _, kind in KINDS[:last]]
        made = sampling_tensors(rows[:last])
        assert made.kind == kind_of_params(made.params) == widest(kinds) == kinds[-1]
        assert widest(reversed(kinds)) == kinds[-1]


def test_sampling_modes_are_ordered_and_an_empty_batch_is_greedy() -> None:
    assert SAMPLING_KINDS == ("greedy", "top-k", "full", "wide")
    assert widest([]) == "greedy" and widest(SAMPLING_KINDS) == "wide"
    assert kind_of_params(torch.zeros(0, 4)) == "greedy"
