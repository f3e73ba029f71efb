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
    ("k", "size", "new", "length"),
    [
        *(
            (4, 5, *limits)
            for limits in ((1, None), (2, 13), (5, None), (6, N), (40, 6), (None, 7), (40, N), (None, 13))
        ),
        *((k, size, None, None) for k in (0, 4, 30) for size in (1, 5, 8, 9, 17, N - 5, N - 1)),
    ],
)
def test_length_limits_are_exact(drafter: str, k: int, size: int, new: int | None, length: int | None) -> None:
    """Lengths at, before and after the border of a round of five tokens; either limit may come first, or neither."""
    prompt = LONG[:size]
    sources = {
        "self": target(),
        "oracle": FunctionDrafter(oracle([whole(prompt)], k), k),
        "ngram": NgramDrafter(max(k, 1)),
        "none": None,
    }
    done = run(Checked(sources[drafter], target(), k=k), [prompt], max_new_tokens=new, sequence_length=length)
    assert texts(done) == [whole(prompt)[: min(length or N, size + (new or N))]]
    assert done.finish_reasons == ["length"]


@pytest.mark.parametrize("size", [1, 6, 7, 8, 9, 10, 11, N - 1])
@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_a_short_context_draft_stops_drafting_and_the_text_continues(size: int, acceptor: str) -> None:
    draft = TableDecoder(TARGET, kv_buckets=(10,))
    done = run(Checked(draft, target(), k=3, acceptor=acceptor), [LONG[:size]])
    assert texts(done) == [whole(LONG[:size])]
    assert done.statistics.num_accepted_tokens == done.statistics.num_draft_tokens
    assert (done.statistics.num_draft_tokens > 0) == (size < 10)


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
