"""Reductions against plain Python sorting: of the largest, the lowest id wins; at a border, equals stand together."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core import reduce

# Every value is a float32, so that two which differ here differ there.
scores = st.lists(
    st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, torch.tensor(reduce.NEGATIVE).item()]),
        st.floats(width=32, allow_nan=False, allow_infinity=False),
    ),
    min_size=1,
    max_size=12,
)
# Multiples of 1/64, so that every sum is exact in float32.
weights = st.lists(st.integers(0, 64), min_size=1, max_size=12)


def ranked(values: list[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda i: (-values[i], i))


@given(scores)
def test_argmax_is_the_lowest_id_of_the_largest(values: list[float]) -> None:
    got = reduce.argmax(torch.tensor([values], dtype=torch.float32))
    assert got.dtype == torch.int32
    assert got.tolist() == [ranked(values)[0]]


def test_argmax_of_nan_is_a_legal_id() -> None:
    assert 0 <= int(reduce.argmax(torch.full((5,), math.nan))) < 5
    rows = torch.tensor([[math.nan, 1.0, 2.0], [0.0, 3.0, 3.0]])
    got = reduce.argmax(rows).tolist()
    assert 0 <= got[0] < 3
    assert got[1] == 1


@pytest.mark.parametrize("size", [1, 100, 8193])
def test_argmax_ties_go_to_the_first_id_and_last_argmax_ties_to_the_last(size: int) -> None:
    assert int(reduce.argmax(torch.zeros(size))) == 0
    assert int(reduce.argmax(torch.arange(size, dtype=torch.float32))) == size - 1


@given(scores, st.integers(1, 14))
def test_top_k_mask_keeps_all_ties_of_its_smallest_value(values: list[float], keep: int) -> None:
    got = reduce.topk_mask(torch.tensor([values], dtype=torch.float32), torch.tensor([float(keep)]))
    border = values[ranked(values)[:keep][-1]]
    assert got[0].tolist() == [value >= border for value in values]


@given(scores, st.integers(1, 12))
def test_exact_top_k_equals_a_stable_sort(values: list[float], count: int) -> None:
    count = min(count, len(values))
    rows = torch.tensor([values], dtype=torch.float32)
    got = reduce.first_of_largest(rows, rows.sort(descending=True).values[:, count - 1 : count], count)
    kept = set(ranked(values)[:count])
    assert got[0].tolist() == [i in kept for i in range(len(values))]


@given(weights, st.integers(1, 64))
def test_heaviest_keeps_the_smallest_set_that_reaches_the_mass(parts: list[int], mass: int) -> None:
    got = reduce.topp_mask(torch.tensor([[p / 64 for p in parts]]), torch.tensor([mass / 64]))
    kept: set[int] = set()
    for index in ranked([float(p) for p in parts]):
        if sum(parts[i] for i in kept) >= mass:
            break
        kept.add(index)
    assert kept
    border = min(parts[i] for i in kept)
    assert got[0].tolist() == [part >= border for part in parts]


def test_every_row_has_its_own_count_and_mass() -> None:
    values = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]])
    assert reduce.topk_mask(values, torch.tensor([1.0, 2.0])).tolist() == [[True, False, False], [True, False, True]]
    spread = torch.tensor([[0.5, 0.2, 0.3]]).expand(2, 3)
    assert reduce.topp_mask(spread, torch.tensor([0.1, 0.75])).tolist() == [[True, False, False], [True, False, True]]
