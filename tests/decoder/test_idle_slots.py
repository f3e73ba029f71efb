"""Slots without a request cost nothing where kernels can skip them, and change no bits of the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paceline.auto import SamplingDecoder
from paceline.core.acceptance.match import Match
from paceline.core.protocols import finish
from paceline.core.sampling import IDLE_ROW, Sampling, sampling_tensors
from paceline.core.types import PAD, Commit, DraftShape, Proposal, RoundLimits
from paceline.draft.model import ModelDrafter
from paceline.draft.vocab_map import VocabMap
from paceline.target.verifier import CompiledVerifier
from tests.decoder.tiny import Workshop, fresh

PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3, 2, 3], [7, 7], [1, 1, 2]]


def rows_written(decoder: SamplingDecoder, call: Callable[..., Any], *given: object, **named: object) -> list[Any]:
    """Return the result of a call, and the number of rows after the prompt that it writes in each slot."""
    caches = [one for pair in decoder.body.caches for one in pair]
    for one in caches:
        one[:, :, len(PROMPTS[0]) :] = 0
    before = [one.clone() for one in caches]
    made = call(*given, **named)
    (rows,) = {tuple((old != new).any(3).any(1).sum(1).tolist()) for old, new in zip(before, caches, strict=True)}
    return [made, list(rows)]


def test_an_idle_slot_is_neither_read_nor_written(workshop: Workshop) -> None:
    target = fresh(workshop.checkpoint(), backend="native", batch_size=4)
    verifier = CompiledVerifier(target, DraftShape.chain(0), rule=Match(), wide=False)
    first = finish(verifier.prefill(2, PROMPTS[0], sampling_tensors([Sampling()]))).token
    tokens, start = torch.zeros(4, 1, dtype=torch.int32), torch.full((4,), len(PROMPTS[0]), dtype=torch.int32)
    tokens[2, 0] = first
    commit, limits = Commit(tokens, torch.ones_like(start), start), RoundLimits([0] * 4, len(PROMPTS[0]) + 1)
    sampling = sampling_tensors([Sampling()] * 4)
    whole = verifier(commit, None, sampling, limits).tokens[2].tolist()  # the graph is made where all are seated
    for idle in ([0, 1, 3], [0], [3, 1]):
        sampling = sampling_tensors([Sampling()] * 4)
        sampling.params[idle] = torch.tensor(IDLE_ROW)
        made, rows = rows_written(target, verifier, commit, None, sampling, limits)
        assert made.tokens[2].tolist() == whole and rows == [int(slot not in idle) for slot in range(4)]


def test_rows_after_the_end_of_a_draft_are_neither_computed_nor_written(workshop: Workshop) -> None:
    """A limit, or PAD, ends a draft: the tokens are those of each draft in a separate verification."""
    target = fresh(workshop.checkpoint(), backend="native", batch_size=4)
    sampling, zeros = sampling_tensors([Sampling()] * 4), torch.zeros(4, dtype=torch.int32)
    verifier = CompiledVerifier(target, DraftShape.chain(3), rule=Match(), wide=False)
    plain = CompiledVerifier(target, DraftShape.chain(0), rule=Match(), wide=True)
    start, size = torch.full((4,), len(PROMPTS[0]), dtype=torch.int32), len(PROMPTS[0]) + 1
    token = torch.tensor(
        [[finish(verifier.prefill(slot, PROMPTS[0], sampling_tensors([Sampling()]))).token] for slot in range(4)]
    ).int()
    commit, right = Commit(token, torch.ones_like(zeros), start), [token]
    for step in range(3):  # the right drafts, so that all rows decide
        made = plain(
            replace(commit, tokens=right[-1], first_row=start + step), None, sampling, RoundLimits([0] * 4, size)
        )
        right.append(made.tokens[:, :1])
    commit = Commit(torch.nn.functional.pad(token, (0, 3), value=PAD), torch.ones_like(zeros), start)
    drafts = torch.cat(right[1:], 1)
    drafts[3, 1] = PAD
    made, rows = rows_written(target, verifier, commit, Proposal(drafts), sampling, RoundLimits([3, 0, 2, 3], size))
    assert made.count.tolist() == [4, 1, 3, 2]
    assert made.tokens[0, :3].tolist() == drafts[0].tolist() and made.tokens[2, :2].tolist() == drafts[2, :2].tolist()
    assert rows == [4, 1, 3, 2]


def test_a_draft_model_drafts_no_further_than_a_limit(workshop: Workshop) -> None:
    decoder = fresh(workshop.checkpoint("draft"), backend="native", batch_size=4)
    size = decoder.config.vocab_size
    drafter = ModelDrafter(decoder, 4, vocabulary=VocabMap(size, size))
    step, sampling = drafter.step(decoder.n_positions, "full"), sampling_tensors([Sampling()] * 4)
    for slot in range(4):
        drafter.add_request(slot, PROMPTS[0])
    tokens = torch.tensor([[3, PAD, PAD], [3, 5, PAD], [3, 5, 9], [3, 5, 9]], dtype=torch.int32)
    count, start = torch.tensor([1, 2, 3, 3], dtype=torch.int32), torch.full((4,), len(PROMPTS[0])).int()
    (every,) = step(tokens, count, start, sampling.params, sampling.seeds)
    limit = torch.tensor([0, 1, 3, 4], dtype=torch.int32)
    (drafts,), rows = rows_written(decoder, step, tokens, count, start, sampling.params, sampling.seeds, limit=limit)
    for slot, deep in enumerate(limit.tolist()):
        assert torch.equal(drafts[slot, :deep], every[slot, :deep])
    assert rows == [1, 2, 3 + 2, 3 + 3], "read and drafted"
