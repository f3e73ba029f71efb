"""Lengths are exact, contexts are not overrun, rows come and go, poison is harmless."""

from __future__ import annotations

from itertools import count

import pytest

from paceline import FunctionDrafter, NgramDrafter, SpeculativeGenerator
from paceline.core.errors import ConfigurationError
from tests.fakes import Checked, TableDecoder, near, table
from tests.orchestrator.drafting import oracle
from tests.sampled import run, texts

V, N = 12, 24
TARGET = table(V, seed=3, spread=2.0)
DRAFT = near(TARGET, seed=4, spread=0.5)
LONG = [(7 * i + i * i) % V for i in range(N - 1)]


def target(slots: int = 1) -> TableDecoder:
    return TableDecoder(TARGET, slots=slots, kv_buckets=(N,))


def whole(prompt: list[int]) -> list[int]:
    """All positions filled."""
    return texts(run(SpeculativeGenerator(None, target()), [prompt]))[0]


@pytest.mark.parametrize("drafter", ["self", "oracle", "ngram", "none"])
@pytest.mark.parametrize(
    ("new", "length"), [(None, None), (1, None), (2, 13), (5, None), (6, N), (40, 6), (None, 7), (40, N), (None, 13)]
)
def test_length_limits_are_exact(drafter: str, new: int | None, length: int | None) -> None:
    """Lengths at, before and after the border of a round of five tokens; either limit may come first."""
    prompt = LONG[:5]
    k = 4
    sources = {
        "self": target(),
        "oracle": FunctionDrafter(oracle([whole(prompt)], k), k),
        "ngram": NgramDrafter(k),
        "none": None,
    }
    done = run(Checked(sources[drafter], target(), k=k), [prompt], max_new_tokens=new, sequence_length=length)
    size = min(length or N, 5 + (new or N))
    assert texts(done) == [whole(prompt)[:size]]
    assert done.finish_reasons == ["length"]


@pytest.mark.parametrize("size", [1, 8, 9, 17, N - 5, N - 1])
@pytest.mark.parametrize("k", [0, 4, 30])
def test_prompts_of_every_length_fill_all_positions(size: int, k: int) -> None:
    for source in (target(), NgramDrafter(max(k, 1)), None):
        done = run(Checked(source, target(), k=k), [LONG[:size]])
        assert texts(done) == [whole(LONG[:size])]
        assert done.lengths == [N]


@pytest.mark.parametrize("size", [1, 6, 7, 8, 9, 10, 11, N - 1])
@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_a_short_context_draft_stops_drafting_and_the_text_continues(size: int, acceptor: str) -> None:
    draft = TableDecoder(TARGET, kv_buckets=(10,))
    done = run(Checked(draft, target(), k=3, acceptor=acceptor), [LONG[:size]])
    assert texts(done) == [whole(LONG[:size])]
    assert done.statistics.num_accepted_tokens == done.statistics.num_draft_tokens
    assert (done.statistics.num_draft_tokens > 0) == (size < 10)


def test_rows_of_all_lengths_share_a_draft_of_short_context() -> None:
    draft = TableDecoder(DRAFT, slots=3, kv_buckets=(10,))
    prompts = [LONG[:size] for size in (1, 15, 8, 10, 9, 3, N - 1)]
    assert texts(run(Checked(draft, target(3), k=3), prompts)) == [whole(prompt) for prompt in prompts]


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_rows_start_and_finish_in_different_rounds(slots: int) -> None:
    prompts = [LONG[:size] for size in (5, 1, 9, 3, 20, 2, 7)]
    ends = [whole(prompt)[len(prompt) + 2] for prompt in prompts]
    wanted = [_cut(whole(prompt), len(prompt), ends[0]) for prompt in prompts]
    draft = TableDecoder(DRAFT, slots=slots, kv_buckets=(N,))
    for source in (draft, NgramDrafter(4), None):
        done = run(Checked(source, target(slots), k=4), prompts, eos_token_id=ends[0], pad_token_id=0)
        assert texts(done) == wanted
        for row, size in zip(done.sequences, done.lengths, strict=True):
            assert set(row[size:].tolist()) <= {0}
        assert len({*done.lengths}) > 1
        assert done.finish_reasons == ["stop" if row[-1] == ends[0] else "length" for row in wanted]


def _cut(text: list[int], prompt: int, eos: int) -> list[int]:
    at = next((i for i in range(prompt, len(text)) if text[i] == eos), len(text) - 1)
    return text[: at + 1]


POISON = {
    "too large": lambda _: [V, V + 1],
    "far too large": lambda _: [1 << 40],
    "negative": lambda _: [-1, -5],
    "behind a good one": lambda _: [0, V, 0, -1],
    "nothing": lambda _: [],
    "None": lambda _: None,
    "without end": lambda _: count(),
    "too many": lambda _: [0] * 100,
}
RULES = [("match", False), ("match", True), ("reject", False), ("reject", True), ("typical", False)]
"""Acceptance, and whether scores are asked for; "typical" has none."""


@pytest.mark.parametrize("name", POISON)
@pytest.mark.parametrize(("acceptor", "scores"), RULES)
def test_an_invalid_drafter_changes_no_token(name: str, acceptor: str, scores: bool) -> None:
    generator = Checked(FunctionDrafter(POISON[name], 3), target(2), acceptor=acceptor)
    done = run(generator, [LONG[:4], LONG[:6]], output_scores=scores)
    assert texts(done) == [whole(LONG[:4]), whole(LONG[:6])]


@pytest.mark.parametrize("gap", [-1, V, 1 << 30])
@pytest.mark.parametrize(("acceptor", "scores"), RULES)
def test_tokens_after_a_gap_in_a_proposal_are_not_verified(gap: int, acceptor: str, scores: bool) -> None:
    """The tokens around the gap are right, but the window has another one between them."""
    prompt = LONG[:4]
    knows = oracle([whole(prompt)], 3)
    source = FunctionDrafter(lambda text: [*knows(text)[:1], gap, *knows(text)[1:]], 4)
    generator = Checked(source, target(), k=4, acceptor=acceptor)
    assert texts(run(generator, [prompt], output_scores=scores)) == [whole(prompt)]


@pytest.mark.parametrize("found", [7, ["a"], [float("inf")]], ids=str)
def test_invalid_drafting_results_are_named(found: object) -> None:
    with pytest.raises(ConfigurationError, match="draft: expected token ids or None from the drafting"):
        run(SpeculativeGenerator(lambda _: found, target(), k=2), [LONG[:4]])  # type: ignore[arg-type, return-value]


def test_a_drafter_that_raises_leaves_the_decoder_free() -> None:
    def broken(text: list[int]) -> list[int]:
        raise LookupError("no idea")

    decoder = target()
    with pytest.raises(LookupError):
        run(SpeculativeGenerator(FunctionDrafter(broken, 2), decoder), [LONG[:4]])
    assert texts(run(SpeculativeGenerator(None, decoder), [LONG[:4]])) == [whole(LONG[:4])]
