"""Logits processors that leave no token, as a grammar does that has come to a dead end: named, where it is one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from paceline import FunctionDrafter, SpeculativeGenerator
from paceline.core.errors import SamplingError
from tests.fakes import TableDecoder, table

TARGET = table(10, seed=7, spread=2.0)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("length", [2, 4])
def test_a_dead_end_is_reported_at_the_start_and_later(length: int, do_sample: bool) -> None:
    def cut(ids: Tensor, scores: Tensor) -> Tensor:
        return scores if ids.shape[1] < length else scores - math.inf

    one = SpeculativeGenerator("ngram", TableDecoder(TARGET), k=2)
    with pytest.raises(SamplingError, match=f"expected at least one allowed token after {length} tokens"):
        one.sample([[1, 2]], logits_processor=[cut], eos_token_id=[], do_sample=do_sample)  # type: ignore[list-item]
    one.sample([[1, 2]], max_new_tokens=2)


@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_the_grammar_mask_after_a_forbidden_draft_is_not_a_dead_end(acceptor: str) -> None:
    def never_nine(ids: Tensor, scores: Tensor) -> Tensor:
        return scores - math.inf if 9 in ids else scores.index_fill(1, torch.tensor([9]), -math.inf)

    made = SpeculativeGenerator(FunctionDrafter(lambda _ids: [9, 9], 2), TableDecoder(TARGET), acceptor=acceptor)
    ids = made.sample([[1, 2]], max_new_tokens=4, eos_token_id=[], logits_processor=[never_nine])  # type: ignore[list-item]
    assert isinstance(ids, Tensor) and ids.shape == (1, 6) and 9 not in ids
