"""A text is followed along what it repeats, over the tokens that it changes."""

from __future__ import annotations

from itertools import takewhile

import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.sampling import Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, RoundLimits
from paceline.draft.suffix import CopyTracker, SuffixDrafter

SOURCE = list(range(100, 160))


def commit(tokens: list[int], start: int) -> Commit:
    row = torch.tensor([tokens], dtype=torch.int32)
    return Commit(row, torch.tensor([len(tokens)], dtype=torch.int32), torch.tensor([start], dtype=torch.int32))


def aligned(run: int = 32) -> CopyTracker:
    made = CopyTracker()
    made.begin(SOURCE, 0, run)
    return made


@given(st.integers(1, 50), st.integers(0, 59), st.integers(0, 9))
def test_a_repetition_is_followed(run: int, count: int, ahead: int) -> None:
    text = aligned(run)
    text.follow(SOURCE[:count])
    assert text.run == run + count and text.ahead(ahead) == SOURCE[count : count + ahead]


def test_a_changed_token_is_substituted_from_then_on() -> None:
    text = CopyTracker()
    text.begin([1, 5, 2, 5, 3, 5, 4], 0, 32)
    text.follow([1, 9])
    assert text.run == 33 // 8 and text.ahead(4) == [2, 5, 3, 5], "it may be a change or the end"
    text.follow([2])
    assert text.ahead(4) == [9, 3, 9, 4], "it was a change"
    text.follow([9, 3])
    assert text.run == 33 // 8 + 3
    text.follow([5])
    assert text.ahead(1) == [4] and text.run == 33 // 8 + 4, "as in the source, which is no change"
    text.begin([5, 5], 0, 8)
    assert text.ahead(2) == [5, 5], "it is not changed everywhere"


def test_two_consecutive_mismatches_end_a_repetition() -> None:
    text = aligned()
    text.follow([100, 7, 8, 103, 104])
    assert text.run == 0
    text.begin(SOURCE, 0, 3)
    text.follow([7])
    assert text.run == 1, "so short a one proposes nothing, and may grow again"
    text.follow(SOURCE[1:])
    assert text.run == 60
    text.follow([1])
    assert text.run == 0, "behind the end of the source there is nothing"


def test_a_separator_ends_a_repetition() -> None:
    """A separator, such as between two outputs in a corpus."""
    text = CopyTracker()
    text.begin([*SOURCE, -2, 1, 2, 3], 0, 32)
    text.follow([*SOURCE, 9, 1])
    assert text.run == 0


def test_a_text_without_repetition_is_not_followed() -> None:
    text = CopyTracker()
    text.follow([1, 2, 3])
    assert text.run == 0 and text.ahead(3) == []


def test_a_copy_with_another_name_takes_few_rounds() -> None:
    """The name stands at every seventh place: where a token that differs is an end, no round gets past it."""
    name, other = 0, 1
    file = [token for line in range(6) for token in (*range(2 + 6 * line, 8 + 6 * line), name)]
    whole = [*file, *(other if token == name else token for token in file)]
    drafter, at = SuffixDrafter(8), len(file) + 12  # in the second line of the copy
    drafter.add_request(0, whole[:at])
    gained: list[int] = []
    while at < len(whole):
        (drafts,) = drafter.chains(commit([PAD], at), sampling_tensors([Sampling()]), RoundLimits([8], at))
        stand = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(drafts, whole[at:], strict=False)))
        tokens = whole[at : at + stand + 1]
        gained.append(len(tokens))
        drafter.update(commit(tokens, at))
        at += len(tokens)
    # To the name; one token, for it may have been the end; twice as many as are repeated by then; and then all.
    assert gained == [2, 1, 5, 9, 9, 4]
