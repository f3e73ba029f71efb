"""The definitions of acceptance: identities among them, and the same figures as a generator's own statistics."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.experiments.definitions import Acceptance, Draft, from_statistics
from tests.contract.drafters import ROWS, Home
from tests.decoder.tiny import Workshop

DRAFTS = st.lists(
    st.integers(1, 6).flatmap(lambda drafted: st.builds(Draft, st.just(drafted), st.integers(0, drafted))), max_size=30
)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("models"))


@given(DRAFTS, st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_identities(drafts: list[Draft], undrafted: int) -> None:
    accepted = sum(draft.accepted for draft in drafts)
    rounds = len(drafts) + undrafted
    figures = Acceptance(tuple(drafts), rounds, 1 + rounds + accepted)
    positions = figures.positions
    assert sum(position.unconditional for position in positions) == pytest.approx(figures.mean_acceptance_length - 1)
    assert sum(position.accepted for position in positions) == accepted
    assert sum(position.tested for position in positions) == figures.num_tested_tokens
    assert sum(figures.histogram) == figures.num_drafts
    assert sum(length * count for length, count in enumerate(figures.histogram)) == accepted
    assert figures.draft_acceptance_rate <= figures.conditional_acceptance_rate <= 1
    assert 1 <= figures.tokens_per_round <= figures.mean_acceptance_length
    if drafts and len({draft.drafted for draft in drafts}) == 1:  # one length: a product of the conditional rates
        product = 1.0
        for position in positions:
            product *= position.conditional
            assert position.unconditional == position.of_drafted == pytest.approx(product)


def test_pooled_is_of_all_drafts_and_no_mean_of_means() -> None:
    short, long = Acceptance((Draft(2, 2),), 1, 4), Acceptance((Draft(2, 0),) * 3, 3, 4)
    pooled = Acceptance.pooled([short, long])
    assert pooled.mean_acceptance_length == 1 + 2 / 4
    assert pooled.new_tokens == 8


@pytest.mark.parametrize("name", ["ngram", "model", "model, in doubt", "EAGLE 3 dynamic tree", "none"])
def test_same_figures_as_the_statistics_of_a_call(name: str, workshop: Workshop, tmp_path: Path) -> None:
    """Drafts that are too long for what is left of a text, and texts that end inside of a draft, included."""
    with ExitStack() as stack:
        row = ROWS[name]
        generator = row.make(Home(workshop, tmp_path, stack, 1), row.depths[-1])
        parts = []
        for prompt in ([5, 9, 5, 9, 5], [7, 7, 8, 7, 7]):
            stream = generator.stream([prompt], max_new_tokens=23, eos_token_id=[3, 40])
            parts.append(Acceptance.of(stream))
            own, counted = parts[-1], generator.statistics
            for key, value in from_statistics(counted).items():
                assert getattr(own, key) == pytest.approx(value), key
            assert own.num_rounds == counted.num_rounds and own.new_tokens == counted.new_tokens
            assert [p.accepted for p in own.positions] == counted.num_accepted_tokens_per_pos
            assert [p.drafted for p in own.positions] == counted.num_draft_tokens_per_pos
            assert list(own.histogram) == counted.acceptance_histogram
        assert name == "none" or Acceptance.pooled(parts).num_drafts
