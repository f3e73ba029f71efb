"""Rejection sampling promises a distribution and not the tokens; but a seed is a seed, and greedy is greedy."""

from __future__ import annotations

import pytest

from paceline import SpeculativeGenerator
from tests.decoder.tiny import Workshop
from tests.equality.settings import PROCESSORS, SETTINGS, assert_rolled_back, plain, run, stumbling, texts

BACKENDS = ["eager", "native"]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_same_seed_gives_the_same_text(workshop: Workshop, backend: str, setting: str) -> None:
    draft, target = workshop.pair(backend=backend)
    generator = SpeculativeGenerator(draft, target, k=4, acceptor="reject")
    once, twice = (run(generator, SETTINGS[setting]) for _ in range(2))
    assert texts(once) == texts(twice)
    assert_rolled_back(once)
    if setting != "greedy":
        other = run(generator, {**SETTINGS[setting], "seed": 99})
        assert texts(other) != texts(once)


@pytest.mark.parametrize("k", [1, 4])
def test_greedy_rejection_is_greedy_decoding(workshop: Workshop, k: int) -> None:
    draft, target = workshop.pair()
    known = plain(target, {})
    for source in (draft, "ngram", stumbling(known)):
        generator = SpeculativeGenerator(source, target, k=k, acceptor="reject")  # type: ignore[arg-type]
        assert texts(run(generator, {})) == known


def test_greedy_rejection_is_greedy_decoding_on_compiled_graphs(workshop: Workshop) -> None:
    draft, target = workshop.pair(backend="native")
    assert texts(run(SpeculativeGenerator(draft, target, k=4, acceptor="reject"), {})) == plain(target, {})


@pytest.mark.parametrize("name", ["repetition penalty", "no repeated n-grams"])
def test_greedy_rejection_under_processors(workshop: Workshop, name: str) -> None:
    draft, target = workshop.pair()
    known = plain(target, PROCESSORS[name]())
    for source in (draft, "ngram"):
        generator = SpeculativeGenerator(source, target, k=4, acceptor="reject")
        assert texts(run(generator, PROCESSORS[name]())) == known
