"""Acceptance by coins: the rate is the one asked for, runs repeat, and every output is labelled as simulated."""

from __future__ import annotations

import logging

import pytest
import torch

from paceline import FunctionDrafter, SpeculativeGenerator, SyntheticAcceptance
from paceline.core.errors import ConfigurationError
from tests.fakes import Checked, TableDecoder, near, table

V = 12
TARGET = table(V, seed=0, spread=2.0)
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6], [7, 8]]


@pytest.mark.parametrize(("alpha", "heat"), [(0.0, {}), (0.6, {"do_sample": True, "seed": 3}), (1.0, {})])
def test_tokens_per_round_follow_the_formula(alpha: float, heat: dict) -> None:
    """E = (1 - alpha^(k+1)) / (1 - alpha), for drafts of any quality."""
    k, wanted = 4, {0.0: 1.0, 0.6: 2.306, 1.0: 5.0}[alpha]
    for draft in (
        TableDecoder(near(TARGET, seed=1, spread=0.6), slots=4, kv_buckets=(512,)),
        FunctionDrafter(lambda _: [1] * k, k),
    ):
        target = TableDecoder(TARGET, slots=4, kv_buckets=(512,))
        made = Checked(draft, target, k=k, acceptor=SyntheticAcceptance(alpha))
        made.sample(PROMPTS, max_new_tokens=400 if 0 < alpha < 1 else 60, **heat)
        assert made.statistics.tokens_per_round == pytest.approx(wanted, rel=0.12)
        assert not made.statistics.lossless
        assert made.statistics.to_dict()["acceptor"] == "synthetic"


def test_a_simulated_run_is_reproducible_and_labelled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        made = SpeculativeGenerator("ngram", TableDecoder(TARGET), k=3, acceptor=SyntheticAcceptance(0.5))
    assert "does not follow the target's distribution" in caplog.text
    first, second = (made.sample([[1, 2, 1]], max_new_tokens=40, seed=5) for _ in range(2))
    assert torch.equal(first, second)


def test_unsupported_simulations_are_rejected() -> None:
    with pytest.raises(ConfigurationError, match="a probability"):
        SpeculativeGenerator("ngram", TableDecoder(TARGET), acceptor=SyntheticAcceptance(1.5))
    with pytest.raises(ConfigurationError, match="on the device"):
        SpeculativeGenerator("ngram", TableDecoder(TARGET), acceptor=SyntheticAcceptance(0.5)).sample(
            [[1, 2]], repetition_penalty=1.5
        )
