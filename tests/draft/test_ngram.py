"""Prompt lookup against a search of the text from its end, and the golden cases of vLLM and llama.cpp."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.errors import ConfigurationError
from paceline.core.types import PAD, Commit, Proposal, RoundLimits, SamplingTensors
from paceline.draft.base import FunctionDrafter
from paceline.draft.ngram import NgramDrafter


def ints(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def commit(rows: list[list[int]], width: int = 4) -> Commit:
    padded = [row + [PAD] * (width - len(row)) for row in rows]
    return Commit(ints(padded), ints([[len(row) for row in rows]])[0], ints([[0] * len(rows)])[0])


def propose(drafter: object, last: Commit, limit: int = 9) -> list[list[int]]:
    slots = len(last.tokens)
    sampling = SamplingTensors(torch.zeros(slots, 4), torch.zeros(slots, 4, dtype=torch.int32))
    made: Proposal = drafter.propose(last, sampling, RoundLimits([limit] * slots, 9))  # type: ignore[attr-defined]
    assert made.draft_probs is None
    assert made.tokens.dtype == torch.int32
    return made.tokens.tolist()


def search(text: list[int], length: int, sizes: range, *, first: bool) -> list[int]:
    """Tokens that followed the longest earlier match of the last tokens."""
    for size in reversed(sizes):
        places = [at for at in range(size, len(text)) if text[at - size : at] == text[len(text) - size :]]
        if places and size <= len(text):
            at = places[0] if first else places[-1]
            return text[at : at + length]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=14), st.integers(1, 13), st.booleans(), st.integers(1, 3))
def test_ngram_proposals_equal_a_search(text: list[int], cut: int, first: bool, longest: int) -> None:
    drafter = NgramDrafter(3, prompt_lookup_max=longest, prefer="first" if first else "recent")
    head, tail = text[:cut], text[cut:]
    drafter.add_request(0, head)
    for at in range(0, len(tail), 3):  # in rounds of up to three tokens
        drafter.update(commit([tail[at : at + 3]]))
    wanted = search(text, 3, range(1, longest + 1), first=first)
    assert propose(drafter, commit([[0]])) == [wanted + [PAD] * (3 - len(wanted))]


@pytest.mark.parametrize(
    ("text", "options", "wanted"),
    [
        ([1, 2, 3, 4, 1, 2, 3], {"prompt_lookup_max": 2, "prompt_lookup_min": 2}, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], {"prompt_lookup_max": 4}, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 5], {}, [PAD, PAD, PAD]),
        ([2, 7, 1, 2, 8, 1, 2], {"prefer": "recent"}, [8, 1, 2]),
        ([1, 2, 7, 1, 2, 8, 1, 2], {"prefer": "first"}, [7, 1, 2]),
        ([3, 9, 1, 3, 5, 1, 3], {"prefer": "first"}, [5, 1, 3]),
        ([6, 6], {}, [6, PAD, PAD]),
        ([6], {}, [PAD, PAD, PAD]),
    ],
)
def test_ngram_lookups_match_golden_values(text: list[int], options: dict[str, object], wanted: list[int]) -> None:
    drafter = NgramDrafter(3, **options)  # type: ignore[arg-type]
    drafter.add_request(0, text)
    assert propose(drafter, commit([[0]])) == [wanted]


def test_slots_are_separate_and_a_new_request_clears_its_slot() -> None:
    drafter = NgramDrafter(2)
    drafter.add_request(0, [1, 2, 1])
    drafter.add_request(2, [5, 6, 5])
    drafter.update(commit([[2], [9], [6, 5]]))
    assert propose(drafter, commit([[0]] * 3)) == [[1, 2], [PAD, PAD], [6, 5]]
    drafter.add_request(0, [3])
    assert propose(drafter, commit([[0]] * 3))[0] == [PAD, PAD]


def test_impossible_ngram_options_are_rejected() -> None:
    for sizes in ((0, 1), (2, 0), (1, 2)):
        with pytest.raises(ConfigurationError, match="1 <= prompt_lookup_min <= prompt_lookup_max"):
            NgramDrafter(2, prompt_lookup_max=sizes[0], prompt_lookup_min=sizes[1])
    with pytest.raises(ConfigurationError, match="'recent' or 'first'"):
        NgramDrafter(2, prefer="last")  # type: ignore[arg-type]


def test_a_drafting_function_gets_the_full_sequence_and_only_needed_calls() -> None:
    seen: list[list[int]] = []

    def function(text: list[int]) -> list[int]:
        seen.append(text)
        text.append(99)  # its own copy
        return [7, 8, 9]

    drafter = FunctionDrafter(function, 2)
    drafter.add_request(1, [4, 5])
    drafter.update(commit([[0], [6, 7]]))
    assert propose(drafter, commit([[0], [6, 7]])) == [[PAD, PAD], [7, 8]]
    drafter.update(commit([[0], [1]]))
    assert propose(drafter, commit([[0], [1]]), limit=0) == [[PAD, PAD], [PAD, PAD]]
    assert propose(drafter, commit([[0], [1]])) == [[PAD, PAD], [7, 8]]
    assert seen == [[4, 5, 6, 7, 99], [4, 5, 6, 7, 1, 99]]
